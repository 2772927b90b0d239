"""Compare two descriptions of the same logical tensor, element by element, on raw bits.

Both sides are read through buffers of fixed size, so memory does not depend on the tensors, and what is compared is
still in the processor's cache.  Equal means equal bits: a NaN equals itself and not another payload, and -0.0 is not
0.0.  Numbers are only made of bits to describe a difference that the bits have shown.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import lru_cache
from math import prod

import numpy as np
from numpy.typing import NDArray

from ckpt.base.errors import CorruptError
from ckpt.base.text import counted
from ckpt.move.casts import FLOATS, cast_bits, storage_dtype
from ckpt.move.files import OpenFiles
from ckpt.move.reading import Computed, read_exactly, strided
from ckpt.move.source import behind, truncated
from ckpt.plan.checkpoint import MASTER, WEIGHT, Checkpoint, Key
from ckpt.plan.dtypes import BFLOAT16, BOOL, DType
from ckpt.plan.planner import check_source, first_index
from ckpt.plan.tensors import Box, Extent, Fragment, Overlap, Region, Shape, Tensor, contiguous_strides, overlay

Value = int | float | str

_CHUNK = 1 << 20  # bytes of each buffer: both sides together stay within a usual second-level cache
_READ_COSTS = 6 << 10  # bytes that could be copied in the time that one more read call takes

_FLOAT_VIEWS = {"float64": "<f8", "float32": "<f4", "float16": "<f2"}
_INT_VIEWS = {f"{sign}int{8 * n}": f"<{sign or 'i'}{n}" for sign in ("", "u") for n in (1, 2, 4, 8)}
_COMPLEX_VIEWS = {"complex64": "<c8", "complex128": "<c16"}


@dataclass(frozen=True, slots=True)
class Element:
    """One element of one side: its bits in hex, most significant first, its value, and where it lies.

    `value` is text where Python has no number for it (complex), and None where numpy cannot decode the dtype.  With a
    cast, bits and value are those that were compared, and `offset` (in bytes from the file's start) is where the
    element lies in its own dtype.
    """

    bits: str
    value: Value | None
    path: str
    offset: int
    rank: int | None

    def __str__(self) -> str:
        """The value, and the bits too where the value alone does not tell."""
        if self.value is None:
            return f"0x{self.bits}"
        if isinstance(self.value, float) and not math.isfinite(self.value):
            return f"{self.value} (0x{self.bits})"
        return str(self.value)


@dataclass(frozen=True, slots=True)
class Difference:
    """How two tensors differ.  `index` is the first differing element in row-major order.

    `largest` is the largest absolute difference, over the pairs in which both sides are numbers (None if there is
    none, or the dtype has no numbers); `num_nan` counts the differing pairs with a NaN.
    """

    num_different: int
    numel: int
    index: Shape
    a: Element
    b: Element
    largest: int | float | None
    num_nan: int

    def __str__(self) -> str:
        of = counted(self.numel, "element")
        text = f"{self.num_different} of {of} differ, first {list(self.index)}: {self.a} and {self.b}"
        if self.largest is not None:
            text += f"; largest difference {self.largest}"
        if self.num_nan:
            text += f"; {self.num_nan} with NaN"
        return text


def number_text(value: int | float) -> str:
    """A number as text that is the same for the same value (4 and 4.0, any NaN) and tells 0.0 from -0.0."""
    try:
        as_float = float(value)
    except OverflowError:
        return hex(int(value))
    return hex(value) if isinstance(value, int) and as_float != value else as_float.hex()


def narrower(a: DType, b: DType) -> DType | None:
    """The dtype that the wider of two floating dtypes can be cast to, or None where there is no such pair."""
    if a == b:
        return a
    if a not in FLOATS or b not in FLOATS or a.itemsize == b.itemsize:
        return None
    return min(a, b, key=lambda dtype: dtype.itemsize)


class Reader(AbstractContextManager["Reader"]):
    """The buffers and open files of one comparing thread.  Use as a context manager.

    `advance` is called with the number of bytes that were read from side `a`, after each piece of them.  `computed` is
    `Checkpoint.computed` of both sides; the last contents are kept, as they are read piece by piece.
    """

    def __init__(self, advance: Callable[[int], None] | None = None, computed: Computed | None = None) -> None:
        self.advance = advance or (lambda _: None)
        self._content = lru_cache(maxsize=2)(lambda path: (computed or {})[path]())
        self._computed = computed or {}
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
        """Read `size` bytes into the buffer of `side`."""
        assert size <= _CHUNK, "more than the buffer holds"
        self._read(path, offset, self._views[side][:size])

    def hold(self, span: tuple[str, int, int] | None) -> None:
        """Fetch a range (path, offset, number of bytes) from a store, for `held` to return; None: no range."""
        if span != self._held_span:
            self._held_span, self._held = None, memoryview(b"")  # given back before more is asked for
            if span is not None:
                self._held_span, self._held = span, self.fetch(*span)

    def held(self, path: str, offset: int, size: int) -> memoryview | None:
        """These bytes, if they are in the range that is held."""
        if self._held_span is None or self._held_span[0] != path:
            return None
        first = offset - self._held_span[1]
        return self._held[first : first + size] if 0 <= first <= first + size <= len(self._held) else None

    def fetch(self, path: str, offset: int, size: int) -> memoryview:
        """Bytes of what is in a store, as they come: copied nowhere, and not kept."""
        remote = behind(self._files.descriptor(path))
        content = memoryview(b"") if remote is None else remote.fetched(offset, offset + size)
        if len(content) < size:
            raise truncated(path, offset + len(content))
        return content

    def _read(self, path: str, offset: int, into: memoryview) -> None:
        if path in self._computed:
            into[:] = self._content(path)[offset : offset + len(into)]
            return
        read_exactly(self._files, path, offset, into)

    def is_same(self, size: int) -> bool:
        """Whether the first `size` bytes of both buffers are the same."""
        words = size >> 3
        if words:
            unequal = np.not_equal(self._words[0][:words], self._words[1][:words], out=self._unequal[:words])
            if unequal.any():
                return False
        a, b = self._views
        return size & 7 == 0 or a[words << 3 : size] == b[words << 3 : size]

    def bits(self, side: int, numel: int, dtype: DType) -> NDArray:
        """The first elements of the buffer of `side`, as raw bits."""
        return self._buffers[side][: numel * dtype.itemsize].view(storage_dtype(dtype))

    def gather(self, side: int, extent: Extent) -> NDArray:
        """The elements of `extent`, which fit the buffer of `side`, as an array of raw bits in the extent's shape."""
        order = sorted(range(len(extent.shape)), key=lambda dim: -extent.strides[dim])
        stored = extent._replace(
            shape=tuple(extent.shape[dim] for dim in order),
            strides=tuple(extent.strides[dim] for dim in order),
        )
        elements = self.bits(side, extent.numel, extent.dtype).reshape(stored.shape)
        self._read_strided(stored, elements)
        return elements.transpose([order.index(dim) for dim in range(len(order))])

    def _read_strided(self, extent: Extent, into: NDArray) -> None:
        """Read an extent whose strides fall from dim to dim, in as few calls as pay.

        Rows that lie close together are read in one go, gaps included, into a scratch buffer; others one by one.
        """
        if extent.is_contiguous:
            self._read(extent.path, extent.offset, into.reshape(-1).view(np.uint8).data)
            return
        row = extent._replace(shape=extent.shape[1:], strides=extent.strides[1:])
        pace, reach = extent.strides[0] * extent.dtype.itemsize, row.end - row.offset
        if reach > _CHUNK or pace > _num_runs(row) * _READ_COSTS:
            for number in range(extent.shape[0]):
                self._read_strided(row._replace(offset=row.offset + number * pace), into[number])
            return
        if self._scratch is None:
            self._scratch = np.empty(_CHUNK, np.uint8)
        step = (_CHUNK - reach) // max(pace, 1) + 1
        for start in range(0, extent.shape[0], step):
            size = min(step, extent.shape[0] - start)
            raw = self._scratch[: (size - 1) * pace + reach]
            self._read(extent.path, extent.offset + start * pace, raw.data)
            into[start : start + size] = strided(raw.view(into.dtype), (size, *row.shape), extent.strides)


def _num_runs(extent: Extent) -> int:
    """How many pieces without a gap the extent consists of."""
    run = 1
    for size, stride in zip(reversed(extent.shape), reversed(extent.strides), strict=True):
        if size != 1 and stride != run:
            break
        run *= size
    return extent.numel // run


def compare(
    shape: Shape, a: Iterable[Fragment], b: Iterable[Fragment], reader: Reader, *, cast: bool = False
) -> Difference | None:
    """How the elements in fragments `a` differ from those in fragments `b`, or None where every bit is the same.

    With `cast`, the side with the wider floating dtype is first cast to the narrower one.  Raises CorruptError where
    the two together do not cover the shape, the dtypes do not allow it, or a file ends too early.
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
    """Raise CorruptError unless so many elements, which both sides have in common, are all of a tensor of `shape`."""
    if covered != prod(shape):
        raise CorruptError(
            "the stored parts of a tensor do not cover it once",
            expected=f"{counted(prod(shape), 'element')} of shape {list(shape)}",
            found=f"{counted(covered, 'element')} that both sides have in common",
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
    """Compare where elements have to be cast or put in order first."""
    dtype = narrower(common.a.dtype, common.b.dtype) if cast else common.a.dtype
    if dtype is None or (not cast and common.b.dtype != dtype):
        raise CorruptError(
            "the same part of a tensor is stored in different dtypes",
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
    """The common part of two fragments, in pieces that fit the buffers.

    Of each part: a region, the position in it of the part's first element, and the part's extents on both sides.
    """
    a, b = common.a, common.b
    if a.is_contiguous and b.is_contiguous:
        a, b = a.reshape((a.numel,)), b.reshape((b.numel,))
        step = _CHUNK // max(a.dtype.itemsize, b.dtype.itemsize)
        for start in range(0, a.numel, step):
            stop = min(start + step, a.numel)
            yield common.region, start, a.flat(start, stop), b.flat(start, stop)
        return
    assert isinstance(common.region, Box)  # flat ranges are contiguous on both sides
    for box in _cut_to_buffers(Box((0,) * len(common.region.sizes), common.region.sizes), a, b):
        yield common.region.inside(box), 0, a.narrow(box), b.narrow(box)


def _cut_to_buffers(box: Box, a: Extent, b: Extent) -> Iterator[Box]:
    """`box` in parts that fit the buffers.

    The dim whose elements lie farthest apart on both sides is halved first, and of equals the longest: so a matrix
    that is transposed on one side is cut into squares, which have runs of some length in both files.
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
    """Differences of a tensor as they are found, in any order."""

    def __init__(self, shape: Shape) -> None:
        self.shape = shape
        self.num_different = 0
        self.num_nan = 0
        self.largest: int | float | None = None
        self.first: tuple[int, Shape, Element, Element] | None = None

    def add(self, common: Overlap, region: Region, start: int, dtype: DType, x: NDArray, y: NDArray) -> None:
        """Count in the 1-d arrays `x` and `y`: the elements of `region` from position `start` on, not all the same."""
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
            # The difference of two 64-bit numbers may not fit a signed one; modulo 2^64 it is exact.
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
    """Where in its file the element at `index` of the tensor lies, given the region that `extent` holds."""
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
    """The 1-d array `bits` as 64-bit integers, float64 or complex128; None where numpy cannot decode the dtype."""
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
    """The one element of `bits` as a Python number, as text where JSON has none, or None where it is unknown."""
    array = numbers(bits, dtype)
    if array is None:
        return None
    if array.dtype.kind == "c":
        return str(array[0])
    return int(array[0]) if array.dtype.kind in "iu" else float(array[0])


def location(tensor: Tensor) -> tuple[str, int]:
    """Where a tensor begins: path and offset, to read tensors in the order in which they lie in the files."""
    first = next(iter(tensor.fragments()), None)
    return (first.extent.path, first.extent.offset) if first else ("", 0)


def check_replicas(tensor: Tensor, reader: Reader) -> None:
    """Raise CorruptError where a replica of the tensor does not hold the same bits as its source."""
    for replica in tensor.replicas:
        check_source(replace(tensor, source=replica))
        difference = compare(tensor.shape, tensor.fragments(), replica.fragments(tensor.shape), reader)
        if difference is not None:
            one, other = difference.a, difference.b
            of_ranks = one.rank is not None or other.rank is not None
            raise CorruptError(
                "ranks that should hold the same tensor disagree" if of_ranks else "copies of one tensor disagree",
                path=other.path,
                rank=other.rank,
                fqn=tensor.fqn,
                expected=f"what {f'rank {one.rank}' if of_ranks else f'byte {one.offset}'} holds, {one.path}",
                found=f"element {list(difference.index)} at byte {other.offset} is {other} instead of {one} "
                f"(bits {other.bits} instead of {one.bits}); {difference.num_different} differ",
                hint="`ckpt convert --replica RANK` takes one rank's copy"
                if of_ranks
                else "the config ties these tensors, and the files hold two: does it belong to them?",
            )


def check_masters(checkpoint: Checkpoint) -> None:
    """Raise CorruptError where a fp32 master, rounded to the dtype of the weight stored beside it, is not that weight.

    All of both is read.  Partitions of ranks that were exchanged, or are of another step, cannot pass.
    """
    with Reader() as reader:
        for master in checkpoint.with_role(MASTER):
            weight = checkpoint.get(master.fqn, WEIGHT)
            if weight is None or weight.shape != master.shape or narrower(master.dtype, weight.dtype) is None:
                continue
            difference = compare(master.shape, weight.fragments(), master.fragments(), reader, cast=True)
            if difference is not None:
                one, other = difference.a, difference.b
                raise CorruptError(
                    "the optimizer's master of a parameter is not the weight that is stored beside it",
                    path=other.path,
                    rank=other.rank,
                    fqn=master.fqn,
                    expected=f"{one}, as in {one.path}",
                    found=f"element {list(difference.index)} is {other}; {difference.num_different} differ",
                    hint="are these the files of one save, each rank's under its own name?",
                )


def check_replicas_of(checkpoint: Checkpoint, keys: Iterable[Key] | None = None) -> None:
    """Raise CorruptError if a tensor (of `keys`, by default any) is not the same on all of the ranks that hold it."""
    with Reader(computed=checkpoint.computed) as reader:
        for key in dict.fromkeys(checkpoint.tensors if keys is None else keys):
            check_replicas(checkpoint.tensors[key], reader)
