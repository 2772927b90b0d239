"""Opening a file of a checkpoint, and reading a range of it: the two things that every container asks of a source."""

from __future__ import annotations

import contextlib
import errno
import io
import os
import stat
from collections.abc import Iterator
from typing import Any, Protocol

from ckpt.base.errors import CorruptError, NotFoundError, StorageError
from ckpt.base.text import counted
from ckpt.plan.tensors import ZEROS

#: Bytes that are read over in the time that one more read takes, for which its thread waits for the others, too.
GAP = 32 << 10
#: Bytes from which on a range of an object in a store is fetched as it is, and not kept.
DIRECT = 2 << 20
#: errno values of names that no file has: longer than the filesystem takes, or a link to itself.
NO_NAME = {errno.ENAMETOOLONG, errno.ELOOP}


class Remote(Protocol):
    """An object of `size` bytes in a store, read by ranges (`ckpt.stores.ranges`)."""

    size: int

    def read_into(self, offset: int, *buffers: memoryview) -> int: ...
    def fetched(self, start: int, stop: int) -> memoryview: ...
    def parts(self, start: int, stop: int) -> Iterator[memoryview]: ...


class Stores(Protocol):
    """Knows the files that stand for objects in a store (`ckpt.stores.standins`)."""

    def is_standin(self, path: str) -> bool: ...
    def in_use(self) -> bool: ...
    def behind(self, descriptor: int) -> Remote | None: ...


class _NoStores:
    """No file stands for an object in a store."""

    def is_standin(self, path: str) -> bool:
        return False

    def in_use(self) -> bool:
        return False

    def behind(self, descriptor: int) -> Remote | None:
        return None


_stores: Stores = _NoStores()


def ask(stores: Stores) -> None:
    """Ask `stores` about each file that is opened from now on; `ckpt.stores` does when it is imported."""
    global _stores
    _stores = stores


def is_standin(path: str) -> bool:
    """Whether the file at `path` stands for an object in a store."""
    return _stores.is_standin(path)


def in_use() -> bool:
    """Whether any file stands for an object in a store."""
    return _stores.in_use()


def behind(descriptor: int) -> Remote | None:
    """The object that an open file stands for; None where it is an ordinary one."""
    return _stores.behind(descriptor)


def open_file(path: str) -> int:
    """A descriptor of a regular file.

    Raises NotFoundError, StorageError, and CorruptError for a folder, a pipe, a device, or a name that cannot be one.
    """
    try:
        # Without O_NONBLOCK a named pipe would be waited for.
        flags = os.O_PATH if is_standin(path) else os.O_RDONLY | os.O_NONBLOCK
        fd = os.open(path, flags | os.O_CLOEXEC)
    except (FileNotFoundError, NotADirectoryError):
        raise NotFoundError("there is no such file", path=path) from None
    except ValueError:
        raise NotFoundError("a file name cannot contain a NUL", path=path) from None
    except OSError as error:
        kind = CorruptError if error.errno in NO_NAME else StorageError
        raise kind(f"the file cannot be opened: {error.strerror}", path=path) from None
    if not stat.S_ISREG(os.fstat(fd).st_mode) and path != ZEROS:  # where a plan takes its padding from
        os.close(fd)
        raise CorruptError("this is no regular file", path=path)
    return fd


@contextlib.contextmanager
def opened(path: str) -> Iterator[int]:
    """A descriptor as of `open_file`, which is closed in the end."""
    descriptor = open_file(path)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def read_file(path: str | os.PathLike[str], limit: int | None = None) -> bytes:
    """All of a small file, or at most its first `limit` bytes.  Raises as `open_file` and `read_at` do."""
    name = os.fspath(path)
    with opened(name) as descriptor:
        size = os.fstat(descriptor).st_size
        return read_at(descriptor, name, 0, size if limit is None else min(size, limit))


def open_stream(path: str | os.PathLike[str]) -> io.BufferedReader:
    """A file to be read from its start on.  Raises as `open_file` does, and as `read_into` when it is read."""
    descriptor = open_file(os.fspath(path))
    if behind(descriptor) is None:
        return open(descriptor, "rb")
    return io.BufferedReader(_Remote(descriptor))


class Seekable(io.RawIOBase):
    """A file of `size` bytes that is read from the place `_at` on; how, its kinds say."""

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
    """An object in a store, as a file."""

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
    """Fill `buffers` of bytes one after the other from `offset` on; fewer than 1,024 of them, as the kernel has it.

    Returns the number of bytes that there were: less where the file ends before.  Raises OSError, and for what is in
    a store StorageError, and CorruptError where it was replaced since it was found.
    """
    if (remote := behind(fd)) is not None:
        return remote.read_into(offset, *buffers)
    done = 0
    while buffers and (count := os.preadv(fd, buffers, offset + done)):  # less than was asked for on a signal, say
        done += count
        filled = 0
        while filled < len(buffers) and count >= len(buffers[filled]):
            count -= len(buffers[filled])
            filled += 1
        buffers = buffers[filled:] if not count else (buffers[filled][count:], *buffers[filled + 1 :])
    return done


def read_up_to(fd: int, offset: int, length: int) -> bytes:
    """`length` bytes at `offset`, or as many as there are before the file ends.  Raises OSError."""
    if behind(fd) is None and len(read := os.pread(fd, length, offset)) == length:  # as nearly always
        return read
    data = memoryview(bytearray(length))
    return bytes(data[: read_into(fd, offset, data)])


def read_at(fd: int, path: str, offset: int, length: int) -> bytes:
    """Exactly `length` bytes at `offset`.  Raises CorruptError where the file ends before, StorageError."""
    try:
        data = read_up_to(fd, offset, length)
    except OSError as error:
        raise StorageError(f"the file cannot be read: {error.strerror}", path=path) from None
    if len(data) != length:
        raise CorruptError(
            "the file ends too early",
            path=path,
            expected=f"{counted(offset + length, 'byte')} or more",
            found=f"{counted(offset + len(data), 'byte')}",
        )
    return data


def truncated(path: str, offset: int) -> CorruptError:
    """The error for a file that ends at `offset`, inside a tensor."""
    return CorruptError("the file ends inside a tensor", path=path, found=f"end of file at byte {offset}")
