"""Copies to a target file in short batches, with bounded buffers.

Small ranges adjacent in the target, and ranges to cast, are gathered.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections import defaultdict
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Any, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from ckpt.base.errors import NotFoundError, SourceGoneError
from ckpt.move.casts import cast_bits, storage_dtype, too_large
from ckpt.move.files import OpenFiles, translate_os_errors
from ckpt.move.reading import in_shape, read_bits, strided
from ckpt.move.source import GAP, read_into, remote_object, truncated
from ckpt.plan.checkpoint import Slot
from ckpt.plan.dtypes import DType
from ckpt.plan.planner import Copy
from ckpt.plan.spans import Spans
from ckpt.plan.tensors import Extent, Shape, is_contiguous

Turn = contextlib.AbstractContextManager[object]  # a lock

BUFFER = 4 << 20  # bytes per read
WINDOW = 1 << 20  # bytes copied or gathered at once: they fit the processor's cache
_SPAN = 8 << 20  # bytes per job; they reach the disk while the next job copies
_SLAB = 2 << 20  # row bytes filled by several copies together
_BATCH = 8 << 20  # bytes of small copies in one batch
_SMALL = 256 << 10  # smaller ranges are gathered with their neighbours
MAX_ROWS = 500  # one read scatters to at most 1,024 buffers, including gaps


class OpenTarget(Protocol):
    """An open target file with a lock for writing: Linux lets only one thread write to a file at a time."""

    name: str
    descriptor: int
    writing: threading.Lock


class Batch(Protocol):
    """Copies to one target file, done by one thread."""

    @property
    def is_cast(self) -> bool: ...

    def reads(self) -> Iterator[tuple[str, int, int]]:
        """Yield path, offset and number of bytes."""
        ...

    def written(self) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return each copy's target offset and number of bytes."""
        ...

    def carry_out(self, sources: OpenFiles, output: OpenTarget, buffer_size: int) -> Iterator[int]:
        """Copy, and yield the number of bytes written after each step."""
        ...


def batches(spans: Iterable[Spans], slots: Iterable[tuple[Slot, Sequence[Copy]]], buffer_size: int) -> Iterator[Batch]:
    """Yield a plan's copies to one target file in batches of about `_BATCH` bytes."""
    for one in spans:
        yield from _span_batches(one, buffer_size)
    for slot, copies in slots:
        if slot.extent.is_contiguous and not all(copy.target.is_contiguous for copy in copies):
            copies = yield from _row_batches(copies)
        yield from _grouped(copies)


# -- ranges -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, eq=False)
class SpanBatch:
    """Contiguous copies in ascending target order."""

    spans: Spans

    @property
    def is_cast(self) -> bool:
        return self.spans.source_dtype != self.spans.target_dtype

    def reads(self) -> Iterator[tuple[str, int, int]]:
        sizes = self.spans.numel * self.spans.source_dtype.itemsize
        for path, offset, size in zip(self.spans.path, self.spans.source.tolist(), sizes.tolist(), strict=True):
            yield self.spans.paths[path], offset, size

    def written(self) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        return self.spans.target, self.spans.numel * self.spans.target_dtype.itemsize

    def carry_out(self, sources: OpenFiles, output: OpenTarget, buffer_size: int) -> Iterator[int]:
        spans = self.spans if self.is_cast else _joined(self.spans)
        with translate_os_errors(output.name):
            for start, stop in _windows(spans, buffer_size):
                if stop - start == 1 and spans.source_dtype == spans.target_dtype:
                    path, size = spans.paths[spans.path[start]], int(spans.numel[start]) * spans.source_dtype.itemsize
                    source, at, to = descriptor_of(sources, path), int(spans.source[start]), int(spans.target[start])
                    done = 0
                    for part in _parts(source, path, at, size, min(WINDOW, buffer_size)):
                        with output.writing:
                            write_all(output.descriptor, part, to + done)
                        done += len(part)
                    if done != size:
                        raise truncated(path, at + done)
                    yield size
                else:
                    bits = gather(spans.take(slice(start, stop)), sources)
                    with output.writing:
                        write_all(output.descriptor, bits.view(np.uint8).data, int(spans.target[start]))
                    yield bits.nbytes


def _span_batches(spans: Spans, buffer_size: int) -> Iterator[SpanBatch]:
    is_cast = spans.source_dtype != spans.target_dtype
    spans = _cut_rows(spans, max(1, (min(WINDOW, buffer_size) if is_cast else _SPAN) // _itemsize(spans)))
    reached = np.cumsum(spans.numel * spans.target_dtype.itemsize)
    starts = np.flatnonzero(np.diff((reached - 1) // _BATCH, prepend=-2))
    for start, stop in zip(starts.tolist(), [*starts[1:].tolist(), len(spans)], strict=True):
        yield SpanBatch(spans.take(slice(start, stop)))


def _cut_rows(spans: Spans, step: int) -> Spans:
    num_parts = np.maximum(1, -(-spans.numel // step))
    if (num_parts == 1).all():
        return spans
    found = spans.take(np.repeat(np.arange(len(spans)), num_parts))
    skipped = step * (np.arange(len(found)) - np.repeat(np.cumsum(num_parts) - num_parts, num_parts))
    return replace(
        found,
        source=found.source + skipped * spans.source_dtype.itemsize,
        target=found.target + skipped * spans.target_dtype.itemsize,
        numel=np.minimum(step, found.numel - skipped),
    )


def _joined(spans: Spans) -> Spans:
    size = spans.numel * spans.source_dtype.itemsize
    follows = np.diff(spans.path) == 0
    follows &= (np.diff(spans.source) == size[:-1]) & (np.diff(spans.target) == size[:-1])
    if not follows.any():
        return spans
    starts = np.flatnonzero(np.concatenate([[True], ~follows]))
    return replace(spans.take(starts), numel=np.add.reduceat(spans.numel, starts))


def _windows(spans: Spans, buffer_size: int) -> Iterator[tuple[int, int]]:
    """Yield the rows (first, end) to write together: adjacent small ones within `WINDOW`."""
    window = min(WINDOW, buffer_size)
    most = window // 2 if spans.source_dtype != spans.target_dtype else min(window // 2, _SMALL)
    size = spans.numel * spans.target_dtype.itemsize
    is_small = spans.numel * _itemsize(spans) <= most
    follows = is_small[1:] & is_small[:-1] & (spans.target[1:] == spans.target[:-1] + size[:-1])
    starts = np.flatnonzero(np.concatenate([[True], ~follows]))
    within = spans.target - np.repeat(spans.target[starts], np.diff(starts, append=len(spans)))
    piece = within // max(1, (window - most) * spans.target_dtype.itemsize // _itemsize(spans))
    number = np.arange(len(spans)) // MAX_ROWS
    starts = np.flatnonzero(np.concatenate([[True], ~follows | (np.diff(piece) != 0) | (np.diff(number) != 0)]))
    yield from zip(starts.tolist(), [*starts[1:].tolist(), len(spans)], strict=True)


def _itemsize(spans: Spans) -> int:
    return max(spans.source_dtype.itemsize, spans.target_dtype.itemsize)


def gather(spans: Spans, sources: OpenFiles) -> NDArray:
    sizes = spans.numel * spans.source_dtype.itemsize
    ends = np.cumsum(sizes)
    raw = np.empty(int(ends[-1]), np.uint8)
    order = np.lexsort((spans.source, spans.path)) if len(spans) > 1 else slice(None)
    columns = (array[order].tolist() for array in (spans.path, spans.source, ends - sizes, sizes))
    path, first, reached = -1, 0, 0
    buffers: list[memoryview] = []

    def read() -> None:
        if buffers:
            name = spans.paths[path]
            with translate_os_errors(name):
                done = read_into(descriptor_of(sources, name), first, *buffers)
            if first + done != reached:
                raise truncated(name, first + done)

    unused = memoryview(bytearray(GAP))
    for path_, source, place, size in zip(*columns, strict=True):
        if path_ != path or not reached <= source <= reached + GAP:
            read()
            path, first, buffers = path_, source, []
        elif source > reached:
            buffers.append(unused[: source - reached])
        buffers.append(raw.data[place : place + size])
        reached = source + size
    read()
    return cast(raw.view(storage_dtype(spans.source_dtype)), spans.source_dtype, spans.target_dtype)


def cast(bits: NDArray, source: DType, target: DType, hint: str | None = None, **facts: Any) -> NDArray:
    """Raise LossError with `facts` if a finite number becomes infinite."""
    if source == target:
        return bits
    try:
        return cast_bits(bits.reshape(-1), source, target, over="raise").reshape(bits.shape)
    except FloatingPointError:
        raise too_large(target, hint, **facts) from None


def descriptor_of(sources: OpenFiles, path: str) -> int:
    try:
        return sources.descriptor(path)
    except NotFoundError:
        raise SourceGoneError("the file has gone while it was being read", path=path) from None


def _parts(source: int, path: str, offset: int, size: int, step: int) -> Iterator[memoryview]:
    """Yield a range's bytes. For a local file, all parts share one buffer of `step` bytes.

    Copying inside the kernel (`copy_file_range`) is slower: 1.5 times from disk, 1.2 times from memory (Linux 6.18,
    ext4).
    """
    if (remote := remote_object(source)) is not None:
        for start in range(offset, offset + size, _SPAN):
            yield from remote.parts(start, min(offset + size, start + _SPAN))
        return
    buffer = np.empty(min(step, size), np.uint8).data
    end = offset + size
    while offset < end:
        with translate_os_errors(path):
            count = read_into(source, offset, buffer[: end - offset])
        if not count:
            return
        yield buffer[:count]
        offset += count


# -- boxes ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class CopyBatch:
    copies: list[Copy]

    @property
    def is_cast(self) -> bool:
        return any(copy.source.dtype != copy.target.dtype for copy in self.copies)

    def reads(self) -> Iterator[tuple[str, int, int]]:
        return ((copy.source.path, copy.source.offset, copy.source.end - copy.source.offset) for copy in self.copies)

    def written(self) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        places = [(copy.target.offset, copy.target.nbytes) for copy in self.copies]
        offsets, sizes = np.array(places, np.int64).reshape(-1, 2).T
        return offsets, sizes

    def carry_out(self, sources: OpenFiles, output: OpenTarget, buffer_size: int) -> Iterator[int]:
        slab = _slab(self.copies, buffer_size // 2)
        with translate_os_errors(output.name):
            for copy in self.copies:
                source = descriptor_of(sources, copy.source.path)
                for write, bits in read_blocks(copy, source, buffer_size if slab is None else buffer_size // 2):
                    if slab is not None:
                        slab.put(write, bits)
                    else:
                        with output.writing:
                            _write_bits(output.descriptor, write, bits)
                yield copy.target.nbytes
            if slab is not None:
                with output.writing:
                    write_all(output.descriptor, slab.content.data, slab.start)


@runtime_checkable
class InParts(Protocol):
    """Computed content that also comes in consecutive parts."""

    def __call__(self) -> memoryview: ...

    def parts(self) -> Iterator[memoryview]: ...


@dataclass(frozen=True, slots=True)
class ComputedBatch(CopyBatch):
    """Copies of bytes from `content`. `room` reserves memory in the meantime."""

    content: Callable[[], memoryview]
    room: Turn

    def carry_out(self, sources: OpenFiles, output: OpenTarget, buffer_size: int) -> Iterator[int]:
        with self.room:
            if isinstance(self.content, InParts) and all(copy.is_span for copy in self.copies):
                yield from self._write(self.content.parts(), output)
                return
            computed = self.content()
            for copy in self.copies:
                bits = in_shape(np.frombuffer(computed, np.uint8)[copy.source.offset : copy.source.end], copy.source)
                bits = cast(bits, copy.source.dtype, copy.target.dtype)
                with translate_os_errors(output.name), output.writing:
                    _write_bits(output.descriptor, copy.target, bits)
                yield copy.target.nbytes

    def _write(self, parts: Iterator[memoryview], output: OpenTarget) -> Iterator[int]:
        at = 0
        for part in parts:
            for source, target in ((copy.source, copy.target) for copy in self.copies):
                start, stop = max(at, source.offset), min(at + len(part), source.end)
                if start < stop:
                    place = target.offset + start - source.offset
                    with translate_os_errors(output.name), output.writing:
                        write_all(output.descriptor, part[start - at : stop - at], place)
                    yield stop - start
            at += len(part)


def _grouped(copies: Iterable[Copy]) -> Iterator[CopyBatch]:
    batch: list[Copy] = []
    size = 0
    for part in (Copy(*part) for copy in copies for part in _blocks(copy.source, copy.target, _SPAN)):
        batch.append(part)
        size += part.target.nbytes
        if size >= _BATCH:
            yield CopyBatch(batch)
            batch, size = [], 0
    if batch:
        yield CopyBatch(batch)


def _row_batches(copies: Iterable[Copy]) -> Generator[CopyBatch, None, list[Copy]]:
    """Yield batches of copies that together fill whole rows, for example in a row-parallel weight.

    Return the other copies.
    """
    rows: dict[int, list[Copy]] = defaultdict(list)
    others: list[Copy] = []
    for copy in map(_squeezed, copies):
        (others if copy.target.is_contiguous else rows[copy.target.strides[0]]).append(copy)
    for numel, parts in rows.items():
        if len(parts) == 1:
            others += parts
            continue
        row = numel * parts[0].target.dtype.itemsize
        start = min(copy.target.offset for copy in parts)
        step = max(1, _SLAB // row)
        cut: dict[int, list[Copy]] = defaultdict(list)
        for copy in parts:
            first = (copy.target.offset - start) // row
            last = first + copy.target.shape[0]
            for number in range(first // step, -(-last // step)):
                low, high = max(first, number * step), min(last, (number + 1) * step)
                at, size = low - first, high - low
                cut[number].append(Copy(sliced(copy.source, 0, at, size), sliced(copy.target, 0, at, size)))
        for _, batch in sorted(cut.items()):
            if row > _SLAB:
                others += yield from _row_batches(batch)
            else:
                yield CopyBatch(batch)
    return others


def _squeezed(copy: Copy) -> Copy:
    dims = [dim for dim, size in enumerate(copy.target.shape) if size > 1]
    source, target = (
        extent._replace(shape=tuple(extent.shape[d] for d in dims), strides=tuple(extent.strides[d] for d in dims))
        for extent in (copy.source, copy.target)
    )
    return Copy(source, target)


@dataclass(frozen=True, slots=True)
class _Slab:
    """A buffer for a target range. Several copies fill it before it is written."""

    start: int
    content: NDArray

    def put(self, extent: Extent, bits: NDArray) -> None:
        elements = self.content[extent.offset - self.start : extent.end - self.start].view(bits.dtype)
        strided(elements, extent.shape, extent.strides)[...] = bits


def _slab(copies: list[Copy], at_most: int) -> _Slab | None:
    """Return a buffer for copies that fill a range despite gaps."""
    if all(copy.target.is_contiguous for copy in copies):
        return None
    start, stop = min(copy.target.offset for copy in copies), max(copy.target.end for copy in copies)
    if stop - start > at_most or stop - start != sum(copy.target.nbytes for copy in copies):
        return None
    return _Slab(start, np.empty(stop - start, np.uint8))


def read_blocks(copy: Copy, source: int, buffer_size: int) -> Iterator[tuple[Extent, NDArray]]:
    widening = max(1, copy.target.dtype.itemsize // copy.source.dtype.itemsize)
    for read, write in _blocks(copy.source, copy.target, buffer_size // widening):
        yield write, cast(read_bits(source, read), read.dtype, write.dtype)


def _blocks(source: Extent, target: Extent, buffer_size: int) -> Iterator[tuple[Extent, Extent]]:
    """Cut a copy into blocks with a source range, including gaps and repeated elements, that fits the buffer.

    The dim with the longest source stride is cut first.
    """
    reach = source.end - source.offset
    if max(reach, source.nbytes) <= buffer_size or source.numel <= 1:
        yield source, target
        return
    dim = max(range(len(source.shape)), key=lambda d: (source.shape[d] > 1, source.strides[d]))
    size = source.shape[dim]
    one = sliced(source, dim, 0, 1)
    step_bytes = max(source.strides[dim] * source.dtype.itemsize, one.nbytes)
    left = buffer_size - max(one.end - one.offset, one.nbytes)
    step = max(1, min(size - 1, left // step_bytes + 1))
    for start in range(0, size, step):
        part = min(step, size - start)
        yield from _blocks(sliced(source, dim, start, part), sliced(target, dim, start, part), buffer_size)


def sliced(extent: Extent, dim: int, start: int, size: int) -> Extent:
    return extent._replace(
        offset=extent.offset + start * extent.strides[dim] * extent.dtype.itemsize,
        shape=(*extent.shape[:dim], size, *extent.shape[dim + 1 :]),
    )


def _write_bits(descriptor: int, extent: Extent, bits: NDArray) -> None:
    inner = len(extent.shape)
    while inner and is_contiguous(extent.shape[inner - 1 :], extent.strides[inner - 1 :]):
        inner -= 1
    run = prod(extent.shape[inner:])
    flat = np.ascontiguousarray(bits).reshape(-1).view(np.uint8).data
    size = run * extent.dtype.itemsize
    for number, offset in enumerate(_offsets(extent.shape[:inner], extent.strides[:inner])):
        where = extent.offset + offset * extent.dtype.itemsize
        write_all(descriptor, flat[number * size : (number + 1) * size], where)


def _offsets(shape: Shape, strides: Shape) -> Iterator[int]:
    if not shape:
        yield 0
        return
    for index in range(shape[0]):
        for offset in _offsets(shape[1:], strides[1:]):
            yield index * strides[0] + offset


def write_all(descriptor: int, data: memoryview, offset: int) -> None:
    while data:
        count = os.pwrite(descriptor, data, offset)
        data, offset = data[count:], offset + count
