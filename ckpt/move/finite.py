"""Reads of numbers that must be finite."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from ckpt.base.errors import CorruptError
from ckpt.move.casts import cast_bits
from ckpt.move.files import OpenFiles
from ckpt.move.reading import Computed, read_box
from ckpt.plan.dtypes import FLOAT32
from ckpt.plan.precision import Choice
from ckpt.plan.tensors import Box


def finite_values(choice: Choice, box: Box, computed: Computed, path: str) -> NDArray:
    """Return fp32 values, rounded to the chosen dtype. Raise CorruptError for NaN or infinity."""
    return as_finite_values(chosen_bits(choice, box, computed), choice, box, path)


def chosen_bits(choice: Choice, box: Box, computed: Computed, sources: OpenFiles | None = None) -> NDArray:
    bits = read_box(choice.tensor, box, computed, sources)
    return cast_bits(bits.reshape(-1), choice.tensor.dtype, choice.dtype).reshape(box.sizes)


def as_finite_values(bits: NDArray, choice: Choice, box: Box, path: str) -> NDArray:
    values: NDArray = cast_bits(bits.reshape(-1), choice.dtype, FLOAT32).view(np.float32).reshape(box.sizes)
    # NaN and infinity are in the maximum or the minimum.
    if values.size and not (np.isfinite(values.max()) and np.isfinite(values.min())):
        raise _not_finite(values, choice.tensor.fqn, box, path)
    return values


def _not_finite(values: NDArray, fqn: str, box: Box, path: str) -> CorruptError:
    at = np.unravel_index(int(np.argmin(np.isfinite(values))), values.shape)
    index = [int(offset) + int(i) for offset, i in zip(box.offsets, at, strict=True)]
    return CorruptError(
        "can't quantize a weight with NaN or infinity",
        path=path,
        fqn=fqn,
        expected="finite values",
        found=f"{values[at]} at {index}",
        hint="use `ckpt check --values` to find all of them",
    )
