"""Local stand-in files for the objects at a URL."""

from __future__ import annotations

import contextlib
import os
import zlib
from collections.abc import Iterable, Iterator, Mapping
from functools import partial
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING

from ckpt.base.errors import NotFoundError, StorageError, UnsafeError, UsageError
from ckpt.base.text import pluralize, scheme_of
from ckpt.move.files import translate_os_errors
from ckpt.stores import placeholder_files

if TYPE_CHECKING:
    from ckpt.stores.objects import Entry, Store

_MOST = 1_000_000  # objects below one URL
_ABOVE = 2  # also list the step's run and its parent

_there: dict[Path, Entry] = {}  # by stand-in path


def local(where: str | os.PathLike[str]) -> Path:
    """Return a local path unchanged. For a URL or a stand-in, update the stand-ins and return their path.

    Raise UsageError for an unsupported URL, NotFoundError for a missing package, or StorageError.
    """
    try:
        text = os.fspath(where)
    except TypeError:
        raise UsageError("this is not a path", expected="str or PathLike", found=repr(where)) from None
    if scheme_of(text) is None and not placeholder_files.is_standin(text):
        return Path(where)
    path = placeholder_files.place(text) if scheme_of(text) is not None else Path(where)
    url = placeholder_files.url_of(path)
    assert url is not None
    from ckpt.stores.objects import split, store, unique_entries  # local paths come here too

    scheme, root, key = split(url)
    objects, home = store(scheme, root), placeholder_files.place(f"{scheme}://{root}")
    found = {home / entry.key: entry for entry in islice(_files(unique_entries(objects.below(key), url)), _MOST + 1)}
    if len(found) > _MOST:
        raise UsageError("too many objects under this URL", found=f"more than {pluralize(_MOST, 'object')}", path=url)
    looked_at = {path}
    for _ in range(_ABOVE if key else 0):
        key = key.rpartition("/")[0]
        looked_at.add(home / key)
        with contextlib.suppress(StorageError, NotFoundError):  # parent folders may be forbidden
            found |= {home / entry.key: entry for entry in _files(objects.directly_in(key))}
        if not key:
            break
    with translate_os_errors(path):
        _stand(found, objects)
        for gone in [
            one for one in _there if one not in found and (one.is_relative_to(path) or one.parent in looked_at)
        ]:
            del _there[gone]
            gone.unlink(missing_ok=True)
    return path


def _files(entries: Iterable[Entry]) -> Iterator[Entry]:
    """Raise UnsafeError for a name that leaves the folder."""
    for entry in entries:
        if not {"", ".", ".."}.isdisjoint(entry.key.split("/")) or "\0" in entry.key:
            if entry.key.endswith("/") and not entry.size:  # from a web console
                continue
            raise UnsafeError("this object's name is not a valid file name", found=repr(entry.key))
        yield entry


def _stand(found: Mapping[Path, Entry], objects: Store) -> None:
    from ckpt.stores.ranges import Ranges

    newest: dict[Path, int] = {}
    for path, entry in found.items():
        newest[path.parent] = max(newest.get(path.parent, 0), entry.modified_ns)
    folders = {folder for path in newest for folder in (path, *path.parents)}
    for folder in newest:
        folder.mkdir(parents=True, exist_ok=True)
    for path, entry in found.items():
        if path in folders:
            if not entry.size:  # from a web console
                continue
            hint = "no file can be a folder, too; give one of them another name"
            raise StorageError("an object and a folder have the same name", path=path, hint=hint)
        if _there.get(path) != entry:
            # A new version looks like a new file.
            second, version = entry.modified_ns // 10**9, zlib.crc32(repr(entry).encode()) % 10**9
            placeholder_files.create(path, second * 10**9 + version, Ranges(entry.size, partial(objects.read, entry)))
            _there[path] = entry
    for folder, modified_ns in newest.items():
        os.utime(folder, ns=(modified_ns, modified_ns))
