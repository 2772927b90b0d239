"""Readers for a plain pickle: bytes, or a file such as a DCP `.metadata`."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

from ckpt.base.errors import CorruptError
from ckpt.base.text import pluralize, show_size
from ckpt.containers.torchfile.machine import Machine, Table
from ckpt.containers.torchfile.table import allowed
from ckpt.containers.torchfile.values import MAX_PICKLE, CutShortError
from ckpt.move.source import opened, read_at


def loads(
    data: bytes,
    *,
    path: str,
    name: str = "pickle",
    persistent: Callable[[Any], Any] | None = None,
    table: Table | None = None,
) -> Any:
    """Return the object in a pickle that spans all of `data`. Messages use `path` and `name`.

    Raise the errors of `Machine.run`, and CorruptError if the pickle and the data differ in length.
    """
    table = allowed() if table is None else table
    try:
        value, end = Machine(data, table, path=path, name=name, persistent=persistent).run()
    except CutShortError:
        raise CorruptError(
            f"{name} is cut off", path=path, expected="more bytes", found=f"{pluralize(len(data), 'byte')}"
        ) from None
    if end != len(data):
        raise CorruptError(
            f"unexpected bytes after the pickle in {name}",
            path=path,
            expected=f"{pluralize(end, 'byte')}",
            found=f"{pluralize(len(data), 'byte')}",
        )
    return value


def load_pickle(path: str | os.PathLike[str]) -> Any:
    """Raise NotFoundError, StorageError, CorruptError or UnsafeError."""
    path = os.fspath(path)
    return loads(read_pickle(path), path=path, name=os.path.basename(path))


def read_pickle(path: str) -> bytes:
    """Raise NotFoundError, StorageError or CorruptError."""
    with opened(path) as descriptor:
        size = os.fstat(descriptor).st_size
        if size > MAX_PICKLE:
            raise CorruptError(
                "the pickle is too large for a checkpoint",
                path=path,
                expected=f"at most {show_size(MAX_PICKLE)}",
                found=show_size(size),
            )
        if size == 0:
            raise CorruptError("the file is empty", path=path, found="0 bytes")
        return read_at(descriptor, path, 0, size)
