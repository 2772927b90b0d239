"""Stand-in files for objects in a store.

They are in a temporary folder that ends with the process. `ckpt.move.source` opens a stand-in with the flag `STANDIN`.
Any other open would read a hole of zeros, so an audit hook forbids it in Python.
"""

from __future__ import annotations

import atexit
import contextlib
import fcntl
import os
import shutil
import stat
import sys
import zlib
from collections.abc import Iterable, Iterator, Mapping
from functools import partial
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ckpt.base import errors
from ckpt.base.errors import NotFoundError, StorageError, UnsafeError, UsageError
from ckpt.base.text import pluralize, scheme_of
from ckpt.move.files import translate_os_errors
from ckpt.move.source import STANDIN

if TYPE_CHECKING:
    from ckpt.stores.objects import Entry, Store
    from ckpt.stores.ranges import Ranges

#: Only `O_PATH` opens a file without any permission.
_MODE = 0o000 if hasattr(os, "O_PATH") else stat.S_IRUSR
#: Ends with `/`. Empty before the first stand-in.
_root = ""
_remote_objects: dict[tuple[int, int], Ranges] = {}  # by device and inode


def is_standin(path: str) -> bool:
    return bool(_root) and path.startswith(_root)


def in_use() -> bool:
    return bool(_remote_objects)


def place(url: str) -> Path:
    """Return the stand-in's path for `url`, the same for `s3://bucket/run` and `s3:/bucket/run/`.

    Raise UsageError if the path would collapse to another key, or if the URL has a user or password.
    """
    scheme = scheme_of(url)
    rest = url.partition(":")[2]
    parts = rest.removeprefix("//" if rest.startswith("//") else "/").removesuffix("/").split("/")
    if _has_user(scheme, parts[0]):
        what = "this store's URLs can't have a user, password or port"
        hint = "credentials are found where the store's own tools look: for S3 AWS_PROFILE or `aws configure`"
        raise UsageError(what, found=f"{scheme}://...", expected=f"{scheme}://bucket/folder, say", hint=hint)
    if scheme is None or not {"", ".", ".."}.isdisjoint(parts) or "\0" in url:
        raise UsageError(
            "this is not the URL of a folder or file in a store", found=url, expected="s3://bucket/folder, say"
        )
    errors.SHOWN[f"{_standin_folder()}{scheme}/"] = f"{scheme}://"
    return Path(_standin_folder(), scheme, *parts)


def _has_user(scheme: str | None, root: str) -> bool:
    """Return True if the URL has more than a bucket in its root. Azure has container@account."""
    if scheme in ("abfs", "abfss"):
        return ":" in root
    return scheme in ("s3", "s3a", "gs", "az", "hf") and not {":", "@"}.isdisjoint(root)


def url_of(path: str | os.PathLike[str]) -> str | None:
    text = os.fspath(path)
    if not is_standin(text):
        return None
    scheme, _, rest = text.removeprefix(_root).partition("/")
    return f"{scheme}://{rest}"


def create(path: Path, mtime_ns: int, remote_object: Ranges) -> None:
    """Create or replace the stand-in. Its parent folder must exist."""
    path.unlink(missing_ok=True)
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, _MODE)
    try:
        os.ftruncate(descriptor, remote_object.size)
        os.utime(descriptor, ns=(mtime_ns, mtime_ns))
        info = os.fstat(descriptor)
        _remote_objects[info.st_dev, info.st_ino] = remote_object
    finally:
        os.close(descriptor)


def remote_object(descriptor: int) -> Ranges | None:
    """Return None for an ordinary file, even one that reuses a stand-in's inode."""
    if not _remote_objects or not fcntl.fcntl(descriptor, fcntl.F_GETFL) & STANDIN:
        return None
    info = os.fstat(descriptor)
    return _remote_objects.get((info.st_dev, info.st_ino))


def _standin_folder() -> str:
    global _root
    if not _root:
        import tempfile  # imported late: only stores need it

        _root = os.path.realpath(tempfile.mkdtemp(prefix="ckpt-stores-")) + "/"
        atexit.register(_remove, _root, os.getpid())
        sys.addaudithook(_refuse_holes)
    return _root


def _remove(folder: str, process: int) -> None:
    if os.getpid() == process:  # not in a forked process
        shutil.rmtree(folder, ignore_errors=True)


def _refuse_holes(event: str, arguments: tuple[Any, ...]) -> None:
    if event == "open" and isinstance(arguments[0], (str, os.PathLike)):
        path, _, flags = arguments
        if is_standin(os.fspath(path)) and not flags & (STANDIN | os.O_CREAT | os.O_DIRECTORY):
            raise RuntimeError(f"{url_of(path)} was to be opened as if it were a local file")


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
    if scheme_of(text) is None and not is_standin(text):
        return Path(where)
    path = place(text) if scheme_of(text) is not None else Path(where)
    url = url_of(path)
    assert url is not None
    from ckpt.stores.objects import split, store, unique_entries  # local paths come here too

    scheme, root, key = split(url)
    objects, home = store(scheme, root), place(f"{scheme}://{root}")
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
            create(path, second * 10**9 + version, Ranges(entry.size, partial(objects.read, entry)))
            _there[path] = entry
    for folder, modified_ns in newest.items():
        os.utime(folder, ns=(modified_ns, modified_ns))
