"""Norms whose weights Megatron has less one, as `layernorm_zero_centered_gamma` says of all of a model's norms.

A gated delta net's norm of its output is one in transformers' models whose other norms are around zero on both sides.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from functools import partial

from ckpt.base.text import counted
from ckpt.plan.checkpoint import MASTER, WEIGHT, Checkpoint
from ckpt.plan.tensors import Extent, Source, Tensor, Whole, whole


def shifted(checkpoint: Checkpoint, fqns: Collection[str], by: int) -> Checkpoint:
    """`checkpoint` with `by` added to every element of these tensors, and to the masters of these parameters."""
    tensors, computed = dict(checkpoint.tensors), dict(checkpoint.computed)

    def plus(tensor: Tensor, source: Source, number: int) -> Source:
        path = f"shifted:{tensor.fqn}:{tensor.role}:{number}"
        computed[path] = partial(_content, replace(tensor, source=source), by, checkpoint.computed)
        return Whole(Extent.contiguous(path, 0, tensor.dtype, tensor.shape))

    for key in [(fqn, role) for fqn in fqns for role in (WEIGHT, MASTER)]:
        if (tensor := tensors.get(key)) is not None:
            source, *replicas = (plus(tensor, one, n) for n, one in enumerate((tensor.source, *tensor.replicas)))
            tensors[key] = replace(tensor, source=source, replicas=tuple(replicas))
    return replace(checkpoint, tensors=tensors, computed=computed)


def shifting_notes(fqns: Collection[str]) -> list[str]:
    """The notes on these tensors; none where there are no such."""
    if not fqns:
        return []
    return [
        f"Megatron has the weights of {counted(len(fqns), 'gated norm')} less one (not mcore-bridge's, which no file "
        "tells): what is written is rounded to its dtype, and exact where the Hub's weight is from 0.5 to 2"
    ]


def _content(tensor: Tensor, by: int, computed: Mapping[str, Callable[[], memoryview]]) -> memoryview:
    """The bytes of a tensor's elements plus `by`: rounded once in fp32 (or fp64), then to its dtype, as torch does."""
    from ckpt.move.casts import cast_bits  # these take numpy, which describing a checkpoint does not
    from ckpt.move.reading import read_box
    from ckpt.plan.dtypes import FLOAT32, FLOAT64

    wide = FLOAT64 if tensor.dtype == FLOAT64 else FLOAT32
    values = cast_bits(read_box(tensor, whole(tensor.shape), computed).reshape(-1), tensor.dtype, wide)
    values = values.view("<f8" if wide == FLOAT64 else "<f4") + by
    return cast_bits(values.view("<u8" if wide == FLOAT64 else "<u4"), wide, tensor.dtype).data.cast("B")
