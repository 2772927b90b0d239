"""`ckpt/move/casts.py`: casts against torch, bit for bit: every half, and floats near every tie."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from ckpt.move import casts
from ckpt.move.casts import FLOATS, cast_bits, storage_dtype
from ckpt.plan.dtypes import ALL, BFLOAT16, FLOAT16, FLOAT32, FLOAT64, DType

PAIRS = [(source, target) for source in FLOATS for target in FLOATS if source != target]
#: Casts that make the largest numbers infinite.
NARROWING = [(FLOAT64, FLOAT32), (FLOAT64, BFLOAT16), *((wide, FLOAT16) for wide in (FLOAT64, FLOAT32, BFLOAT16))]
_SIGNED = {2: torch.int16, 4: torch.int32, 8: torch.int64}
#: Bits in the exponent and in the fraction.
_LAYOUT = {FLOAT64: (11, 52), FLOAT32: (8, 23), FLOAT16: (5, 10), BFLOAT16: (8, 7)}


def by_torch(bits: NDArray, source: DType, target: DType) -> NDArray:
    raw = torch.from_numpy(bits.view(f"<i{source.itemsize}").copy())
    cast = raw.view(getattr(torch, source.name)).to(getattr(torch, target.name))
    return cast.view(_SIGNED[target.itemsize]).numpy().view(storage_dtype(target))


def is_nan(bits: NDArray, dtype: DType) -> NDArray:
    exponent, fraction = _LAYOUT[dtype]
    magnitude = bits & bits.dtype.type((1 << (exponent + fraction)) - 1)
    return magnitude > bits.dtype.type(((1 << exponent) - 1) << fraction)


def is_infinite(bits: NDArray, dtype: DType) -> NDArray:
    exponent, fraction = _LAYOUT[dtype]
    magnitude = bits & bits.dtype.type((1 << (exponent + fraction)) - 1)
    return magnitude == bits.dtype.type(((1 << exponent) - 1) << fraction)


def sign(bits: NDArray) -> NDArray:
    return bits >> bits.dtype.type(8 * bits.dtype.itemsize - 1)


def assert_as_torch(bits: NDArray, source: DType, target: DType) -> None:
    ours, theirs = cast_bits(bits, source, target), by_torch(bits, source, target)
    nan = is_nan(bits, source)
    assert (ours[~nan] == theirs[~nan]).all()
    # A NaN stays NaN with its sign, for any payload; torch does not define the payload.
    assert (is_nan(ours, target) == nan).all()
    assert (sign(ours)[nan] == sign(bits)[nan]).all()


def edges(source: DType, target: DType) -> NDArray:
    """Return `source` numbers around every number of a narrow `target`: itself, the ties, and one bit off."""
    if target.itemsize == 2:
        every = np.arange(1 << 16, dtype="<u2")
        wide = by_torch(every, target, source)
    else:
        wide = by_torch(np.arange(1 << 16, dtype="<u2"), BFLOAT16, source)
    one = wide.dtype.type(1)
    below, above = np.sort(wide)[:-1], np.sort(wide)[1:]
    ties = below + ((above - below) >> one)
    return np.concatenate([wide, wide + one, wide - one, ties, ties + one, ties - one])


@pytest.mark.parametrize(("source", "target"), PAIRS, ids=lambda dtype: dtype.name)
def test_around_every_number_of_the_narrower_dtype(source: DType, target: DType) -> None:
    if source.itemsize == 2:
        bits = np.arange(1 << 16, dtype="<u2")
    else:
        bits = edges(source, target)
    with np.errstate(over="ignore"):
        assert_as_torch(bits, source, target)


@pytest.mark.parametrize(("source", "target"), PAIRS, ids=lambda dtype: dtype.name)
def test_any_bits(source: DType, target: DType) -> None:
    raw = np.random.default_rng(0).bytes(100_001 * source.itemsize)
    assert_as_torch(np.frombuffer(raw, storage_dtype(source)), source, target)


@given(st.sampled_from(PAIRS), st.data())
def test_single_numbers(pair: tuple[DType, DType], data: st.DataObject) -> None:
    source, target = pair
    values = data.draw(st.lists(st.integers(0, 2 ** (8 * source.itemsize) - 1), max_size=8))
    assert_as_torch(np.array(values, storage_dtype(source)), source, target)


@pytest.mark.parametrize(
    ("bits", "rounded"),
    [
        (0x3F80_8000, 0x3F80),  # a tie: to even, downwards
        (0x3F81_8000, 0x3F82),  # a tie: to even, upwards
        (0x3F80_8001, 0x3F81),
        (0x3F80_7FFF, 0x3F80),
        (0x8000_0000, 0x8000),  # -0.0
        (0x0000_0001, 0x0000),  # the smallest subnormal
        (0x0000_8001, 0x0001),  # a subnormal stays subnormal
        (0x7F7F_FFFF, 0x7F80),  # rounds to infinity
        (0xFF80_0000, 0xFF80),
        (0x7F80_0001, 0x7FC0),  # with its payload cut off, this NaN would become infinity
        (0x7F81_0000, 0x7F81),  # a signalling NaN with its payload
        (0xFFFF_FFFF, 0xFFFF),  # a rounding carry would flip this NaN's sign
    ],
)
def test_rounding_to_bfloat16(bits: int, rounded: int) -> None:
    assert cast_bits(np.array([bits], "<u4"), FLOAT32, BFLOAT16).tolist() == [rounded]


def test_widening_and_back_is_the_identity() -> None:
    """A bf16 model written as fp32 gives the same model again."""
    every = np.arange(1 << 16, dtype="<u2")
    for narrow in (BFLOAT16, FLOAT16):
        for wide in (FLOAT32, FLOAT64):
            back = cast_bits(cast_bits(every, narrow, wide), wide, narrow)
            nan = is_nan(every, narrow)
            kept = ~nan if wide == FLOAT64 else slice(None)  # the processor makes NaNs quiet in float64
            assert (back[kept] == every[kept]).all()
            assert is_nan(back[nan], narrow).all()


@pytest.mark.parametrize("dtype", FLOATS, ids=lambda dtype: dtype.name)
def test_the_same_dtype_keeps_every_number(dtype: DType) -> None:
    raw = np.random.default_rng(1).bytes(4096 * dtype.itemsize)
    bits = np.frombuffer(raw, storage_dtype(dtype))
    numbers = bits[~is_nan(bits, dtype)]
    assert (cast_bits(numbers, dtype, dtype) == numbers).all()


@pytest.mark.parametrize("size", [0, 1, 2, 3, 7, 8, 20])
def test_any_length_in_steps_of_any_length(monkeypatch: pytest.MonkeyPatch, size: int) -> None:
    bits = np.random.default_rng(2).integers(0, 1 << 32, size, dtype="<u4")
    expected = cast_bits(bits, FLOAT32, BFLOAT16)
    for step in (1, 2, 7):
        monkeypatch.setattr(casts, "_CACHE_SIZED", step)
        assert (cast_bits(bits, FLOAT32, BFLOAT16) == expected).all()


def test_raw_bits_are_as_large_as_the_elements() -> None:
    assert all(storage_dtype(dtype).itemsize == dtype.itemsize for dtype in ALL)


@pytest.mark.parametrize(("source", "target"), PAIRS, ids=lambda dtype: dtype.name)
def test_an_overflow_is_raised_for_finite_numbers_only(source: DType, target: DType) -> None:
    bits = np.arange(1 << 16, dtype="<u2") if source.itemsize == 2 else edges(source, target)
    with np.errstate(over="ignore"):
        range_of = FLOAT32 if target == BFLOAT16 else target  # torch rounds float32's largest numbers to infinity
        infinite = is_infinite(cast_bits(bits, source, range_of), range_of) & ~is_infinite(bits, source)
    assert infinite.any() == ((source, target) in NARROWING)
    finite = cast_bits(bits[~infinite], source, target, over="raise")
    assert (finite == cast_bits(bits[~infinite], source, target)).all()
    for place in np.flatnonzero(infinite)[:: max(1, infinite.sum() // 100)].tolist():
        for block in (bits[place : place + 1], np.append(np.zeros(99, bits.dtype), bits[place])):
            with pytest.raises(FloatingPointError, match="overflow"):
                cast_bits(block, source, target, over="raise")
