"""Description of a checkpoint in Megatron's `torch_dist` format, from its files."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ckpt.base.errors import NotFoundError
from ckpt.move.files import confined
from ckpt.plan.checkpoint import MASTER, WEIGHT, Checkpoint, ReadRequest
from ckpt.plan.checkpoint import MEGATRON as NAMESPACE
from ckpt.runs.model_files import read_config
from ckpt.runs.yaml_files import read_run_config
from converters.megatron.dist import fsdp as megatron_fsdp
from converters.megatron.dist import torch_dcp
from converters.megatron.dist.adapter_run import NEMOS_BASE, as_adapter, has_adapter, without_optimizer
from converters.megatron.dist.bridge import (
    args_of,
    check_bridge_run,
    model_settings,
    note_on_class,
    note_on_config,
    read_bridge_run,
    with_sizes,
)
from converters.megatron.dist.folder import (
    CONFIG_1,
    CONTEXT,
    MODEL,
    RUN_CONFIG,
    RUN_HF,
    RUN_TOKENIZER,
    TOKENIZER,
    TRAIN_STATE,
    is_iteration,
    is_nemo,
    is_nemo_1,
    is_torch_dcp_iteration,
)
from converters.megatron.dist.nemo_1 import model_fields
from converters.megatron.dist.optimizer import OF_BUFFERS, is_optimizers, read_optimizer
from converters.megatron.dist.options import SlotOptions
from converters.megatron.dist.read import DistReading, read_folder
from converters.megatron.entries import FP8, OF_RANKS, read_state
from converters.megatron.optimizer import without_states
from converters.megatron.remainders import with_masters
from converters.names.megatron.facts import BridgeRun, MegatronFacts
from converters.names.megatron.model.spelling import EMBEDDING, OUTPUT, is_outside_language_model
from converters.names.megatron.model.splits import GateBlocks
from converters.names.megatron.shapes_from_args import check_args


def read_iteration(path: Path, request: ReadRequest) -> Checkpoint:
    is_adapter, bridge = False, None
    if is_iteration(path):
        reading = read_folder(path, request.accepted)
        is_adapter = has_adapter(fqn for fqn, _ in reading.placed)
        if not is_adapter and (path / NEMOS_BASE).is_file():
            raise NotFoundError(
                "NeMo 2 adapters in torch_dist files are not supported: their names are unknown",
                path=path,
                found=f"{NEMOS_BASE} beside the weights",
                hint="use NeMo's own llm.export_ckpt(path, target='hf-peft') to make a PEFT folder",
            )
        bridge = None if is_adapter or reading.args or is_nemo(path) else _read_bridges(reading)
        optimizers = without_optimizer(reading) if is_adapter else read_optimizer(reading)
    elif is_torch_dcp_iteration(path):
        reading, optimizers = torch_dcp.read_folder(path, request.accepted)
    else:
        reading, optimizers = megatron_fsdp.read_folder(path, request.accepted)
    tensors, computed = with_masters(reading.tensors(), path)
    parameters = [fqn for fqn, role in tensors if role in (WEIGHT, MASTER)]
    beside = [path / RUN_TOKENIZER, path / RUN_HF] if bridge else []
    if is_nemo(path):
        beside = [path.parent / CONTEXT, path.parent / CONTEXT / TOKENIZER]
    folders = tuple(p for p in (request.config, path, path.parent, *beside) if p)
    config = read_config(folders)
    hub = note_on_config(bridge) if bridge and config is None else None
    own = note_on_class(bridge.config["model"] if bridge else _nemos_model(path))
    world_size = reading.args.get("world_size")
    scales = {FP8: reading.scales} if reading.scales else {}
    checkpoint = Checkpoint(
        path=str(path),
        format="megatron-dist",
        tensors=tensors,
        files=tuple(reading.data.files.values()),
        framework="Megatron-Bridge" if bridge else "Megatron-LM" if reading.args else "megatron-core",
        world_size=world_size if type(world_size) is int and world_size > 0 else reading.data.ranks,
        bound_to_ranks=reading.sharding in OF_BUFFERS or reading.blocks != GateBlocks(),
        namespace=NAMESPACE,
        ties={OUTPUT: EMBEDDING} if EMBEDDING in parameters and OUTPUT not in parameters else {},
        state=read_state({**reading.common, **scales}, reading.args, optimizers, parameters, _per_rank(reading)),
        config=config,
        folders=tuple(str(p) for p in folders if p.is_dir()),
        notes=(
            *reading.notes,
            *reading.data.notes,
            *([hub] if hub else []),
            *([own] if own else []),
            *(() if is_adapter else without_states(tensors)),
        ),
        computed=computed,
        facts=MegatronFacts(
            own_module_order=any(is_outside_language_model(fqn) for fqn in parameters),  # keys are unordered
            bridge=bridge,
            settings=_nemos_settings(path),
            blocks=reading.blocks,
        ),
    )
    if is_adapter:
        return as_adapter(checkpoint, path, request.read(SlotOptions).adapter_slot)
    settings = {} if is_nemo_1(path) else with_sizes(_nemos_settings(path))
    check_args(reading.args or settings, checkpoint.shapes, path)
    return checkpoint


def _read_bridges(reading: DistReading) -> BridgeRun | None:
    run = read_bridge_run(reading.folder)
    if run is not None:
        shapes = {fqn: shape for (fqn, role), (shape, _) in reading.shapes.items() if role == WEIGHT}
        check_bridge_run(run, reading.common.get("iteration"), shapes)
        reading.settings = args_of(run, reading.data.ranks, by_stages=reading.sharding in OF_BUFFERS)
        for name in (RUN_CONFIG, TRAIN_STATE):
            reading.data.add_file(str(reading.folder / name))
    return run


def _nemos_settings(path: Path) -> Mapping[str, Any]:
    if is_nemo_1(path):
        return model_settings(model_fields(read_run_config(confined(path.parent, CONFIG_1))))
    config = _nemos_model(path).get("config")
    return model_settings(config) if isinstance(config, Mapping) else {}


def _nemos_model(path: Path) -> Mapping[str, Any]:
    if is_nemo_1(path) or not is_nemo(path) or not (path.parent / CONTEXT / MODEL).is_file():
        return {}
    return read_run_config(confined(path.parent, f"{CONTEXT}/{MODEL}"))


def _per_rank(reading: DistReading) -> dict[str, dict[str, Any]]:
    """Return each rank's own entries. Megatron-FSDP's files use keys like `(0, 1)`."""
    common = {name: value for name in OF_RANKS if isinstance(value := reading.common.get(name), Mapping)}
    return {
        name: {str(key): value for key, value in values.items()}
        for name, values in common.items()
        if all(str(key).startswith("(") for key in values)
    } | {
        key: {str(place).rpartition("/")[2]: value for place, value in values.items()}
        for key, values in reading.objects.items()
        if not is_optimizers(key)
    }
