"""The names in a folder: within one opening each folder is listed only once, and each small file read only once."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Callable, Iterator, Mapping
from contextvars import ContextVar
from functools import wraps
from pathlib import Path
from typing import Any, TypeVar

from ckpt.move.files import translate_os_errors

Entries = Mapping[str, os.DirEntry[str]]

Found = TypeVar("Found")

_seen: ContextVar[dict[Any, Any] | None] = ContextVar("_seen", default=None)


@contextlib.contextmanager
def listed_once() -> Iterator[None]:
    """List each folder only once within this block, so that all answers agree with each other.

    A nested block shares the outer one's listings.  The block must not write to the folders that are listed.
    """
    if _seen.get() is not None:
        yield
        return
    token = _seen.set({})
    try:
        yield
    finally:
        _seen.reset(token)


def once(look: Callable[[Path], Found]) -> Callable[[Path], Found]:
    """Within `listed_once`, call `look` only once for each path; an error is not kept."""

    @wraps(look)
    def seen(path: Path) -> Found:
        known, key = _seen.get(), (look, os.fspath(path))
        if known is None:
            return look(path)
        if key not in known:
            known[key] = look(path)
        found: Found = known[key]
        return found

    return seen


@once
def entries_in(folder: Path) -> Entries:
    """All that is in a folder by name, sorted.  Raises the CkptError for a folder that cannot be listed."""
    with translate_os_errors(folder), os.scandir(folder) as entries:
        return {entry.name: entry for entry in sorted(entries, key=lambda entry: entry.name)}


def names_in(folder: Path) -> list[str]:
    """The names of all that is in a folder, sorted."""
    return list(entries_in(folder))


def folders_in(path: Path) -> list[Path]:
    """The folders in `path` and links to folders, sorted by name; none where it is no folder itself."""
    return [path / name for name, entry in entries_in(path).items() if is_folder(entry)] if path.is_dir() else []


def is_folder(entry: os.DirEntry[str]) -> bool:
    """Whether it is a folder or a link to one; False for a link that leads nowhere or to itself."""
    return Path(entry.path).is_dir() if entry.is_symlink() else entry.is_dir()


def has_name(folder: Path, pattern: re.Pattern[str]) -> bool:
    """Whether it is a folder with a name in it that `pattern` fits."""
    return folder.is_dir() and any(map(pattern.fullmatch, entries_in(folder)))
