"""Reads of numbers that must be finite."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from ckpt.base.errors import LossError
from ckpt.base.words import Message
from ckpt.move.casts import cast_bits
from ckpt.move.files import OpenFiles
from ckpt.move.reading import Computed, read_box
from ckpt.move.values import check_finite
from ckpt.plan.dtypes import FLOAT32
from ckpt.plan.precision import Choice
from ckpt.plan.tensors import Box


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
        raise LossError(
            f"a number is too large for {choice.dtype}",
            path=path,
            fqn=tensor.fqn,
            found=f"a {tensor.dtype} number at {index}",
            hint=Message("give {dtype=bf16}, or leave {dtype} out"),
        )
    return values
