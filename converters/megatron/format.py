"""Megatron-LM's `torch` format: a file for each tensor, pipeline and expert parallel rank.

    <run>/latest_checkpointed_iteration.txt            "100", or "release"
    <run>/iter_0000100/mp_rank_TT[_PPP][_EEE]/model_optim_rng.pt, distrib_optim.pt

`_PPP` is there where PP > 1, `_EEE` where EP > 1, so that `mp_rank_00_001` is either; the arguments recorded in every
file tell.  Layers are numbered within a model chunk, experts within a rank.  One rank writes for all data parallel
ones; dense tensors are in the file of every expert parallel rank, and are compared.

Format facts: megatron-core 0.16.1; Megatron-LM of August 2026, training/checkpointing.py (`get_checkpoint_name`,
`generate_state_dict`, `save_checkpoint`, `load_checkpoint`).  What is in a file is in `converters.megatron.read`,
`converters.megatron.optimizer_read` and `converters.megatron.write`.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ckpt.plan.checkpoint import MEGATRON as NAMESPACE
from ckpt.plan.checkpoint import WEIGHT, Checkpoint, Format, Layout, ReadRequest, Target
from ckpt.run_folder.companions import read_config
from converters.megatron.chunks import EXTRA
from converters.megatron.entries import OF_RANKS, read_state
from converters.megatron.facts import MegatronFacts
from converters.megatron.folder import find_iteration
from converters.megatron.optimizer_read import read_optimizers
from converters.megatron.read import MODEL, MegatronReading, RankContent, folder_name, rank_folders, read_ranks
from converters.megatron.write import lay_out
from converters.names.megatron.model.spelling import EMBEDDING, OUTPUT


class Megatron(Format):
    name = "megatron"
    title = "Megatron-LM, torch format"
    namespace = NAMESPACE
    loads_from = "run"
    records_ranks = True
    takes = ("world_size",)
    ranks_on_axes = "model"

    def find(self, path: Path, tag: str | None) -> Path | None:
        return find_iteration(path, tag, _is_iteration)

    def read(self, path: Path, request: ReadRequest) -> Checkpoint:
        """Describe the checkpoint of one iteration."""
        reading = MegatronReading(path)
        files = read_ranks(reading)
        optimizers = read_optimizers(reading, files)
        tensors = reading.tensors()
        order = [fqn for fqn, role in tensors if role == WEIGHT]
        extra = {EXTRA: dict(reading.extra)} if reading.extra else {}
        folders = tuple(p for p in (request.config, path, path.parent) if p)
        world_size = reading.args.get("world_size")
        return Checkpoint(
            path=str(path),
            format=self.name,
            tensors=tensors,
            files=reading.sources.files,
            framework="Megatron-LM",
            world_size=world_size if type(world_size) is int and world_size > 0 else len(files),
            namespace=NAMESPACE,
            ties={OUTPUT: EMBEDDING} if (EMBEDDING, WEIGHT) in tensors and (OUTPUT, WEIGHT) not in tensors else {},
            state=read_state({**files[0].content, **extra}, optimizers, order, _per_rank(reading, files)),
            config=read_config(folders),
            folders=tuple(str(p) for p in folders if p.is_dir()),
            notes=(*reading.notes, *reading.sources.notes),
            facts=MegatronFacts(reading.own_module_order),
        )

    def lay_out(self, checkpoint: Checkpoint, layout: Layout) -> Target:
        """The files of a run folder; see `converters.megatron.write`."""
        return lay_out(checkpoint, layout)


MEGATRON = Megatron()


def _is_iteration(folder: Path) -> bool:
    """Whether there are folders of ranks with a model's file, wherever the folder came to lie."""
    if not folder.is_dir():
        return False
    names = rank_folders(folder)
    return any((folder / name / MODEL).is_file() or (folder / name / "model_rng.pt").is_file() for name in names[:4])


def _per_rank(reading: MegatronReading, files: Sequence[RankContent]) -> dict[str, dict[str, Any]]:
    """The entries of single ranks, by the names of their folders."""
    return {
        name: {folder_name(f.rank, reading.grid): f.content[name] for f in files if f.content.get(name) is not None}
        for name in OF_RANKS
    }
