"""Scan of all tensor values for NaN, infinities, zeros and constants, in one pass over the files.

The sign bit is on top, so NaN and infinities are the largest integers of either sign: two maxima prove a clean block.
"""

from __future__ import annotations

import os
import re
import threading
from collections.abc import Callable, Container, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from math import prod

import numpy as np
from numpy.typing import NDArray

from ckpt.base.errors import CorruptError
from ckpt.base.text import pluralize
from ckpt.move.casts import storage_dtype
from ckpt.move.files import OpenFiles
from ckpt.move.reading import Computed, read_box, read_exactly
from ckpt.plan.checkpoint import Key
from ckpt.plan.dtypes import BY_NAME, DType
from ckpt.plan.tensors import Box, Extent, Shape, Tensor

_BLOCK = 2 << 20  # bytes scanned at a time: fits a processor cache
_MAX_WORKERS = 4


@dataclass(frozen=True, slots=True)
class FloatBits:
    """Size in bytes, and smallest magnitudes for infinity and NaN.

    `nan_is_minus_zero` marks formats with the bits of -0.0 as their only NaN.
    """

    size: int
    infinity: int | None
    nan: int | None
    nan_is_minus_zero: bool = False
    has_sign: bool = True

    @property
    def sign(self) -> int:
        return 1 << (8 * self.size - 1) if self.has_sign else 0

    @property
    def lowest(self) -> int | None:
        return self.nan if self.infinity is None else self.infinity


_F16 = FloatBits(2, 0x7C00, 0x7C01)
_F32 = FloatBits(4, 0x7F800000, 0x7F800001)
_F64 = FloatBits(8, 0x7FF0000000000000, 0x7FF0000000000001)
FLOATS: Mapping[str, FloatBits] = {
    "float64": _F64,
    "float32": _F32,
    "float16": _F16,
    "bfloat16": FloatBits(2, 0x7F80, 0x7F81),
    "complex128": _F64,
    "complex64": _F32,
    "complex32": _F16,
    "float8_e4m3fn": FloatBits(1, None, 0x7F),
    "float8_e5m2": FloatBits(1, 0x7C, 0x7D),
    "float8_e4m3fnuz": FloatBits(1, None, None, nan_is_minus_zero=True),
    "float8_e5m2fnuz": FloatBits(1, None, None, nan_is_minus_zero=True),
    "float8_e8m0fnu": FloatBits(1, None, 0xFF, has_sign=False),
    "float4_e2m1fn_x2": FloatBits(1, None, None),
}
E8M0 = BY_NAME["float8_e8m0fnu"]
#: Infinities are normal in these tensors.
_MASK = re.compile(r"mask|alibi", re.IGNORECASE)


class Values:
    __slots__ = ("_lock", "dtype", "first_infinity", "first_nan", "infinities", "nans", "scanned", "shape", "single")

    def __init__(self, dtype: DType, shape: Shape) -> None:
        self.dtype, self.shape = dtype, shape
        self.nans = self.infinities = self.scanned = 0
        self.first_nan: int | None = None
        self.first_infinity: int | None = None
        #: None before the first element, -1 for several values.
        self.single: int | None = None
        self._lock = threading.Lock()

    @property
    def is_constant(self) -> bool:
        return self.single not in (None, -1)

    @property
    def is_zero(self) -> bool:
        bits = FLOATS.get(self.dtype.name)
        return self.single in {0, bits.sign if bits and not bits.nan_is_minus_zero else 0}

    @property
    def not_finite(self) -> str:
        """Describe the NaN and infinities. Empty if there are none."""
        kinds = ((self.nans, self.first_nan, "NaN"), (self.infinities, self.first_infinity, "infinite"))
        return "; ".join(
            f"{count} of {pluralize(prod(self.shape), 'value')} are {name}, the first at {list(self.index(first))}"
            for count, first, name in kinds
            if first is not None
        )

    def index(self, flat: int) -> tuple[int, ...]:
        if flat >= prod(self.shape):  # complex numbers: second half
            flat //= 2
        return tuple(int(i) for i in np.unravel_index(flat, self.shape)) if self.shape else ()

    def is_damaged(self, fqn: str) -> bool:
        return bool(self.nans or (self.infinities and not _MASK.search(fqn)))

    def scan(self, block: NDArray, start: int) -> None:
        """Add unsigned bits, from element `start` on."""
        bits = FLOATS.get(self.dtype.name)
        found = not_finite(block, bits) if bits is not None else None
        value = -1 if self.single == -1 else _single(block, bits)
        with self._lock:
            self.scanned += block.size
            self.single = value if self.single in (None, value) else -1
            if found is not None:
                nans, infinities = found
                self.nans, self.first_nan = _added(self.nans, self.first_nan, nans, start)
                self.infinities, self.first_infinity = _added(self.infinities, self.first_infinity, infinities, start)


def _added(count: int, first: int | None, places: NDArray, start: int) -> tuple[int, int | None]:
    if not places.size:
        return count, first
    here = start + int(places[0])
    return count + places.size, here if first is None else min(first, here)


def not_finite(block: NDArray, bits: FloatBits) -> tuple[NDArray, NDArray] | None:
    """Return positions with NaN and with infinities, or None for a clean block."""
    signed = block.view(f"i{bits.size}")
    if bits.nan_is_minus_zero:
        lowest = np.iinfo(signed.dtype).min
        return (np.flatnonzero(signed == lowest), np.empty(0, np.int64)) if signed.min() == lowest else None
    if bits.lowest is None:
        return None
    if block.max() < bits.lowest + bits.sign and (not bits.has_sign or signed.max() < bits.lowest):
        return None
    magnitude = block & block.dtype.type(bits.sign - 1) if bits.has_sign else block
    assert bits.nan is not None
    infinity = magnitude == bits.infinity if bits.infinity is not None else np.zeros(0, bool)
    return np.flatnonzero(magnitude >= bits.nan), np.flatnonzero(infinity)


def _single(block: NDArray, bits: FloatBits | None) -> int:
    """Return the bits if the block has one value, else -1. Both zeros count as one value."""
    first = int(block[0])
    if bits is not None and bits.has_sign and not bits.nan_is_minus_zero and first in (0, bits.sign):
        sample = (int(block[-1]), int(block[block.size // 2]))
        is_zero = (
            all(value in (0, bits.sign) for value in sample) and not (block & block.dtype.type(bits.sign - 1)).any()
        )
        return 0 if is_zero else -1
    if first != block[-1] or first != block[block.size // 2]:
        return -1
    return first if (block == first).all() else -1


@dataclass(frozen=True, slots=True)
class _Block:
    """Elements to scan: `count` from number `start` on, at a file's `offset` or in a box."""

    key: Key
    start: int
    count: int
    path: str = ""
    offset: int = 0
    box: Box | None = None


def check_finite(tensors: Mapping[Key, Tensor], computed: Computed, path: str, *, parts: Container[str] = ()) -> None:
    """Raise CorruptError for NaN or infinity. Writing computes the quantized weights' `parts` from finite numbers."""
    floats = {key: one for key, one in tensors.items() if one.dtype.name in FLOATS and one.fqn not in parts}
    for (fqn, _), values in scan(floats, computed).items():
        if values.is_damaged(fqn):
            raise CorruptError(
                "can't quantize a model with NaN or infinity",
                path=path,
                fqn=fqn,
                expected="finite values",
                found=values.not_finite,
                hint="use `ckpt check --values` to find all of them",
            )


def scan(
    tensors: Mapping[Key, Tensor],
    computed: Computed,
    exponents: Iterable[str] = (),
    progress: Callable[[int], None] | None = None,
) -> dict[Key, Values]:
    """Return every tensor's values. `exponents` names byte tensors with float8_e8m0fnu scales.

    Raise CorruptError if a file ends early.
    """
    scales = frozenset(exponents)
    found = {
        key: Values(E8M0 if tensor.fqn in scales and tensor.dtype.itemsize == 1 else tensor.dtype, tensor.shape)
        for key, tensor in tensors.items()
    }
    blocks, lock = _scan_blocks(tensors, computed), threading.Lock()

    def next_block() -> _Block | None:
        with lock:
            return next(blocks, None)

    def work() -> None:
        buffer = np.empty(_BLOCK, np.uint8)
        with OpenFiles() as sources:
            while (block := next_block()) is not None:
                tensor, values = tensors[block.key], found[block.key]
                values.scan(_read_block(block, tensor, computed, sources, buffer), block.start)
                if progress is not None:
                    with lock:
                        progress(block.count * tensor.dtype.itemsize)

    count = min(_MAX_WORKERS, os.cpu_count() or 1)
    with ThreadPoolExecutor(count) as pool:
        for task in [pool.submit(work) for _ in range(count)]:
            task.result()
    return found


def _read_block(block: _Block, tensor: Tensor, computed: Computed, sources: OpenFiles, buffer: NDArray) -> NDArray:
    """Return a block's bits as unsigned integers, two per complex number."""
    bits = FLOATS.get(tensor.dtype.name)
    unsigned = f"u{bits.size if bits else tensor.dtype.itemsize}"
    if block.box is not None:
        return read_box(tensor, block.box, computed, sources).reshape(-1).view(np.uint8).view(unsigned)
    raw = buffer[: block.count * tensor.dtype.itemsize]
    read_exactly(sources, block.path, block.offset, raw.data)
    return raw.view(unsigned)


def _scan_blocks(tensors: Mapping[Key, Tensor], computed: Computed) -> Iterator[_Block]:
    placed = [(tensor, _runs(tensor, computed)) for tensor in tensors.values() if tensor.numel]
    in_files = sorted((item for item in placed if item[1]), key=lambda item: (item[1][0][2].path, item[1][0][2].offset))
    for tensor, runs in in_files:
        size = tensor.dtype.itemsize
        step = max(1, _BLOCK // size)
        for start, stop, extent, at in runs:
            for first in range(start, stop, step):
                count = min(step, stop - first)
                offset = extent.offset + (at + first - start) * size
                yield _Block(tensor.key, first, count, extent.path, offset)
    for tensor, runs in placed:
        if not runs:
            yield from _boxes(tensor)


def _runs(tensor: Tensor, computed: Computed) -> list[tuple[int, int, Extent, int]]:
    """Return contiguous runs in files. A computed or strided tensor has none."""
    found = [(start, stop, extent, at) for start, stop, extent, at, _ in tensor.runs() or ()]
    return [] if any(extent.path in computed for _, _, extent, _ in found) else found


def _boxes(tensor: Tensor) -> Iterator[_Block]:
    if not tensor.shape:
        yield _Block(tensor.key, 0, 1, box=Box((), ()))
        return
    rows, row = tensor.shape[0], tensor.numel // tensor.shape[0]
    step = max(1, 4 * _BLOCK // max(1, row * tensor.dtype.itemsize))
    for first in range(0, rows, step):
        count, rest = min(step, rows - first), tensor.shape[1:]
        box = Box((first, *(0 for _ in rest)), (count, *rest))
        yield _Block(tensor.key, first * row, count * row, box=box)


def bits_of(tensor: Tensor, box: Box, computed: Computed) -> NDArray:
    return read_box(tensor, box, computed).reshape(-1).view(storage_dtype(tensor.dtype))
