"""Staging, fsync, rename and path confinement. Only this module creates, renames or removes files.

Output is written to a hidden folder next to the destination, and renamed once every byte is on disk.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import os
import shutil
import stat
from collections import OrderedDict
from collections.abc import Callable, Container, Iterable, Iterator
from datetime import datetime
from io import FileIO
from itertools import accumulate, islice
from pathlib import Path

from ckpt.base.errors import (
    CorruptError,
    IncompleteError,
    NotFoundError,
    StorageError,
    UnsafeError,
    UsageError,
    printable,
)
from ckpt.base.text import show_size
from ckpt.base.words import Message
from ckpt.move.source import NO_NAME, open_file

_RENAME_EXCHANGE = 2  # linux/fs.h
_AT_FDCWD = -100
_STAGED = ".ckpt-staging"
_BROKEN = "replace the link by the file, or remove it"
REPLACED = ".ckpt-old"
_OPEN_FILES = 64  # per thread

#: macOS: fsync leaves data in the drive's cache.
_FULL_SYNC = getattr(fcntl, "F_FULLFSYNC", None)
#: From filesystems that can't make a file or folder durable.
_NO_SYNC = {errno.EINVAL, errno.ENOSYS, errno.ENOTTY, errno.EOPNOTSUPP}


@contextlib.contextmanager
def translate_os_errors(path: str | os.PathLike[str] | None = None) -> Iterator[None]:
    try:
        yield
    except FileNotFoundError as error:
        raise NotFoundError("no such file or folder", path=error.filename or path) from error
    except OSError as error:
        if error.errno in NO_NAME:
            raise CorruptError(error.strerror or str(error), path=error.filename or path) from error
        raise _storage_error(error, error.filename or path) from error


@contextlib.contextmanager
def _writing(path: Path, how: str = Message("place with {output}")) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        is_denied = error.errno in (errno.ENOENT, errno.ENOTDIR, errno.EEXIST, errno.EACCES, errno.EPERM, errno.EROFS)
        hint = "nothing can be written there; choose another " + how if is_denied else None
        raise _storage_error(error, path, hint) from error


def _storage_error(error: OSError, path: str | os.PathLike[str] | None, hint: str | None = None) -> StorageError:
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        hint = Message("free some space, or choose another place with {output}")
    return StorageError(error.strerror or str(error), path=path, hint=hint)


class OpenFiles(contextlib.AbstractContextManager["OpenFiles"]):
    """LRU cache of one thread's open source files."""

    def __init__(self) -> None:
        self._open: OrderedDict[str, int] = OrderedDict()

    def __exit__(self, *exc: object) -> None:
        self.close()

    def close(self) -> None:
        """Ignore errors: nothing was written."""
        while self._open:
            with contextlib.suppress(OSError):
                os.close(self._open.popitem()[1])

    def descriptor(self, path: str) -> int:
        found = self._open.get(path)
        if found is None:
            if len(self._open) >= _OPEN_FILES:
                os.close(self._open.popitem(last=False)[1])
            found = self._open[path] = open_file(path)
        else:
            self._open.move_to_end(path)
        return found


def is_broken_link(path: Path) -> bool:
    return path.is_symlink() and not path.exists()


def confined(root: Path, name: str) -> Path:
    """Return `root / name`. Raise UnsafeError if it leaves `root`, IncompleteError if it is a broken link.

    A symlink may leave `root` only for the `blobs` folder of the same Hugging Face cache entry.
    """
    if not name or "\0" in name or os.path.isabs(name) or ".." in Path(name).parts or not _is_encodable(name):
        raise UnsafeError("a file name leads out of the checkpoint's folder", path=root, found=repr(name))
    path, parts = root / name, accumulate(Path(name).parts, os.path.join, initial=os.fspath(root))
    if not any(map(os.path.islink, islice(parts, 1, None))):  # no link below the root
        return path
    real, real_root = Path(os.path.realpath(path)), Path(os.path.realpath(root))
    allowed = [real_root, *(folder.parent / "blobs" for folder in real_root.parents if folder.name == "snapshots")]
    if not any(real.is_relative_to(folder) for folder in allowed):
        raise UnsafeError(
            "a symlink leads out of the checkpoint's folder",
            path=path,
            found=str(real),
            hint="if you trust it, replace the link by the file",
        )
    if is_broken_link(path):
        raise IncompleteError("a symlink leads to nothing", path=path, found=str(real), hint=_BROKEN)
    return path


def check_destination(destination: Path, source: Path) -> None:
    """Raise UsageError if the destination and the source are equal or contain each other."""
    if is_inside_folder(destination, source) or is_inside_folder(source, destination):
        raise UsageError(
            "the destination and the source overlap",
            path=destination,
            expected="a folder outside the source that does not contain it",
            found=f"source {source}",
            hint=Message("give another folder with {output}"),
            code="destination-overlaps",
        )


def _folder_summary(folder: Path) -> str:
    names, changed = sorted(os.listdir(folder)), datetime.fromtimestamp(os.stat(folder).st_mtime)
    more = ", ..." if len(names) > 4 else ""
    return f"{', '.join(names[:4])}{more}, written {changed:%Y-%m-%d %H:%M:%S}"


def is_inside_folder(inner: Path, outer: Path) -> bool:
    """Return True if `inner` is or lies in `outer`, even under a second name from a bind mount."""
    real, container = Path(os.path.realpath(inner)), Path(os.path.realpath(outer))
    if real.is_relative_to(container):
        return True
    with contextlib.suppress(OSError):
        identity = os.stat(container)
        return any(os.path.samestat(identity, os.stat(place)) for place in (real, *real.parents) if place.exists())
    return False


class Staging:
    """A staging folder next to its destination. Call `commit` at the end.

    Without `commit`, the destination is unchanged and the folder is removed on exit, unless `keep` was called. Files
    from a stopped process remain until `clear` or `keep_only`; call one before writing. A folder in use is refused.
    """

    def __init__(
        self,
        destination: Path,
        *,
        overwrite: bool,
        total_bytes: int,
    ) -> None:
        self.destination = Path(os.path.abspath(destination))
        if not self.destination.name:
            raise UsageError("the root folder cannot be replaced", path=destination, hint="give a folder in it")
        if is_staged(self.destination):
            what = "hidden folders with this name belong to unfinished conversions, and may be cleared"
            raise UsageError(what, path=destination, hint="give a folder of another name")
        self.path = staging_folder(self.destination)
        self._old = self.destination.with_name(f".{self.destination.name}{REPLACED}")
        self._overwrite = overwrite
        self._total_bytes = total_bytes
        self.has_leftovers = False
        self._folders = {self.path}  # to sync
        self._is_kept = True
        self._may_be_there = False  # True if files to create may exist
        self._lock = -1

    def __enter__(self) -> Staging:
        with _writing(self.destination):
            self._check_destination_free()
            self.destination.parent.mkdir(parents=True, exist_ok=True)
            self._lock = self._acquire()
            try:
                self._settle_interrupted_swap()
                self._check_destination_free()
                self.has_leftovers = is_filled(self.path)
                self._check_space()
            except BaseException:
                self._leave()
                raise
        return self

    def __exit__(self, *exc: object) -> None:
        self._leave()

    def _leave(self) -> None:
        if not (self._is_kept and is_filled(self.path)) and _same_file(self._lock, self.path):
            shutil.rmtree(self.path, ignore_errors=True)
        os.close(self._lock)

    def clear(self) -> int:
        """Remove the files of a stopped process. Return their size on disk."""
        with _writing(self.destination):
            size, self._is_kept = disk_bytes(self.path), False
            for entry in list(self.path.iterdir()):
                if entry.is_dir() and not entry.is_symlink():
                    shutil.rmtree(entry)
                else:
                    entry.unlink()
        self.has_leftovers = False
        return size

    def keep_only(self, names: Container[str]) -> None:
        with _writing(self.destination):
            for path in list(self.path.rglob("*")) if self.has_leftovers else ():
                if path.is_dir() and not path.is_symlink():
                    self._folders.add(path)
                elif str(path.relative_to(self.path)) not in names:
                    path.unlink()
        self._is_kept, self._may_be_there = False, self.has_leftovers

    def keep(self) -> None:
        self._is_kept = True

    def share(self, files: Iterable[tuple[str, int]]) -> None:
        """Create all files for other processes, which write through `SharedStaging`.

        One process creates them, because other nodes may cache that a file is missing (NFS).
        """
        for name, size in files:
            self.create(name, size).close()
        self._may_be_there = True

    def create(self, name: str, size: int) -> FileIO:
        """Open `name` for reading and writing, created with `size` zero bytes, or reused after `keep_only` or `share`.

        FileIO opens it in C, so that Ctrl-C can't leave an open descriptor.
        """
        path = confined(self.path, name)
        with _writing(self.destination / name):
            path.parent.mkdir(parents=True, exist_ok=True)
            self._folders.update(path.parents[: len(Path(name).parts) - 1])
            file = FileIO(path, "r+" if self._may_be_there and path.exists() else "x+")
            try:
                os.ftruncate(file.fileno(), size)
            except BaseException:
                file.close()
                raise
            return file

    def commit(self) -> None:
        """Make everything durable, then move it to the destination in one step."""
        assert not self._is_kept, "nobody has looked at what was left in the folder"
        try:
            with _writing(self.destination):
                for folder in sorted(self._folders, reverse=True):  # the inner ones first
                    sync_folder(folder)
                if is_filled(self.destination):
                    self._check_destination_free()
                    self._swap()
                else:
                    os.rename(self.path, self.destination)
                    self._sync_parent(self.destination)
        except KeyboardInterrupt as interrupt:
            if not _same_file(self._lock, self.path):  # already moved
                rests = [path for path in (self.path, self._old) if path.exists()]
                left = "".join(f"; the replaced output is still in {path}" for path in rests)
                interrupt.args = (printable(f"stopped; {self.destination} is complete{left}"),)
            raise

    def _sync_parent(self, at: Path) -> None:
        """Make the rename durable. Raise StorageError with a note about `at` if the disk can't confirm it."""
        try:
            sync_folder(self.destination.parent)
        except OSError as error:
            what = f"the output is complete, but may not survive a system crash: {error.strerror}"
            hint = None if at == self.destination else f"the replaced output is still there, in {at.name}"
            raise StorageError(what, path=self.destination, hint=hint) from error

    def _check_destination_free(self) -> None:
        try:
            mode = os.lstat(self.destination).st_mode  # one check: another process may rename it
        except FileNotFoundError:
            return
        if not stat.S_ISDIR(mode):
            raise UsageError("the destination exists and is not a folder", path=self.destination)
        if os.path.ismount(self.destination):
            raise UsageError(
                "the destination is a mount point and cannot be replaced in one step",
                path=self.destination,
                hint=Message("give a folder in it with {output}"),
            )
        if not self._overwrite and is_filled(self.destination):
            raise UsageError(
                "the destination exists",
                path=self.destination,
                found=_folder_summary(self.destination),
                hint=Message("give another folder with {output}, or {overwrite=True} to replace it"),
                code="destination-exists",
            )

    def _check_space(self) -> None:
        info = os.statvfs(self.destination.parent)
        free = info.f_bavail * info.f_frsize + (disk_bytes(self.path) if self.has_leftovers else 0)
        if free < self._total_bytes:
            raise StorageError(
                "not enough space for the output",
                path=self.destination.parent,
                expected=show_size(self._total_bytes),
                found=f"{show_size(free)} free, {show_size(self._total_bytes - free)} too few",
                hint=Message("free some space, or choose another place with {output}"),
                code="no-space",
            )

    def _acquire(self) -> int:
        """Create or take over the staging folder. The returned descriptor holds its lock."""
        while True:
            with contextlib.suppress(FileExistsError):
                os.mkdir(self.path)
            try:
                descriptor = self._lock_folder(self.path)  # another process may own it
            except FileNotFoundError:
                continue  # another process has just finished
            if _same_file(descriptor, self.path):
                return descriptor
            os.close(descriptor)

    def _lock_folder(self, path: Path) -> int:
        """Raise StorageError if another process holds the lock."""
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(descriptor)
            raise StorageError("another process is writing this destination", path=self.destination) from None
        except OSError:
            pass  # a filesystem without locks
        except BaseException:
            os.close(descriptor)
            raise
        return descriptor

    def _swap(self) -> None:
        """Exchange the staged folder with the existing destination, then remove the old one.

        The old destination has the staging folder's name until it is gone, so it is locked too.
        """
        previous = self._lock_folder(self.destination)
        try:
            replaced = self.path
            if not _exchange(self.path, self.destination):
                replaced = self._old
                try:
                    os.rename(self.destination, self._old)
                    os.rename(self.path, self.destination)
                except BaseException:
                    if not self.destination.exists() and self._old.exists():
                        os.rename(self._old, self.destination)
                    raise
            self._sync_parent(replaced)
            try:
                shutil.rmtree(replaced)
            except OSError as error:
                what = f"the output is complete, but the replaced output could not be removed: {error.strerror}"
                raise StorageError(what, path=replaced) from error
        finally:
            os.close(previous)

    def _settle_interrupted_swap(self) -> None:
        """Finish or undo an interrupted swap."""
        if not self._old.exists():
            return
        lock = self._lock_folder(self._old)
        try:
            if is_filled(self.destination):
                shutil.rmtree(self._old)
            else:
                os.rename(self._old, self.destination)
        finally:
            os.close(lock)


class SharedStaging:
    """Staging folder in a process that writes another one's files."""

    def __init__(self, destination: Path) -> None:
        self.destination = Path(os.path.abspath(destination))
        self.path = staging_folder(self.destination)

    def create(self, name: str, size: int) -> FileIO:
        """Open an existing file. Raise StorageError if its size is not `size`."""
        with _writing(self.destination / name):
            file = FileIO(confined(self.path, name), "r+")
            if os.fstat(file.fileno()).st_size != size:
                file.close()
                raise OSError(errno.ESTALE, "the file differs from the file another process made")
            return file


def staging_folder(destination: Path) -> Path:
    destination = Path(os.path.abspath(destination))
    return destination.with_name(f".{destination.name}{_STAGED}")


def destination_of(staging: Path) -> Path:
    """Return the destination of a staging folder or a swapped one."""
    name = staging.name.removeprefix(".").removesuffix(_STAGED).removesuffix(REPLACED)
    return staging.with_name(name)


def is_staged(path: Path) -> bool:
    """Return True for a path in a staging folder. Files there have their full size from the start."""
    return any(part.startswith(".") and part.endswith(_STAGED) for part in Path(os.path.abspath(path)).parts)


def write_file(path: Path, content: bytes, *, overwrite: bool) -> None:
    """Write one file atomically. Raise UsageError if it exists, unless `overwrite`."""
    if path.is_dir():
        raise UsageError("this is a folder", path=path, expected="the name of a file")
    if not overwrite and os.path.lexists(path):
        raise UsageError(
            "the file exists", path=path, hint=Message("give another name, or {overwrite=True} to replace it")
        )
    staged = path.with_name(f".{path.name}.{os.getpid()}{_STAGED}")
    with _writing(path, "place"):
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            with open(staged, "xb") as file:
                file.write(content)
                file.flush()
                sync(file.fileno())
            os.replace(staged, path)
        except BaseException:
            staged.unlink(missing_ok=True)
            raise
        sync_folder(path.parent)


def sync(descriptor: int) -> None:
    if _FULL_SYNC is None or not _is_done(fcntl.fcntl, descriptor, _FULL_SYNC):  # macOS's network folders
        _is_done(os.fsync, descriptor)


def _is_done(call: Callable[..., object], *arguments: int) -> bool:
    try:
        call(*arguments)
    except OSError as error:
        if error.errno not in _NO_SYNC:
            raise
        return False
    return True


def sync_folder(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        sync(descriptor)
    finally:
        os.close(descriptor)


def _same_file(descriptor: int, path: Path) -> bool:
    try:
        there = os.stat(path, follow_symlinks=False)
    except FileNotFoundError:
        return False
    return os.path.samestat(os.fstat(descriptor), there)


def is_filled(folder: Path) -> bool:
    try:
        with os.scandir(folder) as entries:
            return any(True for _ in entries)
    except (FileNotFoundError, NotADirectoryError):
        return False


def disk_bytes(folder: Path) -> int:
    return sum(path.lstat().st_blocks * 512 for path in folder.rglob("*"))


def _is_encodable(name: str) -> bool:
    """Return False for lone surrogates: JSON can spell them, file names cannot."""
    try:
        os.fsencode(name)
    except UnicodeEncodeError:
        return False
    return True


def _exchange(a: Path, b: Path) -> bool:
    """Return False if the kernel or the filesystem can't."""
    renameat2 = getattr(ctypes.CDLL(None), "renameat2", None)
    if renameat2 is None:
        return False
    return bool(renameat2(_AT_FDCWD, os.fsencode(a), _AT_FDCWD, os.fsencode(b), _RENAME_EXCHANGE) == 0)
