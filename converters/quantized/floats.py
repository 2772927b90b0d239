"""Small floats without a numpy dtype: e2m1, e4m3 and powers of two (e8m0)."""

from __future__ import annotations

from functools import cache

import numpy as np
from numpy.typing import NDArray

E4M3_MAX, E2M1_MAX = 448.0, 6.0
#: Half of e2m1's values. The fourth bit is the sign.
_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
E8M0_BIAS, E8M0_NAN = 127, 255


@cache
def e4m3_values() -> NDArray:
    """Return e4m3fn's 256 values: 4 exponent bits with bias 7, no infinities, NaN if all bits are set."""
    byte = np.arange(256)
    exponent, fraction = (byte >> 3) & 15, (byte & 7).astype(np.float64)
    value = np.where(exponent == 0, np.ldexp(fraction, -9), np.ldexp(1 + fraction / 8, exponent - 7))
    value[(byte & 0x7F) == 0x7F] = np.nan
    return np.where(byte >> 7, -value, value).astype(np.float32)


@cache
def e8m0_values() -> NDArray:
    """Return the powers of two for exponents with bias 127. The last one is NaN."""
    with np.errstate(over="ignore"):  # the last one
        values = np.ldexp(np.float32(1), np.arange(256) - E8M0_BIAS, dtype=np.float32)
    values[E8M0_NAN] = np.nan
    return values


@cache
def e2m1_values() -> NDArray:
    return np.array((*_E2M1, *(-value for value in _E2M1)), np.float32)


@cache
def e2m1_pairs() -> NDArray:
    """Return both values for every byte, the lower half's first."""
    byte = np.arange(256)
    return np.stack([e2m1_values()[byte & 15], e2m1_values()[byte >> 4]], axis=1)


def e4m3_bytes(values: NDArray) -> NDArray:
    """Round fp32 `values`, at most `E4M3_MAX` in size, to nearest, ties to even."""
    bits = values.view(np.uint32)
    size = bits & np.uint32(0x7FFF_FFFF)
    # The sum has steps of 2 ** -9, like e4m3's subnormal numbers, and is rounded by the processor.
    small = (size.view(np.float32) + np.float32(1 << 14)).view(np.uint32) - np.float32(1 << 14).view(np.uint32)
    is_small = size < np.float32(2**-6).view(np.uint32)
    size += ((size >> np.uint32(20)) & np.uint32(1)) + np.uint32(0x7_FFFF)
    size >>= np.uint32(20)
    size -= np.uint32(127 - 7 << 3)
    np.copyto(size, small, where=is_small)
    size |= (bits >> np.uint32(24)) & np.uint32(0x80)
    return size.astype(np.uint8)


def e2m1_codes(values: NDArray) -> NDArray:
    """Round fp32 `values` to e2m1, to nearest, ties to even. Larger ones become `E2M1_MAX`."""
    size = np.abs(values)
    # Steps are 1/2 below 2, 1 below 4, and 2 above. A wrong step gives a larger code.
    codes = np.full(size.shape, 7, np.float32)
    for factor, offset in ((2, 0), (1, 2), (0.5, 4)):
        steps = np.rint(size * np.float32(factor))
        steps += np.float32(offset)
        np.minimum(codes, steps, out=codes)
    found: NDArray = codes.astype(np.uint8)
    found |= (values.view(np.uint32) >> np.uint32(28)).astype(np.uint8) & np.uint8(8)
    return found


def packed_pairs(codes: NDArray) -> NDArray:
    """Pack contiguous 4-bit `codes` along the last dim, two per byte, the first in the lower half."""
    pairs = codes.view("<u2")
    packed: NDArray = (pairs | pairs >> np.uint16(4)).astype(np.uint8)
    return packed
