"""Saving and loading in Megatron-LM's checkpoint formats.

    --save torch       iter_0000004/mp_rank_TT[_PPP][_EEE]/model_optim_rng.pt, with the distributed optimizer
                       also distrib_optim.pt
    --save torch_dist  iter_0000004/{.metadata, __R_K.distcp, common.pt, metadata.json}, by megatron-core itself
    --save fsdp_dtensor  iter_0000004/{.metadata, __R_K.distcp}, by torch; can't be loaded

Contents follow Megatron-LM core_v0.16.1, megatron/training/checkpointing.py: save_checkpoint, generate_state_dict,
preprocess_fsdp_dtensor_state_dict, load_checkpoint.
"""

import random
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from megatron.core import dist_checkpointing, tensor_parallel
from megatron.core import parallel_state as mpu
from megatron.core.dist_checkpointing.core import CheckpointingException
from megatron.core.dist_checkpointing.mapping import ShardedObject
from megatron.core.dist_checkpointing.serialization import get_default_save_sharded_strategy, load_sharded_metadata
from megatron.core.dist_checkpointing.strategies.fully_parallel import FullyParallelSaveStrategyWrapper
from megatron.core.dist_checkpointing.validation import StrictHandling

from train.config import UserError

#: Used by Transformer Engine modules. The stand-ins (`stand_ins`) have fewer such keys.
_EXTRA = "._extra_state"
TRACKER = "latest_checkpointed_iteration.txt"


def save(engine: Any, folder: Path) -> str:
    tag = f"iter_{engine.step:07d}"
    engine.args.iteration = engine.step
    engine.args.consumed_train_samples = engine.sequences
    (folder / tag).mkdir(parents=True, exist_ok=True)
    if engine.config.saving == "torch":
        _save_torch(engine, folder / tag)
    elif engine.config.saving == "fsdp_dtensor":
        _save_fsdp_dtensor(engine, folder / tag)
    else:
        _save_torch_dist(engine, folder / tag)
    dist.barrier()
    if dist.get_rank() == 0:
        (folder / TRACKER).write_text(str(engine.step))
    return tag


def load(engine: Any, folder: Path) -> None:
    """Load a torch or torch_dist checkpoint. Without optimizer, only set the weights and start at step 0."""
    if (folder / ".metadata").is_file():
        _load_torch_dist(engine, folder)
    else:
        _load_torch(engine, folder)


def rank_folder(folder: Path) -> Path:
    name = f"mp_rank_{mpu.get_tensor_model_parallel_rank():02d}"
    if mpu.get_pipeline_model_parallel_world_size() > 1:
        name += f"_{mpu.get_pipeline_model_parallel_rank():03d}"
    if mpu.get_expert_model_parallel_world_size() > 1:
        name += f"_{mpu.get_expert_model_parallel_rank():03d}"
    return folder / name


def _common(engine: Any) -> dict[str, Any]:
    state = {"args": engine.args, "checkpoint_version": 3.0, "iteration": engine.step}
    return state | {"num_floating_point_operations_so_far": 0}


def _keys(engine: Any) -> list[str]:
    return [f"model{number}" for number in range(len(engine.bare))] if len(engine.bare) > 1 else ["model"]


def _random_state() -> list[dict[str, Any]]:
    return [
        {
            "random_rng_state": random.getstate(),
            "np_rng_state": np.random.get_state(),
            "torch_rng_state": torch.get_rng_state(),
            "cuda_rng_state": torch.cuda.get_rng_state(),
            "rng_tracker_states": tensor_parallel.get_cuda_rng_tracker().get_states(),
        }
    ]


def _set_random_state(states: list[dict[str, Any]]) -> None:
    random.setstate(states[0]["random_rng_state"])
    np.random.set_state(states[0]["np_rng_state"])
    torch.set_rng_state(states[0]["torch_rng_state"])
    torch.cuda.set_rng_state(states[0]["cuda_rng_state"])
    tensor_parallel.get_cuda_rng_tracker().set_states(states[0]["rng_tracker_states"])


def _save_torch(engine: Any, folder: Path) -> None:
    mine = rank_folder(folder)
    mine.mkdir(parents=True, exist_ok=True)
    if engine.args.use_distributed_optimizer:  # collective: rank 0 of each data-parallel group writes
        engine.optimizer.save_parameter_state(str(mine / "distrib_optim.pt"))
    if mpu.get_expert_data_parallel_rank() != 0:
        return
    state = _common(engine)
    for key, chunk in zip(_keys(engine), engine.bare, strict=True):
        state[key] = chunk.state_dict_for_save_checkpoint()
    state["optimizer"] = engine.optimizer.state_dict()
    state["opt_param_scheduler"] = engine.scheduler.state_dict()
    state["rng_state"] = _random_state()
    torch.save(state, mine / "model_optim_rng.pt")


def _load_torch(engine: Any, folder: Path) -> None:
    mine = rank_folder(folder)
    state = torch.load(mine / "model_optim_rng.pt", map_location="cpu", weights_only=False)
    for key, chunk in zip(_keys(engine), engine.bare, strict=True):
        held = chunk.state_dict().keys()
        known = {name: value for name, value in state[key].items() if name in held or not name.endswith(_EXTRA)}
        chunk.load_state_dict(known, strict=True)
    if "optimizer" not in state:
        engine.optimizer.reload_model_params()
        return
    engine.optimizer.load_state_dict(state["optimizer"])
    if engine.args.use_distributed_optimizer:
        engine.optimizer.load_parameter_state(str(mine / "distrib_optim.pt"))
    _load_rest(engine, state)


def _load_rest(engine: Any, state: dict[str, Any]) -> None:
    for one in engine.optimizer.chained_optimizers:
        for values in one.optimizer.state.values():
            if "step" in values:  # loading leaves one tensor for all; torch's Adam would step it for each
                values["step"] = values["step"].clone()
    if "opt_param_scheduler" in state:
        engine.scheduler.load_state_dict(state["opt_param_scheduler"])
    engine.step = int(state["iteration"])
    samples = getattr(state.get("args"), "consumed_train_samples", None)
    # A conversion may keep only the step.
    engine.sequences = engine.step * engine.config.batch if samples is None else int(samples)
    if "rng_state" in state:
        _set_random_state(state["rng_state"])


def _metadata(engine: Any) -> dict[str, Any]:
    """Choose megatron-core's sharded form. Everything but the group is saved."""
    metadata: dict[str, Any] = {}
    if engine.args.use_distributed_optimizer:
        metadata["distrib_optim_sharding_type"] = engine.config.optimizer_format
        if engine.config.optimizer_format == "fully_reshardable":
            metadata["distrib_optim_fully_reshardable_mem_efficient"] = False
    return metadata | {"singleton_local_shards": False, "chained_optim_avoid_prefix": True}


def _sharded_state(engine: Any, metadata: dict[str, Any], optimizer: bool, loading: bool) -> dict[str, Any]:
    metadata = metadata | {"dp_cp_group": mpu.get_data_parallel_group(with_context_parallel=True)}
    state: dict[str, Any] = {}
    for key, chunk in zip(_keys(engine), engine.bare, strict=True):
        state[key] = chunk.sharded_state_dict(metadata=metadata)
    if optimizer:
        state["optimizer"] = engine.optimizer.sharded_state_dict(state, is_loading=loading, metadata=metadata)
        state["opt_param_scheduler"] = engine.scheduler.state_dict()
    return state


def _sharded_random_state() -> Any:
    """Return an object per pipeline and tensor rank, with experts also per data rank."""
    sizes = [mpu.get_pipeline_model_parallel_world_size(), mpu.get_tensor_model_parallel_world_size()]
    ranks = [mpu.get_pipeline_model_parallel_rank(), mpu.get_tensor_model_parallel_rank()]
    copy = mpu.get_data_parallel_rank(with_context_parallel=True)
    if mpu.get_expert_model_parallel_world_size() > 1:
        sizes.append(mpu.get_data_parallel_world_size(with_context_parallel=True))
        ranks.append(copy)
        copy = 0
    return ShardedObject("rng_state", _random_state(), tuple(sizes), tuple(ranks), replica_id=copy)


def _save_torch_dist(engine: Any, folder: Path) -> None:
    metadata = _metadata(engine)
    _warn_of_shifted_states(engine)
    try:
        state = _common(engine) | _sharded_state(engine, metadata, optimizer=True, loading=False)
    except CheckpointingException as error:  # since 0.16: ShardedTensor.flattened_range is not supported
        raise UserError(f"--optimizer-format {engine.config.optimizer_format}: megatron-core says {error}") from error
    state["rng_state"] = _sharded_random_state()
    strategy = FullyParallelSaveStrategyWrapper(
        get_default_save_sharded_strategy("torch_dist"), mpu.get_data_parallel_group(with_context_parallel=True)
    )
    dist_checkpointing.save(state, str(folder), strategy, content_metadata=metadata)


def _warn_of_shifted_states(engine: Any) -> None:
    """Warn if megatron-core saves wrong optimizer states.

    Up to 0.19.0 sharded_param_state_fully_reshardable uses positions with the padding between buckets to index tensors
    without padding. States from the second bucket on are shifted.
    """
    if not engine.args.use_distributed_optimizer or engine.config.optimizer_format != "fully_reshardable":
        return
    buffers = [buffer for one in engine.optimizer.chained_optimizers for buffer in one.buffers]
    padded = any(
        bucket.grad_data.numel() > bucket.numel_unpadded for buffer in buffers for bucket in buffer.buckets[:-1]
    )
    if padded:
        print(
            "warning: a gradient buffer has several buckets (--bucket-size, tied embeddings of several "
            "stages): megatron-core saves shifted optimizer states with --optimizer-format fully_reshardable",
            file=sys.stderr,
        )


def _load_torch_dist(engine: Any, folder: Path) -> None:
    common = dist_checkpointing.load_common_state_dict(str(folder))
    metadata = dist_checkpointing.load_content_metadata(preloaded_state_dict=common) or {}
    saved = load_sharded_metadata(str(folder))
    keys = {entry.key for entry in saved.values()}
    optimizer = any(key.startswith(("optimizer.", "chained_")) for key in keys)
    if optimizer and engine.args.use_distributed_optimizer:
        # torch Adam's states don't exist before its first step.
        for one in engine.optimizer.chained_optimizers:
            one._init_optimizer_states_with_dummy_values()
    state = _sharded_state(engine, metadata, optimizer, loading=True)
    theirs = common.get("args")
    layout = ("tensor_model_parallel_size", "pipeline_model_parallel_size", "world_size", "expert_model_parallel_size")
    same_ranks = all(getattr(theirs, name, None) == getattr(engine.args, name) for name in layout)
    if "rng_state" in keys and optimizer and same_ranks:
        state["rng_state"] = _sharded_random_state()
    loaded, missing, unexpected = dist_checkpointing.load(state, str(folder), strict=StrictHandling.RETURN_ALL)
    missing = {key for key in missing if key != "rng_state" and _EXTRA not in key}
    if missing or unexpected:
        raise ValueError(f"left over in the checkpoint: {sorted(missing)}; not in it: {sorted(unexpected)}")
    for key, chunk in zip(_keys(engine), engine.bare, strict=True):
        chunk.load_state_dict(loaded[key], strict=True)
    if not optimizer:
        engine.optimizer.reload_model_params()
        return
    engine.optimizer.load_state_dict(loaded["optimizer"])
    _load_rest(engine, common | {key: value for key, value in loaded.items() if key == "rng_state"})


def _save_fsdp_dtensor(engine: Any, folder: Path) -> None:
    # Older megatron-core versions don't have these modules.
    from megatron.core.distributed.fsdp.src.megatron_fsdp.uneven_dtensor import preprocess_state_dict_for_uneven_dtensor
    from megatron.core.transformer import fsdp_dtensor_checkpoint as handlers

    # Megatron-LM removes the outer of two modules around the model.
    sharded = engine.chunks[0].module
    state = _common(engine) | {"model": sharded.state_dict_for_save_checkpoint()}
    metadata = {"distrib_optim_sharding_type": "fsdp_dtensor"}
    state["optimizer"] = engine.optimizer.sharded_state_dict(state, metadata=metadata)
    state["opt_param_scheduler"] = engine.scheduler.state_dict()
    place = f"({mpu.get_pipeline_model_parallel_rank()}, {mpu.get_tensor_model_parallel_rank()})"
    state["rng_state"] = {place: _random_state()}
    handlers.handle_fp8_extra_state_case(state["model"])
    if engine.args.swiglu:
        halved = handlers.handle_swiglu_in_state_dict(sharded, state["model"], state["optimizer"])
        state["model"], state["optimizer"] = halved
    if engine.args.num_experts:
        state["model"] = handlers.handle_experts_in_state_dict(state["model"], engine.args.num_experts)
    preprocess_state_dict_for_uneven_dtensor(state)
    dcp.save(state, storage_writer=dcp.FileSystemWriter(folder))
