"""Norms that Megatron stores less one, because `layernorm_zero_centered_gamma` applies to all of a model's norms.

Example: a gated delta net's output norm.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from functools import partial

from ckpt.base.text import pluralize
from ckpt.plan.checkpoint import MASTER, WEIGHT, Checkpoint
from ckpt.plan.tensors import Extent, Source, Tensor, Whole, whole


def shifted(checkpoint: Checkpoint, fqns: Collection[str], by: int) -> Checkpoint:
    tensors, computed = dict(checkpoint.tensors), dict(checkpoint.computed)

    def shifted_source(tensor: Tensor, source: Source, number: int) -> Source:
        path = f"shifted:{tensor.fqn}:{tensor.role}:{number}"
        computed[path] = partial(_content, replace(tensor, source=source), by, checkpoint.computed)
        return Whole(Extent.contiguous(path, 0, tensor.dtype, tensor.shape))

    for key in [(fqn, role) for fqn in fqns for role in (WEIGHT, MASTER)]:
        if (tensor := tensors.get(key)) is not None:
            source, *replicas = (
                shifted_source(tensor, one, n) for n, one in enumerate((tensor.source, *tensor.replicas))
            )
            tensors[key] = replace(tensor, source=source, replicas=tuple(replicas))
    return replace(checkpoint, tensors=tensors, computed=computed)


def shifting_notes(fqns: Collection[str]) -> list[str]:
    if not fqns:
        return []
    return [
        f"Megatron's weights for {pluralize(len(fqns), 'gated norm')} are one less than the Hub's (not in "
        "mcore-bridge, but no file records this): written values are rounded to their dtype, and exact for Hub "
        "weights from 0.5 to 2"
    ]


def _content(tensor: Tensor, by: int, computed: Mapping[str, Callable[[], memoryview]]) -> memoryview:
    """Round in fp32 (or fp64) and then to the dtype, like torch."""
    from ckpt.move.casts import cast_bits  # late: these import numpy
    from ckpt.move.reading import read_box
    from ckpt.plan.dtypes import FLOAT32, FLOAT64

    wide = FLOAT64 if tensor.dtype == FLOAT64 else FLOAT32
    values = cast_bits(read_box(tensor, whole(tensor.shape), computed).reshape(-1), tensor.dtype, wide)
    values = values.view("<f8" if wide == FLOAT64 else "<f4") + by
    return cast_bits(values.view("<u8" if wide == FLOAT64 else "<u4"), wide, tensor.dtype).data.cast("B")
