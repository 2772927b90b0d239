"""Folder listings and small reads, cached during one open."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Callable, Iterator, Mapping
from contextvars import ContextVar
from functools import wraps
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

from ckpt.move.files import translate_os_errors

#: A disk's own folder for fsck. Only root can list it.
LOST_AND_FOUND = "lost+found"

Entries = Mapping[str, os.DirEntry[str]]

Found = TypeVar("Found")
Arguments = ParamSpec("Arguments")

_seen: ContextVar[dict[Any, Any] | None] = ContextVar("_seen", default=None)


@contextlib.contextmanager
def listed_once() -> Iterator[None]:
    """List each folder only once in this block, so that all answers agree. The block must not write to them."""
    if _seen.get() is not None:
        yield
        return
    token = _seen.set({})
    try:
        yield
    finally:
        _seen.reset(token)


def once(look: Callable[Arguments, Found]) -> Callable[Arguments, Found]:
    """Cache the result of `look` by its paths inside `listed_once`. Errors are not cached."""

    @wraps(look)
    def seen(*paths: Arguments.args, **named: Arguments.kwargs) -> Found:
        known, key = _seen.get(), (look, *map(str, paths), *named.items())
        if known is None:
            return look(*paths, **named)
        if key not in known:
            known[key] = look(*paths, **named)
        found: Found = known[key]
        return found

    return seen


@once
def entries_in(folder: Path) -> Entries:
    """Return a folder's entries by name, sorted. Raise a CkptError if it can't be listed."""
    with translate_os_errors(folder), os.scandir(folder) as entries:
        return {entry.name: entry for entry in sorted(entries, key=lambda entry: entry.name)}


def names_in(folder: Path) -> list[str]:
    return list(entries_in(folder))


def files_in(folder: Path) -> list[str]:
    """Include broken links: reading reports them."""
    return [name for name, entry in entries_in(folder).items() if not is_folder(entry)]


def folders_in(path: Path) -> list[Path]:
    """Return the folders in `path`, including links, without `lost+found`. Empty if `path` is no folder."""
    entries = entries_in(path) if path.is_dir() else {}
    return [path / name for name, entry in entries.items() if name != LOST_AND_FOUND and is_folder(entry)]


def files_below(folder: Path) -> Iterator[Path]:
    """Yield the files in `folder` and its subfolders, including broken links. Skip links to folders."""
    for name, entry in entries_in(folder).items():
        if entry.is_dir(follow_symlinks=False):
            yield from () if name == LOST_AND_FOUND else files_below(folder / name)
        elif not is_folder(entry):
            yield folder / name


def is_folder(entry: os.DirEntry[str]) -> bool:
    return Path(entry.path).is_dir() if entry.is_symlink() else entry.is_dir()


def has_name(folder: Path, pattern: re.Pattern[str]) -> bool:
    return folder.is_dir() and any(map(pattern.fullmatch, entries_in(folder)))
