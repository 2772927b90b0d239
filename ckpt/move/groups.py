"""Groups of 32 bfloat16 numbers, in an order in which numpy works on long rows.

Row `i` of 8 holds numbers `4 * i` to `4 * i + 3` of each group.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

SIZE = 32
_ROWS = 8
_COPIES = np.uint64(0x0001_0001_0001_0001)


def in_rows(bits: NDArray) -> NDArray:
    """Return the rows, [8, 4 * groups], of contiguous `bits`."""
    rows = np.empty((_ROWS, bits.size // SIZE), np.uint64)
    rows[...] = bits.reshape(-1).view(np.uint64).reshape(-1, _ROWS).T
    return rows.view(np.uint16)


def largest_in_rows(sizes: NDArray) -> NDArray:
    """Return each group's maximum. `sizes` are without sign."""
    pairs = np.maximum(sizes[:4], sizes[4:])
    np.maximum(pairs[:2], pairs[2:], out=pairs[:2])
    np.maximum(pairs[0], pairs[1], out=pairs[0])
    np.maximum(pairs[0, :-1], pairs[0, 1:], out=pairs[1, :-1])
    largest: NDArray = np.maximum(pairs[1, :-3:4], pairs[1, 2:-1:4])
    return largest


def in_groups(rows: NDArray, result: NDArray) -> None:
    """Write rows with one byte for each number, or each two, to [groups, bytes]."""
    part = f"u{result.shape[1] // _ROWS}"
    result.view(part)[...] = rows.view(part).reshape(_ROWS, -1).T


def for_rows(numbers: NDArray) -> NDArray:
    """Repeat each group's 16-bit number for the columns of a row."""
    return (numbers.astype(np.uint64) * _COPIES).view(np.uint16)
