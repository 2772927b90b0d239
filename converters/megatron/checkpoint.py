"""Description of a checkpoint in Megatron-LM's `torch` format, from the ranks' files."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ckpt.plan.checkpoint import MEGATRON as NAMESPACE
from ckpt.plan.checkpoint import WEIGHT, Checkpoint, ReadRequest
from ckpt.runs.model_files import read_config
from converters.megatron.chunks import EXTRA
from converters.megatron.entries import OF_RANKS, read_state
from converters.megatron.optimizer_read import read_optimizers
from converters.megatron.read import MegatronReading, RankContent, folder_name, read_ranks
from converters.names.megatron.facts import MegatronFacts
from converters.names.megatron.model.spelling import EMBEDDING, OUTPUT
from converters.names.megatron.shapes_from_args import check_args


def read_iteration(path: Path, request: ReadRequest) -> Checkpoint:
    reading = MegatronReading(path, accepted=request.accepted)
    files = read_ranks(reading)
    optimizers = read_optimizers(reading, files)
    tensors = reading.tensors()
    order = [fqn for fqn, role in tensors if role == WEIGHT]
    extra = {EXTRA: dict(reading.extra)} if reading.extra else {}
    folders = tuple(p for p in (request.config, path, path.parent) if p)
    world_size = reading.args.get("world_size")
    checkpoint = Checkpoint(
        path=str(path),
        format="megatron",
        tensors=tensors,
        files=reading.sources.files,
        framework="Megatron-LM",
        world_size=world_size if type(world_size) is int and world_size > 0 else len(files),
        namespace=NAMESPACE,
        ties={OUTPUT: EMBEDDING} if (EMBEDDING, WEIGHT) in tensors and (OUTPUT, WEIGHT) not in tensors else {},
        state=read_state({**files[0].content, **extra}, reading.args, optimizers, order, _per_rank(reading, files)),
        config=read_config(folders),
        folders=tuple(str(p) for p in folders if p.is_dir()),
        notes=(*reading.notes, *reading.sources.notes),
        facts=MegatronFacts(reading.own_module_order, blocks=reading.blocks),
    )
    check_args(reading.args, checkpoint.shapes, path)
    return checkpoint


def _per_rank(reading: MegatronReading, files: Sequence[RankContent]) -> dict[str, dict[str, Any]]:
    return {
        name: {folder_name(f.rank, reading.grid): f.content[name] for f in files if f.content.get(name) is not None}
        for name in OF_RANKS
    }
