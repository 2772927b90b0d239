"""Opening of source files, and reads of ranges."""

from __future__ import annotations

import contextlib
import errno
import io
import os
import stat
from collections.abc import Iterator
from typing import Any, Protocol

from ckpt.base.errors import CorruptError, NotFoundError, StorageError
from ckpt.base.text import pluralize
from ckpt.plan.tensors import ZEROS

#: Maximum gap to read over: a second read would take longer.
GAP = 32 << 10
#: Minimum size for fetching a store's range without caching.
DIRECT = 2 << 20
#: Flag to open stand-ins. Without Linux's O_PATH, O_APPEND marks them: no other reader sets it.
STANDIN = getattr(os, "O_PATH", os.O_APPEND)
#: Impossible file names: too long, or a link to itself.
NO_NAME = {errno.ENAMETOOLONG, errno.ELOOP}


class Remote(Protocol):
    """An object of `size` bytes in a store, read by ranges (`ckpt.stores.ranges`)."""

    size: int

    def read_into(self, offset: int, *buffers: memoryview) -> int: ...
    def fetched(self, start: int, stop: int) -> memoryview: ...
    def parts(self, start: int, stop: int) -> Iterator[memoryview]: ...


class Stores(Protocol):
    """Lookup of stand-in files (`ckpt.stores.placeholder_files`)."""

    def is_standin(self, path: str) -> bool: ...
    def in_use(self) -> bool: ...
    def remote_object(self, descriptor: int) -> Remote | None: ...


class _NoStores:
    def is_standin(self, path: str) -> bool:
        return False

    def in_use(self) -> bool:
        return False

    def remote_object(self, descriptor: int) -> Remote | None:
        return None


_stores: Stores = _NoStores()


def ask(stores: Stores) -> None:
    """Look up stand-ins in `stores` from now on."""
    global _stores
    _stores = stores


def is_standin(path: str) -> bool:
    return _stores.is_standin(path)


def in_use() -> bool:
    return _stores.in_use()


def remote_object(descriptor: int) -> Remote | None:
    return _stores.remote_object(descriptor)


def open_file(path: str) -> int:
    """Raise NotFoundError, StorageError, or CorruptError for a folder, pipe, device, or impossible name."""
    try:
        # Without O_NONBLOCK, opening a named pipe would wait.
        flags = STANDIN if is_standin(path) else os.O_RDONLY | os.O_NONBLOCK
        fd = os.open(path, flags | os.O_CLOEXEC)
    except (FileNotFoundError, NotADirectoryError):
        raise NotFoundError("no such file", path=path) from None
    except ValueError:
        raise NotFoundError("a file name cannot contain a NUL", path=path) from None
    except OSError as error:
        kind = CorruptError if error.errno in NO_NAME else StorageError
        raise kind(f"the file cannot be opened: {error.strerror}", path=path) from None
    if not stat.S_ISREG(os.fstat(fd).st_mode) and path != ZEROS:  # a plan's padding source
        os.close(fd)
        raise CorruptError("this is not a regular file", path=path)
    return fd


@contextlib.contextmanager
def opened(path: str) -> Iterator[int]:
    descriptor = open_file(path)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def read_file(path: str | os.PathLike[str], limit: int | None = None) -> bytes:
    """Return a small file's content, or its first `limit` bytes. Raise errors like `open_file` and `read_at`."""
    name = os.fspath(path)
    with opened(name) as descriptor:
        size = os.fstat(descriptor).st_size
        return read_at(descriptor, name, 0, size if limit is None else min(size, limit))


def open_stream(path: str | os.PathLike[str]) -> io.BufferedReader:
    """Raise errors like `open_file`, and like `read_into` on reads."""
    descriptor = open_file(os.fspath(path))
    if remote_object(descriptor) is None:
        return open(descriptor, "rb")
    return io.BufferedReader(_Remote(descriptor))


class Seekable(io.RawIOBase):
    """Subclasses read at `_at`."""

    def __init__(self, size: int) -> None:
        self._size, self._at = size, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, to: int, whence: int = os.SEEK_SET) -> int:
        self._at = to + {os.SEEK_SET: 0, os.SEEK_CUR: self._at, os.SEEK_END: self._size}[whence]
        return self._at

    def tell(self) -> int:
        return self._at


class _Remote(Seekable):
    def __init__(self, descriptor: int) -> None:
        super().__init__(os.fstat(descriptor).st_size)
        self._descriptor = descriptor

    def readinto(self, buffer: Any) -> int:
        count = read_into(self._descriptor, self._at, memoryview(buffer).cast("B"))
        self._at += count
        return count

    def close(self) -> None:
        if not self.closed:
            os.close(self._descriptor)
        super().close()


def read_into(fd: int, offset: int, *buffers: memoryview) -> int:
    """Fill `buffers` in order, starting at `offset`. The kernel allows fewer than 1,024 buffers.

    Return the number of bytes read, fewer at the end of the file. Raise OSError, or for stores StorageError, and
    CorruptError if the object was replaced.
    """
    if (remote := remote_object(fd)) is not None:
        return remote.read_into(offset, *buffers)
    done = 0
    while buffers and (count := os.preadv(fd, buffers, offset + done)):  # a signal may shorten a read
        done += count
        filled = 0
        while filled < len(buffers) and count >= len(buffers[filled]):
            count -= len(buffers[filled])
            filled += 1
        buffers = buffers[filled:] if not count else (buffers[filled][count:], *buffers[filled + 1 :])
    return done


def read_up_to(fd: int, offset: int, length: int) -> bytes:
    """Return `length` bytes, or fewer at the end of the file. Raise OSError."""
    if remote_object(fd) is None and len(read := os.pread(fd, length, offset)) == length:  # the usual case
        return read
    data = memoryview(bytearray(length))
    return bytes(data[: read_into(fd, offset, data)])


def read_at(fd: int, path: str, offset: int, length: int) -> bytes:
    """Return exactly `length` bytes. Raise CorruptError if the file is too short, or StorageError."""
    try:
        data = read_up_to(fd, offset, length)
    except OSError as error:
        raise StorageError(f"the file cannot be read: {error.strerror}", path=path) from None
    if len(data) != length:
        raise CorruptError(
            "the file ends too early",
            path=path,
            expected=f"{pluralize(offset + length, 'byte')} or more",
            found=f"{pluralize(offset + len(data), 'byte')}",
        )
    return data


def truncated(path: str, offset: int) -> CorruptError:
    return CorruptError("the file ends inside a tensor", path=path, found=f"end of file at byte {offset}")
