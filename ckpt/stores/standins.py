"""Files that stand for objects in a store: they have the names and the sizes, and the bytes are fetched.

Whatever asks for names, sizes and times sees ordinary files, in a temporary folder that goes with the process.  One
that is opened by `ckpt.move.source` is a descriptor from which the kernel lets nobody read (`O_PATH`); what is asked of
it is fetched.  Opened in any other way it would be a hole of zeros, so that Python is kept from that by an audit hook.
"""

from __future__ import annotations

import atexit
import fcntl
import os
import shutil
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ckpt.base import errors
from ckpt.base.errors import UsageError
from ckpt.base.text import scheme_of

if TYPE_CHECKING:
    from ckpt.stores.ranges import Ranges

#: The folder of all stand-ins, with `/` behind it; empty while there is none.
_root = ""
_behind: dict[tuple[int, int], Ranges] = {}  # by the stand-in's device and inode


def is_standin(path: str) -> bool:
    """Whether `path` lies among the stand-ins."""
    return bool(_root) and path.startswith(_root)


def in_use() -> bool:
    """Whether any stand-in exists."""
    return bool(_behind)


def place(url: str) -> Path:
    """The path of the stand-in for `url`: the same for `s3://bucket/run` and `s3:/bucket/run/`.

    Raises UsageError for a key that would be folded into another one, and for a URL with a user or a password.
    """
    scheme = scheme_of(url)
    rest = url.partition(":")[2]
    parts = rest.removeprefix("//" if rest.startswith("//") else "/").removesuffix("/").split("/")
    if _has_user(scheme, parts[0]):
        what = "a URL in this kind of store has no user, password or port"
        hint = "credentials are found where the store's own tools look: for S3 AWS_PROFILE or `aws configure`"
        raise UsageError(what, found=f"{scheme}://...", expected=f"{scheme}://bucket/folder, say", hint=hint)
    if scheme is None or not {"", ".", ".."}.isdisjoint(parts) or "\0" in url:
        raise UsageError("this is no URL of a folder or file in a store", found=url, expected="s3://bucket/folder, say")
    errors.SHOWN[f"{_standin_folder()}{scheme}/"] = f"{scheme}://"
    return Path(_standin_folder(), scheme, *parts)


def _has_user(scheme: str | None, root: str) -> bool:
    """Whether what names the store is more than a bucket, which would be left out.  Azure has container@account."""
    if scheme in ("abfs", "abfss"):
        return ":" in root
    return scheme in ("s3", "s3a", "gs", "az", "hf") and not {":", "@"}.isdisjoint(root)


def url_of(path: str | os.PathLike[str]) -> str | None:
    """The URL of the object for which the file at `path` stands; None for another path."""
    text = os.fspath(path)
    if not is_standin(text):
        return None
    scheme, _, rest = text.removeprefix(_root).partition("/")
    return f"{scheme}://{rest}"


def create(path: Path, mtime_ns: int, behind: Ranges) -> None:
    """Let a file stand at `path`, whose parent is there, in place of any other one."""
    path.unlink(missing_ok=True)
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o000)
    try:
        os.ftruncate(descriptor, behind.size)
        os.utime(descriptor, ns=(mtime_ns, mtime_ns))
        info = os.fstat(descriptor)
        _behind[info.st_dev, info.st_ino] = behind
    finally:
        os.close(descriptor)


def behind(descriptor: int) -> Ranges | None:
    """The object that an open file stands for; None for an ordinary file, even with the inode of an old stand-in."""
    if not _behind or not fcntl.fcntl(descriptor, fcntl.F_GETFL) & os.O_PATH:
        return None
    info = os.fstat(descriptor)
    return _behind.get((info.st_dev, info.st_ino))


def _standin_folder() -> str:
    """The folder of all stand-ins, which is made at the first call."""
    global _root
    if not _root:
        import tempfile  # with all that it imports, only where there is a store

        _root = os.path.realpath(tempfile.mkdtemp(prefix="ckpt-stores-")) + "/"
        atexit.register(_remove, _root, os.getpid())
        sys.addaudithook(_refuse_holes)
    return _root


def _remove(folder: str, process: int) -> None:
    if os.getpid() == process:  # and not one that was forked
        shutil.rmtree(folder, ignore_errors=True)


def _refuse_holes(event: str, arguments: tuple[Any, ...]) -> None:
    if event == "open" and isinstance(arguments[0], (str, os.PathLike)):
        path, _, flags = arguments
        if is_standin(os.fspath(path)) and not flags & (os.O_PATH | os.O_CREAT | os.O_DIRECTORY):
            raise RuntimeError(f"{url_of(path)} was to be opened as if it were a local file")
