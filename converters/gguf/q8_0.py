"""Q8_0 blocks from bfloat16 numbers, with the bits of the `gguf` package (0.19, `quants.py`)."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

from ckpt.move import groups
from ckpt.move.casts import as_fp32

_BELOW_HALF = np.nextafter(np.float32(0.5), np.float32(0))  # a half would carry the number below 0.5
#: Magnitudes of maxima in bfloat16, with finite reciprocals, and scales below float16's end.
_LEAST, _MOST = 16 << 7, 149 << 7


def q8_0_blocks(parts: Iterable[NDArray], num_blocks: int) -> NDArray | None:
    """Return the blocks' bytes, [blocks, 34], or None if the package must compute them."""
    found, start = np.empty((num_blocks, 34), np.uint8), 0
    for bits in parts:
        stop = start + bits.size // groups.SIZE
        if not _write_blocks(bits, found[start:stop]):
            return None
        start = stop
    return found


def _write_blocks(bits: NDArray, place: NDArray) -> bool:
    rows = groups.in_rows(bits)
    signs = np.greater(rows, np.uint16(0x8000)).view(np.int8)
    np.negative(signs, out=signs)
    rows &= np.uint16(0x7FFF)
    largest = groups.largest_in_rows(rows)
    if largest.max() >= _MOST or ((largest < _LEAST) & (largest > 0)).any():
        return False
    scales = as_fp32(largest) / np.float32(127)
    factors = np.divide(np.float32(1), scales, out=np.zeros_like(scales), where=scales > 0)
    values = as_fp32(rows)
    values *= np.repeat(factors, groups.ROW)
    values += _BELOW_HALF  # halves are rounded away from zero
    numbers = values.astype(np.int8)
    numbers ^= signs
    numbers -= signs
    place[:, :2].view(np.float16)[:, 0] = scales
    groups.in_groups(numbers, place[:, 2:])
    return True
