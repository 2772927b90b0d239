"""Reads of numbers that must be finite, also after a cast."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ckpt.base.errors import CorruptError, LossError
from ckpt.base.text import pluralize
from ckpt.move.casts import cast_bits, storage_dtype, too_large
from ckpt.move.files import OpenFiles
from ckpt.move.reading import Computed, read_box
from ckpt.move.values import FLOATS, check_finite, not_finite
from ckpt.plan.checkpoint import WEIGHT, Checkpoint
from ckpt.plan.dtypes import FLOAT16, FLOAT32, FLOAT64, DType
from ckpt.plan.planner import Plan, first_index
from ckpt.plan.precision import Choice
from ckpt.plan.tensors import Box, Tensor, flat_boxes

_STEP = 1 << 20  # elements searched at a time


def finite_values(choice: Choice, box: Box, computed: Computed, path: str) -> NDArray:
    """Return fp32 values, rounded to the chosen dtype. Raise the errors of `as_finite_values`."""
    return as_finite_values(chosen_bits(choice, box, computed), choice, box, computed, path)


def chosen_bits(choice: Choice, box: Box, computed: Computed, sources: OpenFiles | None = None) -> NDArray:
    bits = read_box(choice.tensor, box, computed, sources)
    return cast_bits(bits.reshape(-1), choice.tensor.dtype, choice.dtype).reshape(box.sizes)


def as_finite_values(bits: NDArray, choice: Choice, box: Box, computed: Computed, path: str) -> NDArray:
    """Raise CorruptError for NaN or infinity in the whole tensor, LossError for a number beyond the chosen dtype."""
    values: NDArray = cast_bits(bits.reshape(-1), choice.dtype, FLOAT32).view(np.float32).reshape(box.sizes)
    # NaN and infinity are in the maximum or the minimum.
    if values.size and not (np.isfinite(values.max()) and np.isfinite(values.min())):
        tensor = choice.tensor
        check_finite({tensor.key: tensor}, computed, path)
        at = np.unravel_index(int(np.argmin(np.isfinite(values))), values.shape)
        index = [int(offset) + int(i) for offset, i in zip(box.offsets, at, strict=True)]
        raise too_large(choice.dtype, path=path, fqn=tensor.fqn, found=f"a {tensor.dtype} number at {index}")
    return values


def finite_content(
    compute: Callable[[], memoryview], dtype: DType, index: Callable[[int], tuple[int, ...]], path: str, fqn: str
) -> memoryview:
    """Return a dequantized weight's computed numbers. `index` gives a number's place in the weight.

    Raise CorruptError for NaN or infinity, LossError for a number too large for float16.
    """
    content = compute()
    bits = np.frombuffer(content, storage_dtype(dtype))
    found = not_finite(bits, FLOATS[dtype.name]) if bits.size else None
    if found is None:
        return content
    nans, infinities = found
    count, first = nans.size + infinities.size, int(min(places[0] for places in found if places.size))
    what = f"{pluralize(count, 'number')} in the part computed here, the first at {list(index(first))}"
    facts: dict[str, Any] = {"path": path, "fqn": fqn, "found": what}
    if dtype == FLOAT16 and not nans.size:  # the others have the range of fp32, in which scales are multiplied
        raise too_large(FLOAT16, **facts)
    raise CorruptError(
        "a dequantized weight would have NaN or infinite numbers",
        expected="finite numbers",
        hint="download or copy the folder again",
        **facts,
    )


def with_finite_blocks(checkpoint: Checkpoint) -> Checkpoint:
    """Return `checkpoint` with an error for NaN and infinity in the values of stored blocks."""
    computed = dict(checkpoint.computed)
    for fqn in checkpoint.blocks:
        tensor = checkpoint.tensors[fqn, WEIGHT]
        for fragment in tensor.fragments():
            place, index = fragment.extent.path, partial(first_index, fragment.region, tensor.shape)
            computed[place] = partial(finite_content, computed[place], tensor.dtype, index, checkpoint.path, fqn)
    return replace(checkpoint, computed=computed)


def first_overflow(plan: Plan) -> LossError | None:
    """Return the error for the first number that is too large for its new dtype, with its tensor's name."""
    checkpoint = plan.checkpoint
    slots = (slot for file in plan.target.files for slot in file.slots)
    for key, dtype in dict.fromkeys((slot.key, slot.extent.dtype) for slot in slots):
        tensor = checkpoint.tensors[key]
        first, num = None, 0
        for places in () if dtype == tensor.dtype else _overflows(tensor, dtype, checkpoint.computed):
            first, num = (int(places[0]) if first is None else first), num + len(places)
        if first is not None:
            index = [int(i) for i in np.unravel_index(first, tensor.shape)]
            count = f"{num} of {pluralize(tensor.numel, f'{tensor.dtype} number')}"
            found = f"{count} would be infinite, the first at {index}"
            return too_large(dtype, path=checkpoint.path, fqn=tensor.fqn, found=found)
    return None


def _overflows(tensor: Tensor, dtype: DType, computed: Computed) -> Iterator[NDArray]:
    """Yield the positions of finite numbers that become infinite, in order. Callers keep none: a mask may have many."""
    for start, stop in pairwise([*range(0, tensor.numel, _STEP), tensor.numel]):
        at = start
        for box in flat_boxes(tensor.shape, start, stop):
            bits = read_box(tensor, box, computed).reshape(-1)
            values = cast_bits(bits, tensor.dtype, FLOAT64).view(np.float64)
            after = cast_bits(cast_bits(bits, tensor.dtype, dtype), dtype, FLOAT64).view(np.float64)
            if (places := at + np.flatnonzero(np.isfinite(values) & np.isinf(after))).size:
                yield places
            at += box.numel
