"""Small floats without a numpy dtype: e2m1, e4m3 and powers of two (e8m0)."""

from __future__ import annotations

from functools import cache

import numpy as np
from numpy.typing import NDArray

E4M3_MAX, E2M1_MAX = 448.0, 6.0
#: Half of e2m1's values. The fourth bit is the sign.
_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
E8M0_BIAS, E8M0_NAN = 127, 255
_POWER = np.uint32(0x7F80_0000)  # exponent bits of fp32


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
    """Return powers of two for exponents with bias 127. The last one is NaN."""
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
    """Round fp32 `values` to nearest, ties to even. Larger ones become `E4M3_MAX`."""
    codes = e4m3_sizes(np.clip(np.abs(values), np.float32(0), np.float32(E4M3_MAX)))
    codes |= sign_codes(np.signbit(values), 0x80)
    return codes


def e4m3_sizes(sizes: NDArray) -> NDArray:
    """Return the bytes of fp32 numbers from 0 to `E4M3_MAX`. Overwrite them."""
    return _rounded(sizes, 3, E8M0_BIAS - 6)


def e2m1_codes(values: NDArray) -> NDArray:
    """Round fp32 `values` to nearest, ties to even. Larger ones become `E2M1_MAX`."""
    codes = _rounded(np.clip(np.abs(values), np.float32(0), np.float32(E2M1_MAX)), 1, E8M0_BIAS)
    codes |= sign_codes(np.signbit(values), 0x08)
    return codes


def unsigned_zero_codes(values: NDArray) -> NDArray:
    """Round like `e2m1_codes`, but without a zero's sign. A number rounded to zero keeps its sign."""
    return e2m1_codes(values + np.float32(0))


def _rounded(sizes: NDArray, num_bits: int, least: int) -> NDArray:
    """Round to a small float's `num_bits` of mantissa, and overwrite `sizes`. `least` is its lowest exponent in fp32.

    Adding a larger power of two rounds to a fraction of the number's own power, and the sum's lowest bits count the
    fractions.
    """
    shift, bits = 23 - num_bits, sizes.view(np.uint32)
    powers = bits & _POWER
    np.maximum(powers, np.full(powers.shape[-1:], least << 23, np.uint32), out=powers)  # slow with a scalar
    powers += np.uint32(shift << 23)
    sizes += powers.view(np.float32)
    bits *= np.uint32((1 << shift) + 1)  # the count is added to the exponent
    bits >>= np.uint32(shift)
    codes: NDArray = bits.astype(np.uint8)
    codes -= np.uint8((least + shift << num_bits) % 256)
    return codes


def sign_codes(is_negative: NDArray, sign: int) -> NDArray:
    """Return `sign` for True. numpy is slow at shifting bytes."""
    ones = np.negative(is_negative.view(np.int8)).view(np.uint8)
    return ones & np.uint8(sign)


def packed_pairs(codes: NDArray) -> NDArray:
    """Pack contiguous 4-bit `codes` along the last dim, two per byte, the first in the lower half."""
    pairs = codes.view("<u2")
    packed: NDArray = (pairs | pairs >> np.uint16(4)).astype(np.uint8)
    return packed
