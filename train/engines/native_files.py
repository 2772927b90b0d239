"""Files of torch's own strategies.

    --save dcp    step-N/{.metadata, __R_0.distcp}   torch.distributed.checkpoint.save
    --save full   step-N/model.pt                    rank 0's torch.save of the gathered state
    --save ranks  step-N/{model,optim,extra_state}_world_size_W_rank_R.pt, fsdp_config.json, like verl

The state is {"model", "optimizer", "lr_scheduler", "train_state", "rng_state": {rank: ...}}. --keys chooses the
optimizer's keys:

    nested   get_optimizer_state_dict             state.<fqn>.exp_avg, param_groups.0.lr, param_groups.0.params = names
    flat     flatten_optimizer_state_dict=True    state.<fqn>.exp_avg, param_groups.<fqn>.lr

Rank files use numbers, like optimizer.state_dict(): state.0.exp_avg, param_groups.0.params = numbers.
"""

import contextlib
import json
import re
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.fsdp import FullyShardedDataParallel, ShardedStateDictConfig, StateDictType
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from train import launch, optimizers, randomness

_RANDOM = {"cpu": "rng_state", "cuda": "cuda_rng_state"}


def save(engine: Any, folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    if engine.config.saving == "ranks":
        _save_ranks(engine, folder)
    elif engine.config.saving == "full":
        state = _state(engine, engine.config.keys, full=True)
        if dist.get_rank() == 0:
            torch.save(state, folder / "model.pt")
    else:
        dcp.save(_state(engine, engine.config.keys, full=False), checkpoint_id=folder)


def load(engine: Any, folder: Path) -> None:
    if (folder / ".metadata").is_file():
        saved = dcp.FileSystemReader(folder).read_metadata().state_dict_metadata
        keys = "flat" if f"optimizer.param_groups.{engine.group_names[0][0]}.lr" in saved else "nested"
        state = _state(engine, keys, full=False)
        for key in ("lr_scheduler", *_RANDOM.values()):  # a conversion may drop them, or this rank's state
            if not any(f"{key}.{name}" in saved for name in state.get(key, ())):
                state.pop(key, None)
        # By default, torch drops FSDP1's tensors on ranks without a part of them, and takes the checkpoint for one from
        # torch 2.3.
        dcp.load(state, checkpoint_id=folder, planner=dcp.DefaultLoadPlanner(flatten_sharded_tensors=False))
        _set_state(engine, state, keys, full=False)
    elif (folder / "model.pt").is_file() or (folder / "pytorch_model_fsdp.bin").is_file():
        state = _whole_state(folder)
        uneven = engine.config.strategy == "tp-fsdp"  # torch 2.13 can't distribute tensors with uneven shards
        if uneven:
            state = _scattered(_state(engine, "nested", full=False), state)
        _set_state(engine, state, "nested", full=not uneven)
    else:
        _load_ranks(engine, folder)


def _whole_state(folder: Path) -> dict[str, Any]:
    """Load --save full, or a conversion to it (Accelerate's files and training_state.pt)."""
    if (folder / "model.pt").is_file():
        state: dict[str, Any] = torch.load(folder / "model.pt", map_location="cpu", mmap=True)
        return state
    files = {"model": "pytorch_model_fsdp.bin", "optimizer": "optimizer.bin"}
    state = {name: torch.load(folder / file, map_location="cpu", mmap=True) for name, file in files.items()}
    rest = torch.load(folder / "training_state.pt", map_location="cpu")
    counted = {"step": rest.pop("step"), "sequences": rest.pop("global_samples", None)}
    return {"train_state": {name: count for name, count in counted.items() if count is not None}} | rest | state


def _state(engine: Any, keys: str, full: bool) -> dict[str, Any]:
    model, optimizer = get_state_dict(engine.model, engine.optimizer, options=_options(keys, full))
    state: dict[str, Any] = {"model": model, "optimizer": optimizer}
    if engine.scheduler:
        state["lr_scheduler"] = engine.scheduler.state_dict()
    state["train_state"] = {"step": engine.step, "sequences": engine.sequences}
    everyone = {dist.get_rank(): randomness.torch_states()}
    if full:
        everyone = dict(enumerate(launch.gather_objects(randomness.torch_states())))
    for kind in randomness.torch_states():
        state[_RANDOM[kind]] = {str(rank): found[kind] for rank, found in everyone.items()}
    return state


def _set_state(engine: Any, state: dict[str, Any], keys: str, full: bool) -> None:
    set_model_state_dict(engine.model, state["model"], options=_options(keys, full))
    optimizer = state["optimizer"]
    if full and not any(optimizer["state"].values()):  # plain SGD has no state, but torch would look for a tensor
        for group, saved in zip(engine.optimizer.param_groups, optimizer["param_groups"], strict=True):
            group.update({key: value for key, value in saved.items() if key != "params"})
    else:
        set_optimizer_state_dict(engine.model, engine.optimizer, optimizer, options=_options(keys, full))
    engine.step = int(state["train_state"]["step"])
    if engine.scheduler:  # a conversion keeps only the schedule's position
        fresh = optimizers.after(engine.step, engine.scheduler.state_dict())
        engine.scheduler.load_state_dict(state.get("lr_scheduler", fresh))
    # A conversion may keep only the step.
    engine.sequences = int(state["train_state"].get("sequences", engine.step * engine.config.batch))
    rank = str(dist.get_rank())
    random = {kind: state[key][rank] for kind, key in _RANDOM.items() if rank in state.get(key, ())}
    if "cpu" in random:
        randomness.restore(random)


def _options(keys: str, full: bool) -> StateDictOptions:
    return StateDictOptions(full_state_dict=full, flatten_optimizer_state_dict=keys == "flat")


def _scattered(sharded: Any, whole: Any) -> Any:
    if isinstance(sharded, dict):
        return {key: _scattered(sharded[key], value) if key in sharded else value for key, value in whole.items()}
    if not isinstance(sharded, DTensor):
        return whole
    mesh, placements = sharded.device_mesh, sharded.placements
    sizes, offsets = compute_local_shape_and_global_offset(whole.shape, mesh, placements)
    part = whole[tuple(slice(offset, offset + size) for offset, size in zip(offsets, sizes, strict=True))]
    part = part.to(sharded.device, copy=True)
    return DTensor.from_local(part, mesh, placements, shape=sharded.shape, stride=sharded.stride(), run_check=False)


def _rank_file(folder: Path, kind: str) -> Path:
    return folder / f"{kind}_world_size_{dist.get_world_size()}_rank_{dist.get_rank()}.pt"


def _sharded(engine: Any) -> contextlib.AbstractContextManager[Any]:
    """Make FSDP1's state_dict() sharded. Other strategies always shard it."""
    if engine.config.strategy != "fsdp1":
        return contextlib.nullcontext()
    kind = StateDictType.SHARDED_STATE_DICT
    return FullyShardedDataParallel.state_dict_type(engine.model, kind, ShardedStateDictConfig())


def _save_ranks(engine: Any, folder: Path) -> None:
    with _sharded(engine):
        torch.save(engine.model.state_dict(), _rank_file(folder, "model"))
    torch.save(engine.optimizer.state_dict(), _rank_file(folder, "optim"))
    schedule = engine.scheduler.state_dict() if engine.scheduler else None
    torch.save({"lr_scheduler": schedule, "rng": randomness.torch_states()}, _rank_file(folder, "extra_state"))
    if dist.get_rank() == 0:
        version = 1 if engine.config.strategy == "fsdp1" else 2
        facts = {"FSDP_version": version, "world_size": dist.get_world_size()}
        (folder / "fsdp_config.json").write_text(json.dumps(facts, indent=4) + "\n")


def _load_ranks(engine: Any, folder: Path) -> None:
    model, optimizer, extra = (
        torch.load(_rank_file(folder, kind), map_location="cpu", weights_only=False)
        for kind in ("model", "optim", "extra_state")
    )
    with _sharded(engine):
        engine.model.load_state_dict(model)
    engine.optimizer.load_state_dict(optimizer)
    if engine.scheduler and extra["lr_scheduler"]:
        engine.scheduler.load_state_dict(extra["lr_scheduler"])
    randomness.restore(extra["rng"])
    step = re.search(r"(\d+)$", folder.name)
    if step is None:
        raise ValueError(f"{folder.name} does not end in the step number")
    engine.step = int(step[1])
    engine.sequences = engine.step * engine.config.batch
