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
    codes |= sign_bytes(np.signbit(values))
    return codes


def e4m3_sizes(sizes: NDArray) -> NDArray:
    """Return the bytes of fp32 numbers from 0 to `E4M3_MAX`. Overwrite them.

    Adding a power of two rounds to eighths of a smaller power: the number's own, or 2^-6. The sum's lowest bits count
    the eighths.
    """
    bits = sizes.view(np.uint32)
    powers = bits & _POWER
    np.clip(powers, np.uint32(E8M0_BIAS - 6 << 23), _POWER, out=powers)  # `maximum` is slow with a scalar
    powers += np.uint32(20 << 23)
    sizes += powers.view(np.float32)
    bits *= np.uint32((1 << 20) + 1)  # the count is added to the power
    bits >>= np.uint32(20)
    codes: NDArray = bits.astype(np.uint8)
    codes -= np.uint8((E8M0_BIAS - 6 + 20 << 3) % 256)
    return codes


def sign_bytes(is_negative: NDArray) -> NDArray:
    """Return 0x80 for True. numpy is slow at shifting bytes."""
    signs = is_negative.view(np.int8)
    return np.negative(signs).view(np.uint8) & np.uint8(0x80)


def e2m1_codes(values: NDArray) -> NDArray:
    """Round fp32 `values` to nearest, ties to even. Larger ones become `E2M1_MAX`."""
    return _rounded(values, _rounding_table(_E2M1, 0x8))


def unsigned_zero_codes(values: NDArray) -> NDArray:
    """Round like `e2m1_codes`, but without a zero's sign. A number rounded to zero keeps its sign."""
    return _rounded(values, _rounding_table(_E2M1, 0x8, zero_sign=0))


@cache
def _rounding_table(numbers: tuple[float, ...], sign: int, zero_sign: int | None = None) -> NDArray:
    """Return codes for all fp32 numbers' upper halves. `numbers` are the values of codes from 0 on."""
    halves = np.arange(1 << 16, dtype=np.uint32)
    sizes = (np.minimum(halves & np.uint32(0x7FFF), np.uint32(0x7F80)) << np.uint32(16)).view(np.float32)  # no NaN
    middles = np.convolve(np.array(numbers, np.float64), (0.5, 0.5), "valid")
    low, high = (np.searchsorted(middles, sizes, side) for side in ("left", "right"))
    codes = np.where(low % 2, high, low)  # a tie lies between them
    codes |= np.where(halves >> np.uint32(15), sign, 0)
    codes[0x8000] = sign if zero_sign is None else zero_sign
    table: NDArray = codes.astype(np.uint8)
    return table


def _rounded(values: NDArray, table: NDArray) -> NDArray:
    """Look up upper halves, with the last bit set if the lower half is not zero: no false ties."""
    halves = np.ascontiguousarray(values).view("<u2").reshape(*values.shape, 2)
    index = halves[..., 1] | (halves[..., 0] != 0)
    found: NDArray = np.take(table, index)
    return found


def packed_pairs(codes: NDArray) -> NDArray:
    """Pack contiguous 4-bit `codes` along the last dim, two per byte, the first in the lower half."""
    pairs = codes.view("<u2")
    packed: NDArray = (pairs | pairs >> np.uint16(4)).astype(np.uint8)
    return packed
