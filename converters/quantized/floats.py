"""Small floats without a numpy dtype: e2m1, e4m3 and powers of two (e8m0)."""

from __future__ import annotations

from functools import cache

import numpy as np
from numpy.typing import NDArray

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
    """Return e2m1's 16 values."""
    return np.array((*_E2M1, *(-value for value in _E2M1)), np.float32)


@cache
def e2m1_pairs() -> NDArray:
    """Return both values for every byte, the lower half's first, with shape [256, 2]."""
    byte = np.arange(256)
    return np.stack([e2m1_values()[byte & 15], e2m1_values()[byte >> 4]], axis=1)
