"""Description of a DeepSpeed pipeline checkpoint from its files.

Format facts: see `converters.deepspeed.pipeline.format`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ckpt.containers.sources import RankFile
from ckpt.plan.checkpoint import MEGATRON as NAMESPACE
from ckpt.plan.checkpoint import Checkpoint, QuantizedStates, ReadRequest, TrainingState
from ckpt.runs.model_files import read_config
from converters.deepspeed.facts import DeepSpeedFacts
from converters.deepspeed.keys import MODEL_FILE, MODEL_STATE, OF_SLICES, OPTIMIZER_FILE, PIPELINE, UNIVERSAL_INFO
from converters.deepspeed.pipeline.args import attributes, current
from converters.deepspeed.pipeline.folder import list_folder
from converters.deepspeed.pipeline.read import PipelineReading, read_layers, read_partitions, read_slices, stage_sizes
from converters.deepspeed.rank_files import known_structure
from converters.names.families.config import Config
from converters.names.megatron.architectures.gpt_neox import parallel_residual
from converters.names.megatron.model.spelling import EMBEDDING, OUTPUT


def read_step(path: Path, request: ReadRequest) -> Checkpoint:
    reading = PipelineReading(list_folder(path))
    with known_structure(path):
        return _read(reading, path, request)


def _read(reading: PipelineReading, path: Path, request: ReadRequest) -> Checkpoint:
    read_layers(reading)
    slices = read_slices(reading)
    optimizer = read_partitions(reading, slices)
    first = slices[0]
    folders = tuple(p for p in (request.config, path, path.parent) if p)
    config = read_config(folders)
    dp, step = (first.content.get(name) for name in ("dp_world_size", "global_steps"))
    version = first.content.get("ds_version")
    return Checkpoint(
        path=str(path),
        format="megatron-deepspeed",
        tensors=reading.tensors(),
        files=reading.sources.files,
        framework=f"deepspeed {version}" if version else "deepspeed",
        tag=path.name,
        facts=DeepSpeedFacts(reading.own_module_order),
        world_size=len(slices) * dp if isinstance(dp, int) else None,
        namespace=NAMESPACE,
        ties={OUTPUT: EMBEDDING} if reading.layers.tied else {},
        state=TrainingState.of_entries(
            "deepspeed",
            _entries(reading, slices, optimizer, config),
            step=step if isinstance(step, int) else None,
            engine_version=version,
            **reading.states.recorded(),
        ),
        config=config,
        folders=tuple(str(p) for p in folders if p.is_dir()),
        notes=(*reading.notes, *reading.sources.notes),
        computed=reading.states.computed,
        quantized=QuantizedStates(reading.states.quantized),
        unread=reading.states.left_out(),
    )


def _entries(
    reading: PipelineReading, slices: Sequence[RankFile], optimizer: RankFile | None, config: Mapping[str, Any] | None
) -> dict[str, Any]:
    """Return the run's training state by key.

    `args` are also under Megatron-LM's current names. `pipeline` has the facts for writing the same layout again.
    """
    first = slices[0].content
    items = {name: first[name] for name in (*MODEL_STATE, "ds_config") if first.get(name) is not None}
    if optimizer is not None:
        items |= {k: v for k, v in optimizer.content.items() if k not in OPTIMIZER_FILE and v is not None}
    known = MODEL_FILE - {UNIVERSAL_INFO} | set(OF_SLICES)  # here the client passes it
    client = {str(name): value for name, value in first.items() if name not in known and value is not None}
    items |= {"client_state": client} if client else {}
    items["args"] = current(attributes(first.get("args"))) | {
        "tensor_model_parallel_size": reading.folder.tp,
        "pipeline_model_parallel_size": reading.folder.pp,
        "untie_embeddings_and_output_weights": not reading.layers.tied,
    }
    if reading.layers.neox:
        is_known = (config or {}).get("model_type") == "gpt_neox"
        residual = parallel_residual(Config(config or {})) if is_known else {}
        items["args"] = {"gpt_j_residual": None} | residual | items["args"]
    of_slices = {
        name: {file.rank: file.content[name] for file in slices if file.content.get(name) is not None}
        for name in OF_SLICES
    }
    items[PIPELINE] = {
        "kinds": {number: kind.value for number, kind in reading.layers.kinds.items()},
        "neox": reading.layers.neox,
        "stages": stage_sizes(reading, slices),
        "recomputed": reading.recomputed,
        "of_slices": {name: found for name, found in of_slices.items() if found},
    }
    return items
