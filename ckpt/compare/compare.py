"""Comparison of two descriptions of one tensor, on raw bits.

Equal means equal bits: a NaN only equals the same payload, and -0.0 differs from 0.0.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import lru_cache
from math import prod
from types import MappingProxyType

import numpy as np
from numpy.typing import NDArray

from ckpt.base.errors import CorruptError
from ckpt.base.text import pluralize
from ckpt.base.words import Message
from ckpt.move.casts import FLOATS, cast_bits, storage_dtype
from ckpt.move.files import OpenFiles
from ckpt.move.reading import Computed, read_exactly, strided
from ckpt.move.source import remote_object, truncated
from ckpt.plan.checkpoint import MASTER, WEIGHT, Checkpoint, Key
from ckpt.plan.dtypes import BFLOAT16, BOOL, DType
from ckpt.plan.planner import check_source, first_index
from ckpt.plan.tensors import Box, Extent, Fragment, Overlap, Region, Shape, Tensor, contiguous_strides, overlay

Value = int | float | str

_CHUNK = 1 << 20  # both sides together fit a usual L2 cache
_READ_COSTS = 6 << 10  # bytes copied in the time of one more read call

_UNTIED = Message(
    "the config ties both: if they were trained apart, give one with {config}, and with tie_word_embeddings false in it"
)

_FLOAT_VIEWS = {"float64": "<f8", "float32": "<f4", "float16": "<f2"}
_INT_VIEWS = {f"{sign}int{8 * n}": f"<{sign or 'i'}{n}" for sign in ("", "u") for n in (1, 2, 4, 8)}
_COMPLEX_VIEWS = {"complex64": "<c8", "complex128": "<c16"}


@dataclass(frozen=True, slots=True)
class Element:
    """One element on one side: its bits in hex (most significant first), its value, and its position.

    `value` is text for complex numbers, and None if numpy cannot decode the dtype. With a cast, bits and value are the
    compared ones, and `offset` (in bytes) is the element's position in its own dtype.
    """

    bits: str
    value: Value | None
    path: str
    offset: int
    rank: int | None

    def __str__(self) -> str:
        if self.value is None:
            return f"0x{self.bits}"
        if isinstance(self.value, float) and not math.isfinite(self.value):
            return f"{self.value} (0x{self.bits})"
        return str(self.value)


@dataclass(frozen=True, slots=True)
class Difference:
    """Difference between two tensors. `index` is the first differing element in row-major order.

    `largest` is the largest absolute difference between numbers, or None. `num_nan` counts differing pairs with a NaN.
    """

    num_different: int
    numel: int
    index: Shape
    a: Element
    b: Element
    largest: int | float | None
    num_nan: int

    def __str__(self) -> str:
        of = pluralize(self.numel, "element")
        text = f"{self.num_different} of {of} differ, first {list(self.index)}: {self.a} and {self.b}"
        if self.largest is not None:
            text += f"; largest difference {self.largest}"
        if self.num_nan:
            text += f"; {self.num_nan} with NaN"
        return text


def number_text(value: int | float) -> str:
    """Format a number so that equal values give equal text (4 and 4.0, any NaN), but 0.0 and -0.0 do not."""
    try:
        as_float = float(value)
    except OverflowError:
        return hex(int(value))
    return hex(value) if isinstance(value, int) and as_float != value else as_float.hex()


def narrower(a: DType, b: DType) -> DType | None:
    """Return the narrower floating dtype, or None if there is no cast between them."""
    if a == b:
        return a
    if a not in FLOATS or b not in FLOATS or a.itemsize == b.itemsize:
        return None
    return min(a, b, key=lambda dtype: dtype.itemsize)


class Reader(AbstractContextManager["Reader"]):
    """Buffers and open files for one comparing thread.

    `advance` gets the byte count after each read from side `a`. `computed` is `Checkpoint.computed` for each side, or
    one for both. The last contents are cached, because they are read in pieces.
    """

    def __init__(
        self,
        advance: Callable[[int], None] | None = None,
        computed: Computed | tuple[Computed, Computed] = MappingProxyType({}),
    ) -> None:
        self.advance = advance or (lambda _: None)
        self._computed = computed if isinstance(computed, tuple) else (computed, computed)
        self._content = lru_cache(maxsize=2)(lambda side, path: self._computed[side][path]())
        self._files = OpenFiles()
        self._buffers = tuple(np.empty(_CHUNK, np.uint8) for _ in range(2))
        self._words = tuple(buffer.view(np.uint64) for buffer in self._buffers)
        self._views = tuple(buffer.data for buffer in self._buffers)
        self._unequal = np.empty(_CHUNK // 8, np.bool_)
        self._scratch: NDArray | None = None
        self._held_span: tuple[str, int, int] | None = None
        self._held = memoryview(b"")

    def __exit__(self, *exc: object) -> None:
        self._files.close()

    def fill(self, side: int, path: str, offset: int, size: int) -> None:
        assert size <= _CHUNK, "more than the buffer holds"
        self._read(side, path, offset, self._views[side][:size])

    def hold(self, span: tuple[str, int, int] | None) -> None:
        """Fetch a range (path, offset, length) from a store for `fetched_bytes`. None releases it."""
        if span != self._held_span:
            self._held_span, self._held = None, memoryview(b"")  # release before fetching more
            if span is not None:
                self._held_span, self._held = span, self.fetch(*span)

    def fetched_bytes(self, path: str, offset: int, size: int) -> memoryview | None:
        if self._held_span is None or self._held_span[0] != path:
            return None
        first = offset - self._held_span[1]
        return self._held[first : first + size] if 0 <= first <= first + size <= len(self._held) else None

    def fetch(self, path: str, offset: int, size: int) -> memoryview:
        """Return bytes from a store, uncached."""
        remote = remote_object(self._files.descriptor(path))
        content = memoryview(b"") if remote is None else remote.fetched(offset, offset + size)
        if len(content) < size:
            raise truncated(path, offset + len(content))
        return content

    def _read(self, side: int, path: str, offset: int, into: memoryview) -> None:
        if path in self._computed[side]:
            into[:] = self._content(side, path)[offset : offset + len(into)]
            return
        read_exactly(self._files, path, offset, into)

    def is_same(self, size: int) -> bool:
        words = size >> 3
        if words:
            unequal = np.not_equal(self._words[0][:words], self._words[1][:words], out=self._unequal[:words])
            if unequal.any():
                return False
        a, b = self._views
        return size & 7 == 0 or a[words << 3 : size] == b[words << 3 : size]

    def bits(self, side: int, numel: int, dtype: DType) -> NDArray:
        return self._buffers[side][: numel * dtype.itemsize].view(storage_dtype(dtype))

    def gather(self, side: int, extent: Extent) -> NDArray:
        order = sorted(range(len(extent.shape)), key=lambda dim: -extent.strides[dim])
        stored = extent._replace(
            shape=tuple(extent.shape[dim] for dim in order),
            strides=tuple(extent.strides[dim] for dim in order),
        )
        elements = self.bits(side, extent.numel, extent.dtype).reshape(stored.shape)
        self._read_strided(side, stored, elements)
        return elements.transpose([order.index(dim) for dim in range(len(order))])

    def _read_strided(self, side: int, extent: Extent, into: NDArray) -> None:
        """Read an extent with descending strides, close rows in one call with their gaps."""
        if extent.is_contiguous:
            self._read(side, extent.path, extent.offset, into.reshape(-1).view(np.uint8).data)
            return
        row = extent._replace(shape=extent.shape[1:], strides=extent.strides[1:])
        pace, reach = extent.strides[0] * extent.dtype.itemsize, row.end - row.offset
        if reach > _CHUNK or pace > _num_runs(row) * _READ_COSTS:
            for number in range(extent.shape[0]):
                self._read_strided(side, row._replace(offset=row.offset + number * pace), into[number])
            return
        if self._scratch is None:
            self._scratch = np.empty(_CHUNK, np.uint8)
        step = (_CHUNK - reach) // max(pace, 1) + 1
        for start in range(0, extent.shape[0], step):
            size = min(step, extent.shape[0] - start)
            raw = self._scratch[: (size - 1) * pace + reach]
            self._read(side, extent.path, extent.offset + start * pace, raw.data)
            into[start : start + size] = strided(raw.view(into.dtype), (size, *row.shape), extent.strides)


def _num_runs(extent: Extent) -> int:
    run = 1
    for size, stride in zip(reversed(extent.shape), reversed(extent.strides), strict=True):
        if size != 1 and stride != run:
            break
        run *= size
    return extent.numel // run


def compare(
    shape: Shape, a: Iterable[Fragment], b: Iterable[Fragment], reader: Reader, *, cast: bool = False
) -> Difference | None:
    """Return the difference between the elements in `a` and `b`, or None if all bits are equal.

    With `cast`, the side with the wider floating dtype is cast to the narrower one. Raise CorruptError if the fragments
    do not cover the shape, the dtypes do not allow a comparison, or a file ends too early.
    """
    found = _Tally(shape)
    covered = 0
    for common in overlay(a, b, shape):
        covered += common.a.numel
        if common.a.dtype == common.b.dtype and common.a.is_contiguous and common.b.is_contiguous:
            _compare_bytes(common, reader, found)
        else:
            _compare_elements(common, reader, found, cast)
    check_covered(covered, shape)
    return found.difference()


def check_covered(covered: int, shape: Shape) -> None:
    if covered != prod(shape):
        raise CorruptError(
            "the stored parts do not cover a tensor exactly once",
            expected=f"{pluralize(prod(shape), 'element')} of shape {list(shape)}",
            found=f"{pluralize(covered, 'element')} shared by both sides",
        )


def _compare_bytes(common: Overlap, reader: Reader, found: _Tally) -> None:
    a, b = common.a, common.b
    nbytes, itemsize = a.nbytes, a.dtype.itemsize
    for start in range(0, nbytes, _CHUNK):
        size = min(_CHUNK, nbytes - start)
        reader.fill(0, a.path, a.offset + start, size)
        reader.fill(1, b.path, b.offset + start, size)
        if not reader.is_same(size):
            numel = size // itemsize
            bits = reader.bits(0, numel, a.dtype), reader.bits(1, numel, a.dtype)
            found.add(common, common.region, start // itemsize, a.dtype, *bits)
        reader.advance(size)


def _compare_elements(common: Overlap, reader: Reader, found: _Tally, cast: bool) -> None:
    dtype = narrower(common.a.dtype, common.b.dtype) if cast else common.a.dtype
    if dtype is None or (not cast and common.b.dtype != dtype):
        raise CorruptError(
            "one part is stored in different dtypes",
            path=common.b.path,
            rank=common.b_rank,
            expected=common.a.dtype,
            found=common.b.dtype,
        )
    for region, start, a, b in blocks(common):
        x = _cast(reader.gather(0, a), a.dtype, dtype)
        y = _cast(reader.gather(1, b), b.dtype, dtype)
        if not np.array_equal(x, y):
            found.add(common, region, start, dtype, x.reshape(-1), y.reshape(-1))
        reader.advance(a.nbytes)


def _cast(bits: NDArray, source: DType, target: DType) -> NDArray:
    return bits if source == target else cast_bits(bits.reshape(-1), source, target).reshape(bits.shape)


def blocks(common: Overlap) -> Iterator[tuple[Region, int, Extent, Extent]]:
    """Yield two fragments' common part in pieces that fit the buffers.

    Each piece is a region, the position of the piece's first element in it, and the extents on both sides.
    """
    a, b = common.a, common.b
    if a.is_contiguous and b.is_contiguous:
        a, b = a.reshape((a.numel,)), b.reshape((b.numel,))
        step = _CHUNK // max(a.dtype.itemsize, b.dtype.itemsize)
        for start in range(0, a.numel, step):
            stop = min(start + step, a.numel)
            yield common.region, start, a.flat(start, stop), b.flat(start, stop)
        return
    assert isinstance(common.region, Box)  # flat ranges are contiguous
    for box in _cut_to_buffers(Box((0,) * len(common.region.sizes), common.region.sizes), a, b):
        yield common.region.inside(box), 0, a.narrow(box), b.narrow(box)


def _cut_to_buffers(box: Box, a: Extent, b: Extent) -> Iterator[Box]:
    """Yield `box` in parts that fit the buffers.

    The dim with the largest stride on both sides is halved first. A matrix that is transposed on one side is thus cut
    into squares, with contiguous runs in both files.
    """
    if box.numel * max(a.dtype.itemsize, b.dtype.itemsize) <= _CHUNK:
        yield box
        return
    dims = [dim for dim, size in enumerate(box.sizes) if size > 1]
    dim = max(dims, key=lambda dim: (min(a.strides[dim], b.strides[dim]), box.sizes[dim]))
    half = box.sizes[dim] // 2
    for start, stop in ((0, half), (half, box.sizes[dim])):
        offsets = (*box.offsets[:dim], box.offsets[dim] + start, *box.offsets[dim + 1 :])
        sizes = (*box.sizes[:dim], stop - start, *box.sizes[dim + 1 :])
        yield from _cut_to_buffers(Box(offsets, sizes), a, b)


class _Tally:
    def __init__(self, shape: Shape) -> None:
        self.shape = shape
        self.num_different = 0
        self.num_nan = 0
        self.largest: int | float | None = None
        self.first: tuple[int, Shape, Element, Element] | None = None

    def add(self, common: Overlap, region: Region, start: int, dtype: DType, x: NDArray, y: NDArray) -> None:
        """Count differences between 1-d arrays of elements in `region`."""
        if dtype.itemsize in (1, 2, 4, 8):
            different = np.flatnonzero(x != y)
        else:
            bytes_differ = x.view(np.uint8) != y.view(np.uint8)
            different = np.flatnonzero(bytes_differ.reshape(-1, dtype.itemsize).any(axis=1))
        x, y = x[different], y[different]
        self.num_different += len(different)
        self._measure(dtype, x, y)
        index = first_index(region, self.shape, start + int(different[0]))
        position = sum(i * step for i, step in zip(index, contiguous_strides(self.shape), strict=True))
        if self.first is None or position < self.first[0]:
            a = _element(x[:1], dtype, common.a, _offset(common.region, common.a, self.shape, index), common.a_rank)
            b = _element(y[:1], dtype, common.b, _offset(common.region, common.b, self.shape, index), common.b_rank)
            self.first = position, index, a, b

    def _measure(self, dtype: DType, x: NDArray, y: NDArray) -> None:
        a, b = numbers(x, dtype), numbers(y, dtype)
        if a is None or b is None:
            return
        if a.dtype.kind in "iu":
            # A difference between 64-bit numbers is exact modulo 2^64.
            largest: int | float = int((np.maximum(a, b).view(np.uint64) - np.minimum(a, b).view(np.uint64)).max())
        else:
            nan = np.isnan(a) | np.isnan(b)
            self.num_nan += int(np.count_nonzero(nan))
            if nan.all():
                return
            with np.errstate(over="ignore"):
                largest = float(np.abs(a[~nan] - b[~nan]).max())
        self.largest = largest if self.largest is None else max(self.largest, largest)

    def difference(self) -> Difference | None:
        if self.first is None:
            return None
        _, index, a, b = self.first
        return Difference(self.num_different, prod(self.shape), index, a, b, self.largest, self.num_nan)


def _offset(region: Region, extent: Extent, shape: Shape, index: Shape) -> int:
    if isinstance(region, Box):
        dims = zip(index, region.offsets, region.all_steps, extent.strides, strict=True)
        position = sum((i - start) // step * stride for i, start, step, stride in dims)
    else:
        flat = sum(i * step for i, step in zip(index, contiguous_strides(shape), strict=True))
        position = flat - region.start
    return extent.offset + position * extent.dtype.itemsize


def _element(bits: NDArray, dtype: DType, extent: Extent, offset: int, rank: int | None) -> Element:
    return Element(bits.tobytes()[::-1].hex(), value(bits, dtype), extent.path, offset, rank)


def numbers(bits: NDArray, dtype: DType) -> NDArray | None:
    """Return 64-bit integers, float64 or complex128. None if numpy cannot decode the dtype."""
    with np.errstate(invalid="ignore"):  # a signalling NaN
        if dtype.name in _FLOAT_VIEWS:
            return bits.view(_FLOAT_VIEWS[dtype.name]).astype(np.float64)
        if dtype == BFLOAT16:
            return (bits.astype(np.uint32) << np.uint32(16)).view(np.float32).astype(np.float64)
        if dtype.name in _COMPLEX_VIEWS:
            return bits.view(_COMPLEX_VIEWS[dtype.name]).astype(np.complex128)
    if dtype == BOOL:
        return bits.view(np.uint8).astype(np.uint64)
    if dtype.name in _INT_VIEWS:
        return bits.view(_INT_VIEWS[dtype.name]).astype(np.int64 if dtype.name.startswith("int") else np.uint64)
    return None


def value(bits: NDArray, dtype: DType) -> Value | None:
    """Return the only element as a Python number, text if not finite, or None if unknown."""
    array = numbers(bits, dtype)
    if array is None:
        return None
    if array.dtype.kind == "c":
        return str(array[0])
    return int(array[0]) if array.dtype.kind in "iu" else float(array[0])


def location(tensor: Tensor) -> tuple[str, int]:
    first = next(iter(tensor.fragments()), None)
    return (first.extent.path, first.extent.offset) if first else ("", 0)


def check_replicas(tensor: Tensor, reader: Reader) -> None:
    """Raise CorruptError if a replica's bits differ from the tensor's source."""
    for replica in tensor.replicas:
        check_source(tensor._replace(source=replica))
        difference = compare(tensor.shape, tensor.fragments(), replica.fragments(tensor.shape), reader)
        if difference is not None:
            one, other = difference.a, difference.b
            of_ranks = one.rank is not None and other.rank is not None
            raise CorruptError(
                "ranks disagree about a shared tensor" if of_ranks else "copies disagree for one tensor",
                path=other.path,
                rank=other.rank,
                fqn=tensor.fqn,
                expected=f"the value from {f'rank {one.rank}' if of_ranks else f'byte {one.offset}'}, {one.path}",
                found=f"element {list(difference.index)} at byte {other.offset} is {other} instead of {one} "
                f"(bits {other.bits} instead of {one.bits}); {difference.num_different} differ",
                hint="`ckpt convert --replica RANK` takes one rank's copy" if of_ranks else _UNTIED,
            )


def check_masters(checkpoint: Checkpoint) -> None:
    """Raise CorruptError if a weight is not its rounded fp32 master."""
    with Reader(computed=checkpoint.computed) as reader:
        for master in checkpoint.with_role(MASTER):
            weight = checkpoint.get(master.fqn, WEIGHT)
            if weight is None or weight.shape != master.shape or narrower(master.dtype, weight.dtype) is None:
                continue
            difference = compare(master.shape, weight.fragments(), master.fragments(), reader, cast=True)
            if difference is not None:
                one, other = difference.a, difference.b
                raise CorruptError(
                    "a parameter's master does not match its stored weight",
                    path=other.path,
                    rank=other.rank,
                    fqn=master.fqn,
                    expected=f"{one}, from {one.path}",
                    found=f"element {list(difference.index)} is {other}; {difference.num_different} differ",
                    hint="are all files from one save, with each rank's file under its own name?",
                )


def check_replicas_of(checkpoint: Checkpoint, keys: Iterable[Key] | None = None) -> None:
    """Raise CorruptError if a tensor's replicas differ between ranks."""
    with Reader(computed=checkpoint.computed) as reader:
        for key in dict.fromkeys(checkpoint.tensors if keys is None else keys):
            check_replicas(checkpoint.tensors[key], reader)
