"""What a conversion wrote, read back and held against its source."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from ckpt.move.casts import cast_bits
from ckpt.move.reading import Computed, read_box
from ckpt.plan.checkpoint import Checkpoint
from ckpt.plan.dtypes import DType
from ckpt.plan.planner import Plan
from ckpt.plan.tensors import Extent, Tensor, Whole, whole
from ckpt.verify.compare import narrower
from ckpt.verify.pairs import EQUAL, ONLY_B, Report


def as_written(plan: Plan, *, every_cast: bool = False) -> Checkpoint:
    """The plan's checkpoint with tensors that are cast between bf16 and fp16 as they are written.

    Neither of the two dtypes holds what the other does, so that no rounding makes them comparable.  With `every_cast`
    tensors of any dtypes that are cast are as they are written.
    """
    source = plan.checkpoint
    tensors, computed = dict(source.tensors), dict(source.computed)
    for slot in (slot for file in plan.target.files for slot in file.slots):
        tensor, dtype = source.tensors[slot.key], slot.extent.dtype
        if narrower(tensor.dtype, dtype) is None or (every_cast and tensor.dtype != dtype):
            path = f"cast:{tensor.role}:{tensor.fqn}"
            computed[path] = partial(_cast, tensor, dtype, source.computed)
            stored = Whole(Extent.contiguous(path, 0, dtype, tensor.shape))
            tensors[slot.key] = replace(tensor, dtype=dtype, source=stored, replicas=())
    return replace(source, tensors=tensors, computed=computed)


def _cast(tensor: Tensor, dtype: DType, computed: Computed) -> memoryview:
    bits = cast_bits(read_box(tensor, whole(tensor.shape), computed).reshape(-1), tensor.dtype, dtype)
    return bits.data.cast("B")


def is_as_the_source(report: Report) -> bool:
    """Whether all of the source (A) was found in what was written (B), which may have zeros where A has no state."""
    return report.num_compared > 0 and all(result.status in (EQUAL, ONLY_B) for result in report.results)
