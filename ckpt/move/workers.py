"""Threads that fill, sync and hash target files."""

from __future__ import annotations

import contextlib
import ctypes
import os
import queue
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from io import FileIO
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ckpt.base.errors import UsageError
from ckpt.base.text import show_size
from ckpt.base.words import Message
from ckpt.move import blocks
from ckpt.move.blocks import Batch, ComputedBatch
from ckpt.move.file_pieces import CHUNK, FileDigest, Hasher, Share
from ckpt.move.files import OpenFiles, sync, translate_os_errors
from ckpt.move.source import in_use, is_standin
from ckpt.move.threads import Jobs, Permits, num_cores
from ckpt.plan.planner import Copy, Plan
from ckpt.plan.spans import Piece

Progress = Callable[[int], None]
FileDigests = Mapping[str, FileDigest]  # by file name

_MIN_BUFFER = 64 << 10
_COMPUTING = 5  # memory per result size: a bf16 weight, its delta and their sum in fp32
_PATIENCE = 0.3  # seconds to wait for threads after an error
_SYNC_FILE_RANGE_WRITE = 2  # linux/fs.h

#: Copying threads per node. Disks are faster with more requests: 9.1 GB uncached took 24.7 s with two threads and 19.2
#: s with eight, on two cores.
_NUM_WORKERS = 8

#: Minimum range size for read-ahead advice.
_ASKED = 64 << 10

#: Threads that only wait for fsync. For 150 files of 4 MB, ext4 took 0.3 s with 8 threads and 1.2 s with one.
_NUM_SYNCERS = 8

#: Least bytes to compute, and memory, for each of several processes.
_FORKED = 64 << 20
MAX_UNFINISHED = 64  # open target files


@dataclass(frozen=True, slots=True)
class Resources:
    """`workers` 0 means the default number of copying threads."""

    max_memory: int = 512 << 20
    workers: int = 0

    @property
    def num_workers(self) -> int:
        if self.workers > 0:
            return self.workers
        return max(1, min(_NUM_WORKERS, self.max_memory // (4 * _MIN_BUFFER)))  # limited by memory

    def num_processes(self, plan: Plan) -> int:
        """Return how many processes of this machine should share a plan's computing."""
        if self.workers > 0 or in_use():
            return 1
        memory = max(_FORKED, _COMPUTING * plan.largest_computed)
        return max(1, min(num_cores(), _NUM_WORKERS, plan.computed_bytes // _FORKED, self.max_memory // memory))

    def part(self, number: int) -> Resources:
        return replace(self, max_memory=self.max_memory // number)

    @property
    def num_hashers(self) -> int:
        return min(self.num_workers, num_cores())

    @property
    def buffer_size(self) -> int:
        """Size of one buffer in bytes.

        A copying thread holds up to three (raw, without gaps, cast), a hashing thread one.
        """
        size = min(blocks.BUFFER, self.max_memory // (4 * self.num_workers))
        if size < _MIN_BUFFER:
            least = _MIN_BUFFER * 4 * self.num_workers
            found = show_size(self.max_memory)
            raise UsageError(Message("{max_memory} is too small"), expected=f"at least {least >> 10}KiB", found=found)
        return size

    def peak_buffers(self, plan: Plan) -> int:
        """Return an upper bound in bytes."""
        one = _COMPUTING * plan.largest_computed
        computing = min(self.num_workers * one, max(self.max_memory, one))
        hashing = min(CHUNK, self.buffer_size) * self.num_hashers
        a_worker = 3 * self.buffer_size if plan.buffered_bytes else min(blocks.WINDOW, self.buffer_size)
        return a_worker * self.num_workers + computing + hashing


class Output:
    """A target file filled by several threads. The last user closes it."""

    def __init__(self, file: FileIO, part: Share) -> None:
        self.descriptor = file.fileno()
        self.name = part.file.name
        self.size = part.file.size
        #: None without hashing.
        self.pieces = pieces = part.pieces
        self.is_owner = part.is_owner
        self._starts = np.array([offset for offset, _ in pieces or ()], np.int64)
        self._left = np.zeros(len(self._starts), np.int64)  # remaining bytes per piece
        if pieces:
            extents = [extent for extent in part.file.filled if extent.numel]
            places = self._places(np.array([extent.offset for extent in extents], np.int64))
            np.add.at(self._left, places, [extent.nbytes for extent in extents])
        self.writing = threading.Lock()
        self._file = file
        self._uses = 1  # the sync
        if pieces is not None:
            self._uses += len(part.todo) + part.is_owner  # the pieces and the rest
        self._pending = 1  # the submitter
        self._lock = threading.Lock()

    def add(self) -> None:
        with self._lock:
            self._pending += 1

    def done(self) -> bool:
        """Return True if this was the last part."""
        with self._lock:
            self._pending -= 1
            return not self._pending

    def written(self, offsets: NDArray[np.int64], sizes: NDArray[np.int64]) -> list[Piece]:
        """Return the pieces completed by writing `sizes` bytes at `offsets`."""
        if not self.pieces:
            return []
        places = self._places(offsets[sizes > 0])
        with self._lock:
            np.subtract.at(self._left, places, sizes[sizes > 0])
            return [self.pieces[place] for place in sorted({*places.tolist()}) if not self._left[place]]

    def _places(self, offsets: NDArray[np.int64]) -> NDArray[np.intp]:
        return np.searchsorted(self._starts, offsets, side="right") - 1

    def release(self, uses: int = 1) -> bool:
        """Release some uses. Return True if it closes the file."""
        with self._lock:
            self._uses -= uses
            last = not self._uses
        if last:
            with translate_os_errors(self.name):
                self.close()
        return last

    def close(self) -> None:
        self._file.close()


#: None marks the file's end.
_Item = tuple[Output, Batch | None]

#: None marks bytes outside every piece.
_HashJob = tuple[Output, list[Piece] | None]


class Workers:
    """Threads that copy, sync and hash.

    `num_here` processes share the processor and the disk. The caller gets the first error from any thread.
    """

    def __init__(
        self,
        resources: Resources,
        progress: Progress,
        *,
        hashed: Callable[[str, Mapping[Piece, str]], None] = lambda *_: None,
        num_here: int = 1,
    ) -> None:
        self.num_fillers = max(1, resources.num_workers // (1 if resources.workers > 0 else num_here))
        num_cores_here = max(1, num_cores() // num_here)
        # Each cast step takes the interpreter's lock, so more threads than cores would not help.
        self._jobs: Jobs[_Item] = Jobs(self.num_fillers, num_cores_here)
        self._asked = OpenFiles()  # files with read-ahead advice
        self.buffer_size = resources.buffer_size
        self._room = _Room(resources.max_memory)
        self._progress = progress
        self._progress_lock = threading.Lock()
        self._present = threading.Condition()
        self._num_present = 1  # including the caller's thread
        self._outputs: set[Output] = set()
        self._filled: queue.SimpleQueue[Output | None] = queue.SimpleQueue()
        self._to_hash: queue.SimpleQueue[_HashJob | None] = queue.SimpleQueue()
        self._pieces: dict[str, dict[Piece, str]] = {}
        self._rests: dict[str, tuple[int, str]] = {}  # size, and digest of bytes outside pieces
        self._room_for_outputs = Permits(MAX_UNFINISHED)
        self._error: BaseException | None = None
        self._stopping = False
        self._fillers = [threading.Thread(target=self._work, daemon=True) for _ in range(self.num_fillers)]
        self._syncers = [threading.Thread(target=self._sync, daemon=True) for _ in range(_NUM_SYNCERS)]
        self._tell_hashed = hashed
        num_hashers = min(resources.num_hashers, num_cores_here)
        hashers = [Hasher(min(CHUNK, self.buffer_size)) for _ in range(num_hashers)]
        self._hashers = [threading.Thread(target=self._hash, args=(one,), daemon=True) for one in hashers]
        self._threads = (*self._fillers, *self._syncers, *self._hashers)

    def __enter__(self) -> Workers:
        try:
            for thread in self._threads:
                thread.start()
                with self._present:
                    self._num_present += 1
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *exc: object) -> None:
        self._stopping = True
        self._jobs.close(drop=True)
        self._asked.close()
        _end(self._syncers, self._filled)
        _end(self._hashers, self._to_hash)
        self._leave()
        if self._wait(0, _PATIENCE):
            for thread in self._threads:
                if thread.is_alive():
                    thread.join()

    def _leave(self) -> None:
        """Leave. The last thread closes all unfinished files."""
        with self._present:
            self._num_present -= 1
            while not self._num_present and self._outputs:
                with contextlib.suppress(OSError):
                    self._outputs.pop().close()
            self._present.notify_all()

    def _wait(self, num_present: int, timeout: float) -> bool:
        """Wait until at most `num_present` threads remain. Return False on timeout.

        `Thread.join` may take a running thread for a dead one if Ctrl-C interrupts it (Python 3.11).
        """
        with self._present:
            return self._present.wait_for(lambda: self._num_present <= num_present, timeout)

    def open(self, file: FileIO, part: Share) -> Output:
        """Wait if too many files are unfinished."""
        try:
            while not self._room_for_outputs.take(0.2):
                self._raise_error()
        except BaseException:
            file.close()
            raise
        output = Output(file, part)
        self._outputs.add(output)
        return output

    def submit(self, output: Output, batch: Batch) -> None:
        output.add()
        is_heavy = batch.is_cast and self._ask_for(batch)
        self._put((output, batch), is_heavy=is_heavy)

    def compute(self, output: Output, copies: list[Copy], content: Callable[[], memoryview]) -> None:
        """Compute `content` in a thread and write it. The copies' sources give its length."""
        room = self._room.taken(_COMPUTING * max(copy.source.end for copy in copies))
        output.add()
        # stores need many parallel requests
        self._put((output, ComputedBatch(copies, content, room)), is_heavy=not in_use())

    def _ask_for(self, batch: Batch) -> bool:
        """Return False for stores."""
        for path, offset, size in batch.reads():
            if is_standin(path):
                return False
            if size >= _ASKED and hasattr(os, "posix_fadvise"):  # macOS lacks it
                with contextlib.suppress(OSError):  # only advice
                    os.posix_fadvise(blocks.descriptor_of(self._asked, path), offset, size, os.POSIX_FADV_WILLNEED)
        return True

    def finish(self, output: Output) -> None:
        self._put((output, None))

    def join(self, last: Callable[[], list[Output]]) -> None:
        """Wait until all work is done. `last` runs after all files are filled, and may return more files."""
        self._jobs.close()
        self._wait_for_all_but(len(self._syncers) + len(self._hashers))
        _end(self._hashers, self._to_hash)
        self._wait_for_all_but(len(self._syncers))
        for output in last():
            self._filled.put(output)
        _end(self._syncers, self._filled)
        self._wait_for_all_but(0)
        assert not self._outputs, "a target file was not finished"

    def _wait_for_all_but(self, num_threads: int) -> None:
        while not self._wait(1 + num_threads, 0.2):
            self._raise_error()
        self._raise_error()

    def _put(self, item: _Item, *, is_heavy: bool = False) -> None:
        self._raise_error()
        while not self._jobs.put(item, is_heavy=is_heavy, timeout=0.2):
            self._raise_error()

    def _raise_error(self) -> None:
        if self._error is not None:
            raise self._error

    def _work(self) -> None:
        with OpenFiles() as sources:
            for item in self._jobs:
                if self._stopping:
                    break
                try:
                    self._fill(*item, sources)
                except BaseException as error:
                    self._fail(error)
        self._leave()

    def _sync(self) -> None:
        while not self._stopping and (output := self._filled.get()) is not None:
            try:
                with translate_os_errors(output.name):
                    sync(output.descriptor)
                self._release(output)
            except BaseException as error:
                self._fail(error)
        self._leave()

    def _hash(self, hasher: Hasher) -> None:
        while not self._stopping and (job := self._to_hash.get()) is not None:
            output, wanted = job
            descriptor, name = output.descriptor, output.name
            try:
                if wanted is None:
                    self._rests[name] = output.size, hasher.rest(descriptor, name, output.size, output.pieces or ())
                else:
                    digests = hasher.pieces(descriptor, name, wanted)
                    self._tell_hashed(name, digests)
                    self._pieces.setdefault(name, {}).update(digests)
                self._release(output, 1 if wanted is None else len(wanted))
            except BaseException as error:
                self._fail(error)
        self._leave()

    def digests(self) -> tuple[dict[str, dict[Piece, str]], dict[str, tuple[int, str]]]:
        """Return each file's digests of filled pieces, and its size with the digest of its other bytes."""
        return self._pieces, self._rests

    def _release(self, output: Output, uses: int = 1) -> None:
        if output.release(uses):
            self._outputs.discard(output)
            self._room_for_outputs.give()

    def _fail(self, error: BaseException) -> None:
        self._error = self._error or error
        self._stopping = True

    def _fill(self, output: Output, batch: Batch | None, sources: OpenFiles) -> None:
        if batch is not None:
            for size in batch.carry_out(sources, output, self.buffer_size):
                with self._progress_lock:
                    self._progress(size)
                if self._stopping:
                    return
            offsets, sizes = batch.written()
            _start_writeback(output.descriptor, int(offsets.min()), int((offsets + sizes).max()))
            if whole_pieces := output.written(offsets, sizes):
                self._to_hash.put((output, whole_pieces))
        if output.done():
            self._filled.put(output)
            if output.pieces is not None and output.is_owner:
                self._to_hash.put((output, None))


def _end(threads: Sequence[threading.Thread], jobs: queue.SimpleQueue[Any]) -> None:
    """End `threads` after the jobs in their queue."""
    for _ in threads:
        jobs.put(None)


def _start_writeback(descriptor: int, start: int, stop: int) -> None:
    """Start writing early, so that the final fsync has little left to do."""
    if _sync_file_range is not None:
        _sync_file_range(descriptor, ctypes.c_int64(start), ctypes.c_int64(stop - start), _SYNC_FILE_RANGE_WRITE)


_sync_file_range = getattr(ctypes.CDLL(None), "sync_file_range", None)


class _Room:
    """Memory for computed tensors: as many at once as fit, but at least one."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._used = 0
        self._changed = threading.Condition()

    @contextlib.contextmanager
    def taken(self, size: int) -> Iterator[None]:
        with self._changed:
            self._changed.wait_for(lambda: not self._used or self._used + size <= self._size)
            self._used += size
        try:
            yield
        finally:
            with self._changed:
                self._used -= size
                self._changed.notify_all()
