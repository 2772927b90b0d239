"""Uploads of a target to a store in parts, while they are computed. Loaders' entry files are last.

If anything fails, the sent objects are removed.
"""

from __future__ import annotations

import re
import shlex
import threading
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime, timezone
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Protocol

from xxhash import xxh3_128

from ckpt.base.errors import CkptError, StorageError, UsageError
from ckpt.base.text import pluralize
from ckpt.base.words import Message, joined
from ckpt.move.file_pieces import FileDigest, max_pieces, pieces_of
from ckpt.move.workers import FileDigests, Progress
from ckpt.plan.checkpoint import TargetFile
from ckpt.plan.planner import Plan
from ckpt.plan.spans import Piece
from ckpt.stores import placeholder_files
from ckpt.stores.objects import Entry, WritableStore, split, store, unique_entries
from ckpt.stores.ranges import Ranges

_FILES = 4  # sent in parallel
_PART = 8 << 20  # bytes; several parts are in flight
_COMPUTING = 8  # threads
_AHEAD = 3  # parts per file
_CLAIM = ".ckpt-uploading"  # exists while a process writes
_MAX_PARTS = 9000  # S3's limit is 10,000

#: They tell a loader that the checkpoint exists.
LAST_FILES = re.compile(
    r"config\.json|metadata\.json|.*\.index\.json|\.metadata|latest(_universal|_checkpointed_iteration\.txt)?"
)


class Views(Protocol):
    def read_into(self, name: str, offset: int, buffer: memoryview) -> int: ...


def upload(
    plan: Plan,
    views: Views,
    destination: Path,
    *,
    progress: Progress | None = None,
    hashing: bool = False,
    check: Callable[[], None] = lambda: None,
    describe: Callable[[Path, FileDigests], Mapping[str, bytes]] = lambda *_: {},
) -> None:
    """Send the plan's files to the stand-in path `destination`, with the arguments of `run.execute`.

    `describe` gets digests only if `hashing`. Raise UsageError if the destination is not empty or the store is
    read-only, StorageError, or CorruptError if the source changed in the meantime. After an error, no object remains.
    """
    url = placeholder_files.url_of(destination)
    assert url is not None
    scheme, root, folder = split(url)
    to = store(scheme, root)
    if not isinstance(to, WritableStore):
        hint = "convert to a local folder, then `ckpt push`" if scheme == "hf" else "convert to a local folder first"
        raise UsageError(f"{scheme}:// can be read, but not written", found=url, hint=hint)
    below = f"{folder}/" if folder else ""
    claim = below + _CLAIM
    _check_free(to, folder, claim, destination)
    check()
    sending = _Sending(to, below, views, progress or (lambda _: None))
    left = None
    try:
        if not sending.claim(claim):
            raise _claim_error(destination)
        _check_free(to, folder, claim, destination, is_ours=True)  # another process may have just finished
        first, last = _in_order(plan.target.files)
        digests = sending.send(first, hashing)
        _stand(destination, plan.target.files, views)
        ends = sending.digests(last) if hashing else {}
        described = describe(destination, {**digests, **ends})
        sending.send([TargetFile.of_bytes(name, content) for name, content in described.items()], False, described)
        sending.check_arrived()
        for file in last:
            sending.send([file], False)
        sending.check_arrived()
        try:
            to.remove(claim)
        except CkptError as error:
            left = error
    except BaseException as error:
        is_ours = sending.is_claimed()
        if is_ours and not (sending.remove() and _is_removed(to, claim)) and isinstance(error, CkptError):
            error.hint = joined("; ", filter(None, (error.hint, f"first remove the sent files: {_removal(url)}")))
        raise
    finally:
        sending.close()
    if left is not None:
        what = "the output is complete, but its in-progress marker could not be removed"
        raise StorageError(what, path=destination / _CLAIM, found=left.found, hint="remove it") from left


def _check_free(to: WritableStore, folder: str, claim: str, destination: Path, *, is_ours: bool = False) -> None:
    listed = unique_entries(to.below(folder), str(destination))
    there = {entry.key: entry for entry in listed if entry.key != folder or entry.size}  # a console folder
    ours = there.pop(claim, None)
    if ours is not None and not is_ours:
        raise _claim_error(destination, ours, len(there))
    if there:
        hint = Message("give another folder with {output}, or remove it")
        raise UsageError(
            "the destination exists", path=destination, found=min(there), hint=hint, code="destination-exists"
        )


def _claim_error(destination: Path, claim: Entry | None = None, num_others: int = 0) -> StorageError:
    made = "" if claim is None else f", made {datetime.fromtimestamp(claim.modified_ns // 10**9, timezone.utc)}"
    return StorageError(
        "another process is writing this destination, or was killed",
        path=destination / _CLAIM,
        found=f"this object{made}" + (f", and {pluralize(num_others, 'more object')}" if num_others else ""),
        hint=f"if no process is running, remove its files: {_removal(str(placeholder_files.url_of(destination)))}",
    )


def _is_removed(to: WritableStore, key: str) -> bool:
    try:
        to.remove(key)
    except CkptError:
        return False
    return True


def _removal(url: str) -> str:
    command = {"s3": "aws s3 rm --recursive", "gs": "gcloud storage rm --recursive"}.get(url.partition("://")[0])
    return f"`{command} {shlex.quote(url + '/')}`" if command else f"all objects below {url}/"


def _in_order(files: Sequence[TargetFile]) -> tuple[list[TargetFile], list[TargetFile]]:
    """Split off the files to upload last."""
    last = [file for file in files if not file.slots and LAST_FILES.fullmatch(Path(file.name).name)]
    names = {file.name for file in last}
    return [file for file in files if file.name not in names], last


def _stand(folder: Path, files: Sequence[TargetFile], views: Views) -> None:
    """Create stand-ins to read before the upload ends."""

    def fetch(name: str, start: int, stop: int) -> memoryview:
        buffer = memoryview(bytearray(stop - start))
        views.read_into(name, start, buffer)
        return buffer

    for file in files:
        path = folder / file.name
        path.parent.mkdir(parents=True, exist_ok=True)
        placeholder_files.create(path, 0, Ranges(file.size, partial(fetch, file.name), reads_ahead=False))


class _Sending:
    def __init__(self, to: WritableStore, below: str, views: Views, progress: Progress) -> None:
        self._to, self._below, self._views = to, below, views
        self._progress = progress
        self._lock = threading.Lock()
        self._sent: dict[str, int] = {}  # size by name
        self._stopping = self._claimed = False
        self._computing = ThreadPoolExecutor(_COMPUTING)

    def claim(self, key: str) -> bool:
        """Claim the folder in a thread: Ctrl-C must not hide the result."""

        def claim() -> bool:
            self._claimed = self._to.claim(key)
            return self._claimed

        self._computing.submit(int).result()  # Ctrl-C may interrupt a thread's start
        return self._computing.submit(claim).result()

    def is_claimed(self) -> bool:
        """Stop the threads after their current part. Return True if this process has claimed the folder."""
        self.close()
        return self._claimed

    def send(
        self, files: Sequence[TargetFile], hashing: bool, contents: Mapping[str, bytes] | None = None
    ) -> dict[str, FileDigest]:
        pieces = {file.name: pieces_of(file, max_pieces(len(files))) for file in files}
        found: dict[str, FileDigest] = {}

        def send(file: TargetFile) -> None:
            digest = _Digest(pieces[file.name], file.size) if hashing else None
            part = max(_PART, -(-file.size // _MAX_PARTS))
            whole = (contents or {}).get(file.name)
            chunks = self._chunks(file, part, digest) if whole is None else iter([memoryview(whole)])
            with self._lock:
                self._sent[file.name] = file.size
            self._to.put(self._below + file.name, chunks, file.size, part)
            if digest is not None:
                found[file.name] = digest.done()

        with ThreadPoolExecutor(_FILES) as pool:
            sent = [pool.submit(send, file) for file in files]
            try:
                for one in sent:
                    one.result()
            except BaseException:
                self._stopping = True
                pool.shutdown(cancel_futures=True)
                raise
        return found

    def digests(self, files: Sequence[TargetFile]) -> dict[str, FileDigest]:
        found = {}
        for file in files:
            digest = _Digest(pieces_of(file, max_pieces(1)), file.size)
            for _ in self._chunks(file, _PART, digest, is_counted=False):
                pass
            found[file.name] = digest.done()
        return found

    def _chunks(
        self, file: TargetFile, size: int, digest: _Digest | None, *, is_counted: bool = True
    ) -> Iterator[memoryview]:
        starts = iter(range(0, file.size, size))
        ahead = deque(self._computing.submit(self._compute, file, start, size) for start in islice(starts, _AHEAD))
        while ahead:
            chunk = ahead.popleft().result()
            if self._stopping:
                raise StorageError("another file could not be sent", path=file.name)
            ahead.extend(self._computing.submit(self._compute, file, start, size) for start in islice(starts, 1))
            if digest is not None:
                digest.update(chunk)
            yield chunk
            if is_counted:
                with self._lock:
                    self._progress(len(chunk))

    def _compute(self, file: TargetFile, start: int, size: int) -> memoryview:
        chunk = memoryview(bytearray(min(size, file.size - start)))
        self._views.read_into(file.name, start, chunk)
        return chunk

    def check_arrived(self) -> None:
        """Raise StorageError unless the store lists every sent object with its size."""
        listed = unique_entries(self._to.below(self._below.rstrip("/")), self._below)
        there = {entry.key.removeprefix(self._below): entry.size for entry in listed}
        for name, size in self._sent.items():
            if there.get(name) != size:
                found = f"{pluralize(there[name], 'byte')}" if name in there else "none"
                raise StorageError(
                    "an object did not arrive", path=name, expected=f"{pluralize(size, 'byte')}", found=found
                )

    def close(self) -> None:
        """Stop the threads after their current part."""
        self._computing.shutdown(cancel_futures=True)

    def remove(self) -> bool:
        """Return True if the store allowed it."""
        removed = [_is_removed(self._to, self._below + name) for name in reversed(self._sent)]
        return all(removed)


class _Digest:
    def __init__(self, pieces: Sequence[Piece], size: int) -> None:
        self._size = size
        self._pieces = iter(pieces)
        self._piece = next(self._pieces, None)
        self._hasher, self._rest = xxh3_128(), xxh3_128()
        self._found: dict[Piece, str] = {}
        self._at = 0

    def update(self, data: memoryview) -> None:
        while data:
            start, length = self._piece or (self._size, 0)
            if self._at < start:
                count = min(len(data), start - self._at)
                self._rest.update(data[:count])
            else:
                count = min(len(data), start + length - self._at)
                self._hasher.update(data[:count])
            self._at += count
            data = data[count:]
            if self._piece is not None and self._at == start + length:
                self._found[self._piece] = self._hasher.hexdigest()
                self._hasher, self._piece = xxh3_128(), next(self._pieces, None)

    def done(self) -> FileDigest:
        return FileDigest(self._size, self._found, self._rest.hexdigest())
