"""Megatron-LM's `torch` format: a file per tensor, pipeline and expert parallel rank.

    <run>/latest_checkpointed_iteration.txt            "100", or "release"
    <run>/iter_0000100/mp_rank_TT[_PPP][_EEE]/model_optim_rng.pt, distrib_optim.pt

`_PPP` is present if PP > 1, `_EEE` if EP > 1, so `mp_rank_00_001` is ambiguous; the arguments in every file resolve it.
Layers are numbered within a model chunk, experts within a rank. One rank writes for all data-parallel ranks. Dense
tensors are in every expert-parallel rank's file, and are compared.

Format facts: megatron-core 0.16.1; Megatron-LM, August 2026, training/checkpointing.py (`get_checkpoint_name`,
`generate_state_dict`, `save_checkpoint`, `load_checkpoint`).
"""

from __future__ import annotations

from pathlib import Path

from ckpt.base.errors import UsageError
from ckpt.plan.checkpoint import MEGATRON as NAMESPACE
from ckpt.plan.checkpoint import Checkpoint, Format, Layout, ReadRequest, Target
from converters.megatron.folder import find_iteration, is_iteration


class Megatron(Format):
    name = "megatron"
    title = "Megatron-LM, torch format"
    namespace = NAMESPACE
    loads_from = "run"
    records_ranks = True
    takes = ("world_size",)
    ranks_on_axes = "model"

    def find(self, path: Path, tag: str | None) -> Path | None:
        return find_iteration(path, tag, is_iteration)

    def read(self, path: Path, request: ReadRequest) -> Checkpoint:
        from converters.megatron.checkpoint import read_iteration

        return read_iteration(path, request)

    def lay_out(self, checkpoint: Checkpoint, layout: Layout) -> Target:
        if checkpoint.is_adapter:
            raise UsageError(
                "Megatron-LM has no adapters in this format",
                path=checkpoint.path,
                hint="use the formats megatron-dist (loaded by Megatron-Bridge) or peft for an adapter",
            )
        from converters.megatron.write import lay_out

        return lay_out(checkpoint, layout)


MEGATRON = Megatron()
