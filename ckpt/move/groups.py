"""Groups of 32 bfloat16 numbers, in an order in which numpy works on long rows.

Row `i` of 4 holds numbers `8 * i` to `8 * i + 7` of each group.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

SIZE = 32
ROW = 8  # neighbours of a group in a row
_ROWS = SIZE // ROW
_COPIES = np.uint64(0x0001_0001_0001_0001)


def in_rows(bits: NDArray) -> NDArray:
    """Return the rows, [4, 8 * groups], of contiguous `bits`."""
    rows = np.empty((_ROWS, bits.size // SIZE), np.complex128)  # only a size: numpy copies 16 bytes at a time
    rows[...] = bits.reshape(-1).view(np.complex128).reshape(-1, _ROWS).T
    return rows.view(np.uint16)


def largest_in_rows(sizes: NDArray) -> NDArray:
    """Return each group's maximum. `sizes` are without sign."""
    pairs = np.maximum(sizes[:2], sizes[2:])
    np.maximum(pairs[0], pairs[1], out=pairs[0])
    halves = pairs[0].view(np.uint64)
    fours = np.maximum(halves[::2].copy().view(np.uint16), halves[1::2].copy().view(np.uint16))
    twos = np.maximum(fours[:-1], fours[1:])
    largest: NDArray = np.maximum(twos[::4], twos[2::4])
    return largest


def in_groups(rows: NDArray, result: NDArray) -> None:
    """Write rows with one byte for each number, or each two, to [groups, bytes]."""
    part = f"u{result.shape[1] // _ROWS}"
    result.view(part)[...] = rows.view(part).reshape(_ROWS, -1).T


def for_rows(numbers: NDArray) -> NDArray:
    """Repeat each group's 16-bit number for the columns of a row."""
    return np.repeat(numbers.astype(np.uint64) * _COPIES, 2).view(np.uint16)
