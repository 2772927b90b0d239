"""Target files computed on read."""

from __future__ import annotations

import io
import threading
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Iterator
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from ckpt.base.errors import NotFoundError
from ckpt.move.blocks import BUFFER, MAX_ROWS, cast, gather, read_blocks, sliced
from ckpt.move.files import OpenFiles, translate_os_errors
from ckpt.move.reading import in_shape, strided
from ckpt.move.source import Seekable
from ckpt.plan.checkpoint import TargetFile
from ckpt.plan.planner import Copy, Plan
from ckpt.plan.spans import Spans
from ckpt.plan.tensors import Extent

if TYPE_CHECKING:
    from _typeshed import WriteableBuffer

_MARGIN = 16  # largest element: a range may begin and end inside one
_READ_AHEAD = 256 << 10  # read size for file objects
_SLOTS = 256  # with cached copies


class Views:
    """A target's files, readable from several threads.

    Computed tensors are cached up to `max_memory` bytes, and the latest one always.
    """

    def __init__(self, plan: Plan, max_memory: int) -> None:
        self._plan = plan
        self._files = {file.name: _File(plan, file) for file in plan.target.files}
        self._sources = {source.path: source for source in plan.sources}
        self._computed: OrderedDict[str, memoryview] = OrderedDict()
        self._max_memory = max_memory
        self._computing = threading.Lock()

    def open(self, name: str) -> io.BufferedReader:
        if name not in self._files:
            raise NotFoundError("the target has no such file", path=name, expected=", ".join([*self._files][:8]))
        return io.BufferedReader(_ViewFile(self, self._files[name]), _READ_AHEAD)

    def read_into(self, name: str, offset: int, buffer: memoryview) -> int:
        """Fill `buffer`. Return the number of bytes before the end of the file.

        Raise CorruptError if a source file has changed since it was described, or StorageError.
        """
        file = self._files[name]
        count = max(0, min(len(buffer), file.size - offset))
        for done in range(0, count, BUFFER):
            part = buffer[done : min(count, done + BUFFER)]
            window = _Window(offset + done, len(part))
            used = file.fill(window, self._content)
            for path in used & self._sources.keys():
                with translate_os_errors(path):
                    self._sources[path].check_unchanged()
            part[:] = window.content
        return count

    def _content(self, name: str) -> memoryview:
        with self._computing:
            content = self._computed.pop(name, None)
            if content is None:
                content = self._plan.checkpoint.computed[name]()
            self._computed[name] = content
            while len(self._computed) > 1 and sum(map(len, self._computed.values())) > self._max_memory:
                self._computed.popitem(last=False)
            return content


class _Window:
    """A range to fill, with margins for elements across its borders."""

    def __init__(self, start: int, size: int) -> None:
        self.start, self.stop = start, start + size
        self._bytes = np.zeros(size + 2 * _MARGIN, np.uint8)

    @property
    def content(self) -> memoryview:
        return self._bytes.data[_MARGIN:-_MARGIN]

    def touches(self, extent: Extent) -> bool:
        return extent.offset < self.stop and self.start < extent.end

    def put(self, offset: int, raw: NDArray) -> None:
        """Store bytes. They may exceed the range by the margin."""
        at = offset - self.start + _MARGIN
        self._bytes[at : at + len(raw)] = raw

    def put_extent(self, extent: Extent, bits: NDArray) -> None:
        at = extent.offset - self.start + _MARGIN
        elements = self._bytes[at : at + extent.end - extent.offset].view(bits.dtype)
        strided(elements, extent.shape, extent.strides)[...] = bits


class _File:
    def __init__(self, plan: Plan, file: TargetFile) -> None:
        self.name, self.size = file.name, file.size
        self._plan = plan
        self._literals = sorted(file.literals)
        self._spans = plan.spans(file)
        self._slots = plan.slots(file)
        self._starts = np.array([slot.extent.offset for slot in self._slots], np.int64)
        self._ends = np.array([slot.extent.end for slot in self._slots], np.int64)
        self._copies = lru_cache(_SLOTS)(lambda number: list(plan.slot_copies(self._slots[number])))

    def fill(self, window: _Window, content: Any) -> set[str]:
        """Return the paths of the files read."""
        used: set[str] = set()
        self._put_literals(window)
        with OpenFiles() as sources, translate_os_errors(self.name):
            for spans in self._spans:
                for cut in _rows_in(spans, window):
                    _put_rows(cut, window, sources)
                    used.update(cut.paths[path] for path in {*cut.path.tolist()})
            for number in np.flatnonzero((self._starts < window.stop) & (self._ends > window.start)):
                for copy in self._copies(int(number)):
                    for part in _copies_in(copy, window):
                        self._put_copy(part, window, sources, content)
                        used.add(part.source.path)
        return used

    def _put_literals(self, window: _Window) -> None:
        first = max(0, bisect_right(self._literals, window.start, key=lambda literal: literal[0]) - 1)
        for offset, data in self._literals[first:]:
            if offset >= window.stop:
                break
            start, stop = max(offset, window.start), min(offset + len(data), window.stop)
            if start < stop:
                window.put(start, np.frombuffer(data, np.uint8)[start - offset : stop - offset])

    def _put_copy(self, copy: Copy, window: _Window, sources: OpenFiles, content: Any) -> None:
        source, target = copy.source, copy.target
        if source.path in self._plan.checkpoint.computed:
            raw = np.frombuffer(content(source.path), np.uint8)[source.offset : source.end]
            bits = cast(in_shape(raw, source), source.dtype, target.dtype)
            window.put_extent(target, bits)
            return
        for part, bits in read_blocks(copy, sources.descriptor(source.path), BUFFER):
            window.put_extent(part, bits)


def _rows_in(spans: Spans, window: _Window) -> Iterator[Spans]:
    """Cut the rows to the window's elements, in batches of bounded length."""
    size = spans.target_dtype.itemsize
    first = max(0, int(np.searchsorted(spans.target, window.start, "right")) - 1)
    last = int(np.searchsorted(spans.target, window.stop, "left"))
    for start in range(first, last, MAX_ROWS):
        part = spans.take(slice(start, min(last, start + MAX_ROWS)))
        skipped = np.clip((window.start - part.target) // size, 0, part.numel)
        kept = np.clip(-((part.target - window.stop) // size), skipped, part.numel) - skipped
        cut = Spans(
            part.source_dtype,
            part.target_dtype,
            part.paths,
            part.path,
            part.source + skipped * part.source_dtype.itemsize,
            part.target + skipped * size,
            kept,
        )
        cut = cut.take(np.flatnonzero(kept))
        if len(cut):
            yield cut


def _put_rows(part: Spans, window: _Window, sources: OpenFiles) -> None:
    raw = gather(part, sources).view(np.uint8)
    done = 0
    for target, numel in zip(part.target.tolist(), part.numel.tolist(), strict=True):
        size = numel * part.target_dtype.itemsize
        window.put(target, raw[done : done + size])
        done += size


def _copies_in(copy: Copy, window: _Window) -> Iterator[Copy]:
    source, target = copy.source, copy.target
    if not target.numel or not window.touches(target):
        return
    if target.numel == 1 or (window.start <= target.offset and target.end <= window.stop):
        yield copy
        return
    dim = max(range(len(target.shape)), key=lambda d: (target.shape[d] > 1, target.strides[d]))
    step = target.strides[dim] * target.dtype.itemsize
    one = sliced(target, dim, 0, 1)
    reach = one.end - one.offset
    # Indices that touch the window, then indices that lie fully inside.
    first = max(0, (window.start - target.offset - reach) // step + 1)
    last = min(target.shape[dim], -((target.offset - window.stop) // step))
    whole_first = max(first, -((target.offset - window.start) // step))
    whole_last = max(whole_first, min(last, (window.stop - target.offset - reach) // step + 1))
    for start, stop in ((first, whole_first), (whole_first, whole_last), (whole_last, last)):
        singly = start != whole_first or stop != whole_last
        for index in range(start, stop, 1 if singly else max(1, stop - start)):
            size = 1 if singly else stop - start
            yield from _copies_in(Copy(sliced(source, dim, index, size), sliced(target, dim, index, size)), window)


class _ViewFile(Seekable):
    def __init__(self, views: Views, file: _File) -> None:
        super().__init__(file.size)
        self._views = views
        self.name = file.name
        self.mode = "rb"

    def seek(self, to: int, whence: int = io.SEEK_SET) -> int:
        before, position = self._at, super().seek(to, whence)
        if position < 0:
            self._at = before
            raise ValueError(f"negative position {position}")
        return position

    def readinto(self, buffer: WriteableBuffer) -> int:
        done = self._views.read_into(self.name, self._at, memoryview(buffer).cast("B"))
        self._at += done
        return done
