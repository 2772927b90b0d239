"""Opening a file of a checkpoint, and reading a range of it: the two things that every container asks of a source."""

from __future__ import annotations

import os
import stat

from ckpt.errors import CorruptError, NotFoundError, StorageError


def open_file(path: str) -> int:
    """A descriptor of a regular file.  Raises NotFoundError or StorageError."""
    try:
        # Without O_NONBLOCK a named pipe would be waited for.
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except (FileNotFoundError, NotADirectoryError):
        raise NotFoundError("there is no such file", path=path) from None
    except ValueError:
        raise NotFoundError("there can be no such file: its name holds a NUL", path=path) from None
    except OSError as error:
        raise StorageError(f"the file cannot be opened: {error.strerror}", path=path) from None
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise StorageError("this is no regular file", path=path)
    return fd


def read_at(fd: int, path: str, offset: int, length: int) -> bytes:
    """Exactly `length` bytes at `offset`.  Raises CorruptError where the file ends before, StorageError."""
    try:
        data = os.pread(fd, length, offset)
        if len(data) == length:
            return data
        parts = [data]
        while data and length > sum(map(len, parts)):  # a read returns at most 2 GiB, and less on a signal
            done = sum(map(len, parts))
            data = os.pread(fd, length - done, offset + done)
            parts.append(data)
    except OSError as error:
        raise StorageError(f"the file cannot be read: {error.strerror}", path=path) from None
    data = b"".join(parts)
    if len(data) != length:
        raise CorruptError(
            "the file ends too early",
            path=path,
            expected=f"{offset + length} bytes or more",
            found=f"{offset + len(data)} bytes",
        )
    return data
