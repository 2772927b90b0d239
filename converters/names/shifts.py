"""Weights stored with a number added, such as norms around zero instead of one."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from functools import partial

from ckpt.plan.checkpoint import MASTER, WEIGHT, Checkpoint
from ckpt.plan.dtypes import FLOAT32, FLOAT64, DType
from ckpt.plan.tensors import Extent, Source, Tensor, Whole, whole


def shifted(checkpoint: Checkpoint, fqns: Collection[str], by: int, dtype: DType | None = None) -> Checkpoint:
    """Add `by` to these tensors and their masters, in `dtype` (None: their own)."""
    tensors, computed = dict(checkpoint.tensors), dict(checkpoint.computed)

    def shifted_source(tensor: Tensor, source: Source, number: int, target: DType) -> Source:
        path = f"shifted:{by}:{checkpoint.path}:{tensor.fqn}:{tensor.role}:{number}"
        computed[path] = partial(_content, replace(tensor, source=source), by, target, checkpoint.computed)
        return Whole(Extent.contiguous(path, 0, target, tensor.shape))

    for key in [(fqn, role) for fqn in fqns for role in (WEIGHT, MASTER)]:
        if (tensor := tensors.get(key)) is not None:
            target = dtype or tensor.dtype
            source, *replicas = (
                shifted_source(tensor, one, n, target) for n, one in enumerate((tensor.source, *tensor.replicas))
            )
            tensors[key] = replace(tensor, dtype=target, source=source, replicas=tuple(replicas))
    return replace(checkpoint, tensors=tensors, computed=computed)


def _content(tensor: Tensor, by: int, target: DType, computed: Mapping[str, Callable[[], memoryview]]) -> memoryview:
    """Round in fp32 (or fp64) and then to the target dtype, like torch."""
    from ckpt.move.casts import cast_bits  # late: these import numpy
    from ckpt.move.reading import read_box

    wide = FLOAT64 if target == FLOAT64 else FLOAT32
    values = cast_bits(read_box(tensor, whole(tensor.shape), computed).reshape(-1), tensor.dtype, wide)
    values = values.view("<f8" if wide == FLOAT64 else "<f4") + by
    return cast_bits(values.view("<u8" if wide == FLOAT64 else "<u4"), wide, target).data.cast("B")
