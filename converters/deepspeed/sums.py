"""Sums of several ranks' tensors, added one by one and rounded to their dtype each time, like in torch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

from ckpt.base.errors import NotFoundError
from ckpt.plan.dtypes import BFLOAT16, FLOAT16, FLOAT32
from ckpt.plan.tensors import Extent, Tensor, Whole, whole


def added_up(tensors: Sequence[Tensor], path: str) -> tuple[Tensor, dict[str, Callable[[], memoryview]]]:
    """Return the sum, and its computation by a made-up path."""
    first = tensors[0]
    if first.dtype not in (BFLOAT16, FLOAT16, FLOAT32):
        raise NotFoundError(
            "ckpt cannot add up ranks' parts in this dtype", path=path, fqn=first.fqn, found=first.dtype
        )
    name = f"sum:{path}:{first.fqn}:{first.role}"
    source = Whole(Extent.contiguous(name, 0, first.dtype, first.shape))
    found = Tensor(first.fqn, first.role, first.dtype, first.shape, source, first.native)
    return found, {name: partial(_compute, tuple(tensors))}


def _compute(tensors: Sequence[Tensor]) -> memoryview:
    import numpy as np  # late: numpy

    from ckpt.move.casts import cast_bits
    from ckpt.move.reading import read_box

    dtype = tensors[0].dtype
    total = cast_bits(np.zeros(tensors[0].numel, np.uint32), FLOAT32, dtype)
    for tensor in tensors:
        bits = read_box(tensor, whole(tensor.shape), {}).reshape(-1)
        wide = [cast_bits(one, dtype, FLOAT32).view(np.float32) for one in (total, bits)]
        with np.errstate(over="ignore", invalid="ignore"):
            total = cast_bits((wide[0] + wide[1]).view(np.uint32), FLOAT32, dtype)
    return memoryview(total.tobytes())
