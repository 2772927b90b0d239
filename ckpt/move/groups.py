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
    halves = pairs[0].view(np.uint32)
    of_two = np.maximum(halves[0::2].copy().view(np.uint16), halves[1::2].copy().view(np.uint16))
    largest: NDArray = np.maximum(of_two[0::2], of_two[1::2])
    return largest


def in_groups(rows: NDArray, result: NDArray) -> None:
    """Write rows with one byte for each number, or each two, to [groups, bytes]."""
    pairs = rows.view(np.uint16).reshape(_ROWS, len(result), -1)
    places = result.view(np.uint16).reshape(len(result), _ROWS, -1)
    for column in range(pairs.shape[-1]):
        places[:, :, column] = pairs[:, :, column].T


def for_rows(numbers: NDArray) -> NDArray:
    """Repeat each group's 16-bit number for the columns of a row."""
    return (numbers.astype(np.uint64) * _COPIES).view(np.uint16)
