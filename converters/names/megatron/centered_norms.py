"""Norms that Megatron stores less one, because `layernorm_zero_centered_gamma` applies to all of a model's norms.

Example: a gated delta net's output norm.
"""

from __future__ import annotations

from collections.abc import Collection

from ckpt.base.text import pluralize


def shifting_notes(fqns: Collection[str]) -> list[str]:
    if not fqns:
        return []
    return [
        f"Megatron's weights for {pluralize(len(fqns), 'gated norm')} are one less than the Hub's (not in "
        "mcore-bridge, but no file records this): written values are rounded to their dtype, and exact for Hub "
        "weights from 0.5 to 2"
    ]
