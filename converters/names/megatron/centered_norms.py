"""Norms that Megatron stores less one, because `layernorm_zero_centered_gamma` applies to all of a model's norms.

Example: a gated delta net's output norm.
"""

from __future__ import annotations

from collections.abc import Collection

from ckpt.base.text import pluralize
from ckpt.plan.checkpoint import Checkpoint
from converters.names.shifts import num_inexact


def shifting_notes(checkpoint: Checkpoint, fqns: Collection[str], by: int) -> list[str]:
    """Return notes on adding `by` to these norms in `checkpoint`."""
    if not fqns:
        return []
    lost = num_inexact(checkpoint, fqns, by)
    changed = "exact here" if lost == 0 else f"{pluralize(lost, 'value')} can't be restored" if lost else "may round"
    return [
        f"Megatron's weights for {pluralize(len(fqns), 'gated norm')} are one less than the Hub's (not in "
        f"mcore-bridge, but no file records this), rounded to their dtype: {changed}"
    ]
