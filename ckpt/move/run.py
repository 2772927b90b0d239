"""Carry out a plan: the only code that moves tensor bytes.

Like-for-like ranges go from file to file inside the kernel (`copy_file_range`) and never enter this process.  Casts and
strided copies go through buffers of bounded size.  Work is spread over a few threads, in the order of the target.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import queue
import threading
from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from io import FileIO
from itertools import chain, islice
from math import prod
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from ckpt.errors import CorruptError, NotFoundError, UsageError
from ckpt.move.casts import cast_bits
from ckpt.move.filehash import CHUNK, FileDigest, Hasher, Piece, max_pieces, pieces_of
from ckpt.move.files import OpenFiles, Staging, check_destination, sync, translate_os_errors
from ckpt.move.reading import in_shape, read_bits, truncated
from ckpt.plan.checkpoint import Slot, TargetFile
from ckpt.plan.planner import Copy, Plan
from ckpt.plan.tensors import Extent, Shape, is_contiguous

Progress = Callable[[int], None]
FileDigests = Mapping[str, FileDigest]  # by the file's name
Turn = contextlib.AbstractContextManager[object]  # a lock

_SPAN = 8 << 20  # bytes per kernel copy: one is written back to disk while the next is being copied
_BUFFER = 4 << 20  # bytes read at a time where data passes through this process
_MIN_BUFFER = 64 << 10
_SLAB = 2 << 20  # bytes of rows that several copies fill together
_BATCH = 8 << 20  # small copies are handed to a thread together, up to this many bytes
_COMPUTING = 5  # what computing takes, in sizes of the result: a bf16 weight, its delta and their sum in fp32
_PATIENCE = 0.3  # seconds that a run which has failed or been interrupted waits for its threads
_SYNC_FILE_RANGE_WRITE = 2  # linux/fs.h

#: Threads that only wait for fsync.  A journalling filesystem commits for all that wait at once: ext4 took 0.3 s for
#: 150 files of 4 MB from 8 threads, and 1.2 s from one.
_NUM_SYNCERS = 8
_MAX_UNFINISHED = 64  # target files that are open at a time

_HAS_KERNEL_COPY = hasattr(os, "copy_file_range")  # a Python built for an old glibc has none

#: errno values with which a kernel says that it cannot copy between these two files.
_NO_KERNEL_COPY = {errno.EXDEV, errno.ENOSYS, errno.EINVAL, errno.EOPNOTSUPP, errno.ETXTBSY, errno.EBADF, errno.EPERM}


@dataclass(frozen=True, slots=True)
class Resources:
    """Bounds on a run: `max_memory` bytes for all buffers together, `workers` threads."""

    max_memory: int = 512 << 20
    workers: int = 0

    @property
    def num_workers(self) -> int:
        return self.workers if self.workers > 0 else max(1, min(4, os.cpu_count() or 1))

    @property
    def buffer_size(self) -> int:
        """Bytes of one buffer.  A thread holds at most three: read, without gaps, and cast; one that hashes has one."""
        size = min(_BUFFER, self.max_memory // (4 * self.num_workers))
        if size < _MIN_BUFFER:
            least = _MIN_BUFFER * 4 * self.num_workers
            raise UsageError("--max-memory is too small", expected=f"at least {least} bytes", found=self.max_memory)
        return size

    def peak_buffers(self, plan: Plan) -> int:
        """Upper bound of the bytes of all buffers while `plan` runs."""
        one = _COMPUTING * plan.largest_computed
        computing = min(self.num_workers * one, max(self.max_memory, one))
        hashing = min(CHUNK, self.buffer_size) * self.num_workers
        if plan.buffered_bytes or not _HAS_KERNEL_COPY:
            return 3 * self.buffer_size * self.num_workers + computing + hashing
        return computing + hashing


def execute(
    plan: Plan,
    destination: Path,
    *,
    overwrite: bool = False,
    resources: Resources | None = None,
    progress: Progress | None = None,
    hashing: bool = False,
    check: Callable[[], None] = lambda: None,
    describe: Callable[[Path, FileDigests], Mapping[str, bytes]] = lambda *_: {},
) -> None:
    """Write the plan's files and move them to `destination` when all of them are complete and durable.

    `progress` is called with numbers of bytes written, from several threads, one at a time.  `check` is called before
    the first byte is written, when the destination has been found good, and may raise.  `describe` is given the
    folder when it is filled, while it is still being synced, and where `hashing` the digests of all files in it; it
    returns the content of more files.  Raises StorageError for the disk's errors and CorruptError for a source that
    changed meanwhile; the destination is then as it was.
    """
    resources = resources or Resources()
    workers = _Workers(resources, progress or (lambda _: None), max_pieces(len(plan.target.files)) if hashing else 0)
    for source in plan.checkpoint.files:  # which links may have led out of the checkpoint's own folder
        check_destination(destination, Path(source.path))
    with Staging(destination, overwrite=overwrite, total_bytes=plan.total_bytes) as staging:
        check()
        with workers:
            filling = (_submit(file, plan, staging, workers) for file in plan.target.files)
            _run_in_turn(filling, min(workers.num_fillers, _MAX_UNFINISHED))
            workers.join(
                lambda: [
                    _create(TargetFile.of_bytes(name, content), staging, workers, is_hashed=False)
                    for name, content in describe(staging.path, workers.digests()).items()
                ]
            )
        for source in plan.checkpoint.files:
            with translate_os_errors(source.path):
                source.check_unchanged()
        staging.commit()


def _submit(file: TargetFile, plan: Plan, staging: Staging, workers: _Workers) -> Iterator[None]:
    """Create a target file and hand out its copies, one batch at each step."""
    output = _create(file, staging, workers)
    for batch in chain(_batches(plan.copies(file)), _grouped(_span_copies(plan, file))):
        workers.submit(output, batch)
        yield
    for name, copies in plan.computed_copies(file).items():
        workers.compute(output, copies, plan.checkpoint.computed[name])
        yield
    workers.finish(output)


def _run_in_turn(iterators: Iterator[Iterator[None]], number: int) -> None:
    """Let the first `number` iterators take a step each in turn; where one ends, the next takes its place."""
    end = object()
    running = deque(islice(iterators, number))
    while running:
        one = running.popleft()
        if next(one, end) is end:
            running.extend(islice(iterators, 1))
        else:
            running.append(one)


def _create(file: TargetFile, staging: Staging, workers: _Workers, *, is_hashed: bool = True) -> _Output:
    """Create a target file with all that is known now."""
    output = workers.open(staging.create(file.name, file.size), file, is_hashed=is_hashed)
    with translate_os_errors(file.name):
        for offset, data in file.literals:
            _write_all(output.descriptor, memoryview(data), offset)
    return output


def _batches(slots: Iterable[tuple[Slot, Sequence[Copy]]]) -> Iterator[list[Copy]]:
    """Copies in lists of about `_BATCH` bytes; long ones are cut."""
    for slot, copies in slots:
        if slot.extent.is_contiguous and not all(copy.target.is_contiguous for copy in copies):
            copies = yield from _row_batches(slot.extent, copies)
        yield from _grouped(copies)


def _grouped(copies: Iterable[Copy]) -> Iterator[list[Copy]]:
    batch: list[Copy] = []
    size = 0
    for part in (part for copy in copies for part in _cut(copy)):
        batch.append(part)
        size += part.target.nbytes
        if size >= _BATCH:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def _span_copies(plan: Plan, file: TargetFile) -> Iterator[Copy]:
    """What the plan has as arrays, one by one."""
    for spans in plan.spans(file):
        for path, source, target, numel in zip(spans.path, spans.source, spans.target, spans.numel, strict=True):
            shape = (int(numel),)
            read = Extent(spans.paths[path], int(source), spans.source_dtype, shape, (1,))
            yield Copy(read, Extent(file.name, int(target), spans.target_dtype, shape, (1,)))


def _row_batches(slot: Extent, copies: Sequence[Copy]) -> Generator[list[Copy], None, list[Copy]]:
    """Copies that fill parts of the rows of a slot, as batches that together fill some rows.  Returns the others.

    A row parallel weight of several ranks is such: each has some columns.
    """
    row_numel = prod(slot.shape[1:])
    row = row_numel * slot.dtype.itemsize
    step = max(1, _SLAB // row)
    parts: list[Copy] = []
    others: list[Copy] = []
    for copy in copies:
        is_part = len(copy.target.shape) == len(slot.shape) and copy.target.strides[0] == row_numel
        (parts if is_part else others).append(copy)
    for start in range(0, slot.shape[0], step):
        batch = []
        for copy in parts:
            first = (copy.target.offset - slot.offset) // row
            low, high = max(start, first), min(start + step, first + copy.target.shape[0])
            if low < high:
                at, size = low - first, high - low
                batch.append(Copy(_slice(copy.source, 0, at, size), _slice(copy.target, 0, at, size)))
        if batch:
            yield batch
    return others


def _cut(copy: Copy) -> Iterator[Copy]:
    """A copy in parts that each take a moment: `_SPAN` bytes, gaps included."""
    if not (copy.source.is_contiguous and copy.target.is_contiguous):
        for source, target in _blocks(copy.source, copy.target, _SPAN):
            yield Copy(source, target)
        return
    numel = copy.target.numel
    step = _SPAN // max(copy.source.dtype.itemsize, copy.target.dtype.itemsize)
    if numel <= step:
        yield copy
        return
    for start in range(0, numel, step):
        stop = min(start + step, numel)
        yield Copy(copy.source.flat(start, stop), copy.target.flat(start, stop))


class _Output:
    """A target file that several threads fill, and some more sync and hash, the last of which closes it."""

    def __init__(self, file: FileIO, target: TargetFile, pieces: list[Piece] | None) -> None:
        self.descriptor = file.fileno()
        self.name = target.name
        self.size = target.size
        #: What is hashed on its own; None where nothing is.
        self.pieces = pieces
        self._starts = [offset for offset, _ in pieces or ()]
        self._left = [0] * len(self._starts)  # bytes of each piece that are still to be written
        for slot in target.slots if pieces else ():
            if slot.extent.numel:
                self._left[self._piece(slot.extent)] += slot.extent.nbytes
        #: Linux lets one thread at a time write to a file, and those who wait in the kernel for their turn spin.
        self.writing = threading.Lock()
        self._file = file
        self._uses = 1 if pieces is None else 2 + len(pieces)  # to be synced; pieces and rest to be hashed
        self._pending = 1  # one for the submitter, until it has submitted everything
        self._lock = threading.Lock()

    def add(self) -> None:
        with self._lock:
            self._pending += 1

    def done(self) -> bool:
        """Whether this was the last part of the file."""
        with self._lock:
            self._pending -= 1
            return not self._pending

    def written(self, copies: list[Copy]) -> list[Piece]:
        """The pieces of which these copies wrote the last part."""
        if not self.pieces:
            return []
        whole = []
        with self._lock:
            for target in (copy.target for copy in copies if copy.target.numel):
                number = self._piece(target)
                self._left[number] -= target.nbytes
                if not self._left[number]:
                    whole.append(self.pieces[number])
        return whole

    def _piece(self, extent: Extent) -> int:
        return bisect_right(self._starts, extent.offset) - 1

    def release(self, uses: int = 1) -> bool:
        """Whether these were the last uses, with which it is closed."""
        with self._lock:
            self._uses -= uses
            last = not self._uses
        if last:
            with translate_os_errors(self.name):
                self.close()
        return last

    def close(self) -> None:
        self._file.close()


#: Copies for a file, and what computes their content where it lies in no file.
_Item = tuple[_Output, list[Copy], Callable[[], memoryview] | None]

#: A file and those of its pieces that are to be hashed; None stands for what is in none of them.
_HashJob = tuple[_Output, list[Piece] | None]


class _Workers:
    """A few daemon threads around a bounded queue, and some that sync and hash the files that are filled.

    The first error of any of them reaches the caller.
    """

    def __init__(self, resources: Resources, progress: Progress, max_pieces: int) -> None:
        self._queue: queue.Queue[_Item | None] = queue.Queue(4 * resources.num_workers)
        self._buffer_size = resources.buffer_size
        self._room = _Room(resources.max_memory)
        self._progress = progress
        self._progress_lock = threading.Lock()
        self._present = threading.Condition()
        self._num_present = 1  # threads that may use what is open: the caller's too
        self._outputs: set[_Output] = set()
        self._filled: queue.SimpleQueue[_Output | None] = queue.SimpleQueue()
        self._to_hash: queue.SimpleQueue[_HashJob | None] = queue.SimpleQueue()
        self._pieces: dict[str, dict[Piece, str]] = {}
        self._rests: dict[str, tuple[int, str]] = {}  # a file's size, and the digest of what is in no piece
        self._room_for_outputs = threading.Semaphore(_MAX_UNFINISHED)
        self._error: BaseException | None = None
        self._stopping = False
        self.num_fillers = resources.num_workers
        self._fillers = [threading.Thread(target=self._work, daemon=True) for _ in range(self.num_fillers)]
        self._syncers = [threading.Thread(target=self._sync, daemon=True) for _ in range(_NUM_SYNCERS)]
        self._max_pieces = max_pieces  # of a file; 0 where nothing is hashed
        num_hashers = self.num_fillers if max_pieces else 0
        hashers = [Hasher(min(CHUNK, self._buffer_size)) for _ in range(num_hashers)]
        self._hashers = [threading.Thread(target=self._hash, args=(one,), daemon=True) for one in hashers]
        self._threads = (*self._fillers, *self._syncers, *self._hashers)

    def __enter__(self) -> _Workers:
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
        """Let the threads end after the piece in hand."""
        self._stopping = True
        with contextlib.suppress(queue.Empty):
            while True:
                self._queue.get_nowait()
        for _ in self._fillers:
            self._queue.put_nowait(None)
        for _ in self._syncers:
            self._filled.put(None)
        for _ in self._hashers:
            self._to_hash.put(None)
        self._leave()
        if self._wait(0, _PATIENCE):
            for thread in self._threads:
                if thread.is_alive():
                    thread.join()

    def _leave(self) -> None:
        """Called by every thread and by the caller's: the last of them closes the files that nobody will finish."""
        with self._present:
            self._num_present -= 1
            while not self._num_present and self._outputs:
                with contextlib.suppress(OSError):
                    self._outputs.pop().close()
            self._present.notify_all()

    def _wait(self, num_present: int, timeout: float) -> bool:
        """Whether no more than so many threads are left, after waiting for that.

        `Thread.join` would do, but takes a running thread for a dead one when Ctrl-C interrupts it (Python 3.11).
        """
        with self._present:
            return self._present.wait_for(lambda: self._num_present <= num_present, timeout)

    def open(self, file: FileIO, target: TargetFile, *, is_hashed: bool) -> _Output:
        """Take over a new target file, when there are not too many unfinished ones."""
        try:
            while not self._room_for_outputs.acquire(timeout=0.2):
                self._raise_error()
        except BaseException:
            file.close()
            raise
        output = _Output(file, target, pieces_of(target, self._max_pieces) if self._hashers and is_hashed else None)
        self._outputs.add(output)
        return output

    def submit(self, output: _Output, copies: list[Copy]) -> None:
        output.add()
        self._put((output, copies, None))

    def compute(self, output: _Output, copies: list[Copy], content: Callable[[], memoryview]) -> None:
        """Let a thread compute `content`, which is as long as the copies' sources reach, and write it."""
        output.add()
        self._put((output, copies, content))

    def finish(self, output: _Output) -> None:
        """Say that everything for `output` has been submitted."""
        self._put((output, [], None))

    def join(self, last: Callable[[], list[_Output]]) -> None:
        """Wait until everything submitted is done; `last` is called when all files are filled, and may add some."""
        for _ in self._fillers:
            self._put(None)
        self._wait_for_all_but(len(self._syncers) + len(self._hashers))
        for _ in self._hashers:
            self._to_hash.put(None)
        self._wait_for_all_but(len(self._syncers))
        for output in last():
            self._filled.put(output)
        for _ in self._syncers:
            self._filled.put(None)
        self._wait_for_all_but(0)
        assert not self._outputs, "a target file was not finished"

    def _wait_for_all_but(self, num_threads: int) -> None:
        while not self._wait(1 + num_threads, 0.2):
            self._raise_error()
        self._raise_error()

    def _put(self, item: _Item | None) -> None:
        while True:
            self._raise_error()
            with contextlib.suppress(queue.Full):
                self._queue.put(item, timeout=0.2)
                return

    def _raise_error(self) -> None:
        if self._error is not None:
            raise self._error

    def _work(self) -> None:
        with OpenFiles() as sources:
            while not self._stopping and (item := self._queue.get()) is not None:
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
                    self._pieces.setdefault(name, {}).update(hasher.pieces(descriptor, name, wanted))
                self._release(output, 1 if wanted is None else len(wanted))
            except BaseException as error:
                self._fail(error)
        self._leave()

    def digests(self) -> FileDigests:
        """The digests of all files that are filled and hashed."""
        return {
            name: FileDigest(size, dict(sorted(self._pieces.get(name, {}).items())), rest)
            for name, (size, rest) in self._rests.items()
        }

    def _release(self, output: _Output, uses: int = 1) -> None:
        if output.release(uses):
            self._outputs.discard(output)
            self._room_for_outputs.release()

    def _fail(self, error: BaseException) -> None:
        """Hand an error to the caller, whatever it is."""
        self._error = self._error or error
        self._stopping = True

    def _advance(self, copy: Copy) -> None:
        with self._progress_lock:
            self._progress(copy.target.nbytes)

    def _fill(
        self, output: _Output, copies: list[Copy], content: Callable[[], memoryview] | None, sources: OpenFiles
    ) -> None:
        if content is None:
            slab = _slab(copies, self._buffer_size // 2)
            for copy in copies:
                if self._stopping:
                    return
                try:
                    source = sources.descriptor(copy.source.path)
                except NotFoundError:
                    raise CorruptError("the file has gone while it was being read", path=copy.source.path) from None
                if slab is None:
                    move(copy, source, output.descriptor, self._buffer_size, output.writing)
                else:
                    _put_in_slab(copy, source, slab, self._buffer_size // 2)
                self._advance(copy)
            if slab is not None:
                with translate_os_errors(output.name), output.writing:
                    _write_all(output.descriptor, slab.content.data, slab.start)
        else:
            with self._room.taken(_COMPUTING * max(copy.source.end for copy in copies)):
                computed = content()
                for copy in copies:
                    if self._stopping:
                        return
                    put(copy, computed, output.descriptor, output.writing)
                    self._advance(copy)
        if copies:
            _start_writeback(output.descriptor, copies)
        if whole_pieces := output.written(copies):
            self._to_hash.put((output, whole_pieces))
        if output.done():
            self._filled.put(output)
            if output.pieces is not None:
                self._to_hash.put((output, None))


class _Room:
    """Memory for what is computed: as much side by side as fits, and always at least one."""

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


def put(copy: Copy, content: memoryview, target: int, writing: Turn) -> None:
    """Carry out a copy from `content` to an open file, holding `writing` while writing."""
    with translate_os_errors(copy.target.path):
        bits = in_shape(np.frombuffer(content, np.uint8)[copy.source.offset : copy.source.end], copy.source)
        if copy.source.dtype != copy.target.dtype:
            bits = cast_bits(bits.reshape(-1), copy.source.dtype, copy.target.dtype).reshape(bits.shape)
        with writing:
            _write_bits(target, copy.target, bits)


def move(copy: Copy, source: int, target: int, buffer_size: int, writing: Turn) -> None:
    """Carry out one copy between two open files, holding `writing` while writing."""
    with translate_os_errors(copy.target.path):
        if copy.target.numel == 0:
            return
        if copy.is_span:
            with writing:
                _copy_span(source, target, copy, buffer_size)
        else:
            _copy_blocks(source, target, copy, buffer_size, writing)


def _copy_span(source: int, target: int, copy: Copy, buffer_size: int) -> None:
    read_at, write_at, left = copy.source.offset, copy.target.offset, copy.target.nbytes
    while left:
        done = _copy_in_kernel(source, target, left, read_at, write_at)
        if not done:
            done = _copy_through_buffer(source, target, copy.source, min(left, buffer_size), read_at, write_at)
        read_at, write_at, left = read_at + done, write_at + done, left - done


def _copy_in_kernel(source: int, target: int, size: int, read_at: int, write_at: int) -> int:
    """Copy up to `size` bytes.  Returns how many: 0 at the end of the file, and where the kernel cannot."""
    if not _HAS_KERNEL_COPY:
        return 0
    try:
        return os.copy_file_range(source, target, size, read_at, write_at)
    except OSError as error:
        if error.errno not in _NO_KERNEL_COPY:
            raise
        return 0


def _copy_through_buffer(source: int, target: int, extent: Extent, size: int, read_at: int, write_at: int) -> int:
    with translate_os_errors(extent.path):
        data = os.pread(source, size, read_at)
    if not data:
        raise truncated(extent, read_at)
    _write_all(target, memoryview(data), write_at)
    return len(data)


@dataclass(frozen=True, slots=True)
class _Slab:
    """Bytes of a target file from `start` on, which several copies fill before they are written."""

    start: int
    content: NDArray


def _slab(copies: list[Copy], at_most: int) -> _Slab | None:
    """For copies with gaps that fill a range of the target together; None if they do not, or it is too large."""
    if all(copy.target.is_contiguous for copy in copies):
        return None
    start, stop = min(copy.target.offset for copy in copies), max(copy.target.end for copy in copies)
    if stop - start > at_most or stop - start != sum(copy.target.nbytes for copy in copies):
        return None
    return _Slab(start, np.empty(stop - start, np.uint8))


def _put_in_slab(copy: Copy, source: int, slab: _Slab, buffer_size: int) -> None:
    """Carry out a copy to `slab`."""
    for write, bits in _read_blocks(copy, source, buffer_size):
        elements = slab.content[write.offset - slab.start : write.end - slab.start].view(bits.dtype)
        strides = tuple(stride * bits.itemsize for stride in write.strides)
        np.lib.stride_tricks.as_strided(elements, write.shape, strides)[...] = bits


def _copy_blocks(source: int, target: int, copy: Copy, buffer_size: int, writing: Turn) -> None:
    for write, bits in _read_blocks(copy, source, buffer_size):
        with writing:
            _write_bits(target, write, bits)


def _read_blocks(copy: Copy, source: int, buffer_size: int) -> Iterator[tuple[Extent, NDArray]]:
    """Parts of the target, and for each an array of its shape with the bits that it is to hold."""
    widening = max(1, copy.target.dtype.itemsize // copy.source.dtype.itemsize)
    for read, write in _blocks(copy.source, copy.target, buffer_size // widening):
        bits = read_bits(source, read)
        if read.dtype != write.dtype:
            bits = cast_bits(bits.reshape(-1), read.dtype, write.dtype).reshape(bits.shape)
        yield write, bits


def _blocks(source: Extent, target: Extent, buffer_size: int) -> Iterator[tuple[Extent, Extent]]:
    """Cut a copy into blocks whose source, with gaps and repeated elements, fits the buffer.

    The dim with the longest source stride is cut first, so that a block is as compact as it can be in the source.
    """
    reach = source.end - source.offset
    if max(reach, source.nbytes) <= buffer_size or source.numel <= 1:
        yield source, target
        return
    dim = max(range(len(source.shape)), key=lambda d: (source.shape[d] > 1, source.strides[d]))
    size = source.shape[dim]
    one = _slice(source, dim, 0, 1)
    step_bytes = max(source.strides[dim] * source.dtype.itemsize, one.nbytes)
    left = buffer_size - max(one.end - one.offset, one.nbytes)
    step = max(1, min(size - 1, left // step_bytes + 1))
    for start in range(0, size, step):
        part = min(step, size - start)
        yield from _blocks(_slice(source, dim, start, part), _slice(target, dim, start, part), buffer_size)


def _slice(extent: Extent, dim: int, start: int, size: int) -> Extent:
    return replace(
        extent,
        offset=extent.offset + start * extent.strides[dim] * extent.dtype.itemsize,
        shape=(*extent.shape[:dim], size, *extent.shape[dim + 1 :]),
    )


def _write_bits(descriptor: int, extent: Extent, bits: NDArray) -> None:
    """Write a contiguous array to a possibly strided extent, one contiguous run at a time."""
    inner = len(extent.shape)
    while inner and is_contiguous(extent.shape[inner - 1 :], extent.strides[inner - 1 :]):
        inner -= 1
    run = prod(extent.shape[inner:])
    flat = np.ascontiguousarray(bits).reshape(-1).view(np.uint8).data
    size = run * extent.dtype.itemsize
    for number, offset in enumerate(_offsets(extent.shape[:inner], extent.strides[:inner])):
        where = extent.offset + offset * extent.dtype.itemsize
        _write_all(descriptor, flat[number * size : (number + 1) * size], where)


def _offsets(shape: Shape, strides: Shape) -> Iterator[int]:
    if not shape:
        yield 0
        return
    for index in range(shape[0]):
        for offset in _offsets(shape[1:], strides[1:]):
            yield index * strides[0] + offset


def _write_all(descriptor: int, data: memoryview, offset: int) -> None:
    while data:
        count = os.pwrite(descriptor, data, offset)
        data, offset = data[count:], offset + count


def _start_writeback(descriptor: int, copies: list[Copy]) -> None:
    """Ask the kernel to start writing what was just copied, so that the final fsync finds little left to do."""
    if _sync_file_range is None:
        return
    start = min(copy.target.offset for copy in copies)
    stop = max(copy.target.end for copy in copies)
    _sync_file_range(descriptor, ctypes.c_int64(start), ctypes.c_int64(stop - start), _SYNC_FILE_RANGE_WRITE)


_sync_file_range = getattr(ctypes.CDLL(None), "sync_file_range", None)
