"""Weights stored with a number added, such as norms around zero instead of one."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from ckpt.base.errors import CkptError
from ckpt.plan.checkpoint import MASTER, WEIGHT, Checkpoint
from ckpt.plan.dtypes import FLOAT32, FLOAT64, DType
from ckpt.plan.tensors import Extent, Source, Tensor, Whole, whole

if TYPE_CHECKING:
    from numpy.typing import NDArray


def shifted(checkpoint: Checkpoint, fqns: Collection[str], by: int, dtype: DType | None = None) -> Checkpoint:
    """Add `by` to these tensors and their masters, in `dtype` (None: their own)."""
    tensors, computed = dict(checkpoint.tensors), dict(checkpoint.computed)

    def shifted_source(tensor: Tensor, source: Source, number: int, target: DType) -> Source:
        path = f"shifted:{by}:{checkpoint.path}:{tensor.fqn}:{tensor.role}:{number}"
        computed[path] = partial(_content, tensor._replace(source=source), by, target, checkpoint.computed)
        return Whole(Extent.contiguous(path, 0, target, tensor.shape))

    for key in [(fqn, role) for fqn in fqns for role in (WEIGHT, MASTER)]:
        if (tensor := tensors.get(key)) is not None:
            target = dtype or tensor.dtype
            source, *replicas = (
                shifted_source(tensor, one, n, target) for n, one in enumerate((tensor.source, *tensor.replicas))
            )
            tensors[key] = tensor._replace(dtype=target, source=source, replicas=tuple(replicas))
    return replace(checkpoint, tensors=tensors, computed=computed)


def num_inexact(checkpoint: Checkpoint, fqns: Collection[str], by: int) -> int | None:
    """Count the values that adding `by` changes for good. None if they can't be read."""
    from ckpt.move.reading import read_box

    try:
        found = 0
        for tensor in (checkpoint.tensors.get((fqn, role)) for fqn in fqns for role in (WEIGHT, MASTER)):
            if tensor is not None:
                bits = read_box(tensor, whole(tensor.shape), checkpoint.computed).reshape(-1)
                added = _added(bits, tensor.dtype, by, tensor.dtype)
                found += int((_added(added, tensor.dtype, -by, tensor.dtype) != bits).sum())
    except CkptError:
        return None
    return found


def _content(tensor: Tensor, by: int, target: DType, computed: Mapping[str, Callable[[], memoryview]]) -> memoryview:
    from ckpt.move.reading import read_box  # late: it imports numpy

    bits = read_box(tensor, whole(tensor.shape), computed).reshape(-1)
    return _added(bits, tensor.dtype, by, target).data.cast("B")


def _added(bits: NDArray, dtype: DType, by: int, target: DType) -> NDArray:
    """Round in fp32 (or fp64) and then to the target dtype, like torch."""
    from ckpt.move.casts import cast_bits

    wide = FLOAT64 if target == FLOAT64 else FLOAT32
    values = cast_bits(bits, dtype, wide)
    values = values.view("<f8" if wide == FLOAT64 else "<f4") + by
    return cast_bits(values.view("<u8" if wide == FLOAT64 else "<u4"), wide, target)
