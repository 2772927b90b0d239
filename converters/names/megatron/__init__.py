"""megatron-core's names against those in the Hub's files, one declared table per architecture."""

from __future__ import annotations

from ckpt.checkpoint import Checkpoint, Layout
from ckpt.errors import UsageError


def to_hub(checkpoint: Checkpoint) -> Checkpoint:
    """`checkpoint`, which has Megatron's names, under those of the Hub."""
    raise _unknown(checkpoint)


def to_megatron(checkpoint: Checkpoint, layout: Layout) -> Checkpoint:
    """`checkpoint`, which has the Hub's names, under Megatron's."""
    raise _unknown(checkpoint)


def repadded(checkpoint: Checkpoint, layout: Layout) -> Checkpoint:
    """`checkpoint`, which has Megatron's names, with the vocabulary padded as `layout` needs it."""
    return checkpoint


def _unknown(checkpoint: Checkpoint) -> UsageError:
    return UsageError(
        "there is no mapping between Megatron's names and the Hub's for this architecture",
        path=checkpoint.path,
        found=(checkpoint.config or {}).get("model_type"),
    )
