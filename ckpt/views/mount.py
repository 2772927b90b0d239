"""`ckpt mount`: a checkpoint as a read-only folder in another format, computed on read."""

from __future__ import annotations

import errno
import os
import shutil
import stat
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import lru_cache
from pathlib import Path
from typing import Any, Protocol

from ckpt.base.errors import CkptError, NotFoundError, StorageError, UsageError, printable
from ckpt.move.files import is_filled, translate_os_errors
from ckpt.plan.checkpoint import Checkpoint
from ckpt.plan.planner import Plan
from ckpt.runs.opening import warn_of_skipped
from ckpt.views.files import Views

DEVICE = "/dev/fuse"
_BLOCK = 1 << 20  # bytes computed at a time
_BLOCKS = 64  # cached blocks
_POLL = 0.02  # seconds between checks for the mount


class Conversion(Protocol):
    @property
    def source(self) -> Checkpoint: ...
    @property
    def plan(self) -> Plan: ...
    @property
    def views(self) -> Views: ...
    def check_destination(self, destination: Path) -> None: ...
    def to_json(self, destination: str | None = None) -> dict[str, Any]: ...


class Mount(AbstractContextManager[Path]):
    """A virtual folder, during a `with` block or with `serve`."""

    def __init__(self, conversion: Conversion, view: Path | None, words: Sequence[str]) -> None:
        self.conversion = conversion
        self.view = view
        self._served = _served_by(words, view)
        if view is not None:
            _check_free(conversion, view)

    def __enter__(self) -> Path:
        warn_of_skipped(self.conversion.source)
        return self._served.__enter__()

    def __exit__(self, *raised: Any) -> None:
        self._served.__exit__(*raised)

    def serve(self, *, foreground: bool = False) -> None:
        """Serve `view` until it is unmounted.

        Unless `foreground`, another process serves it, and this one ends once the mount exists. Raises StorageError if
        mounting fails.
        """
        if self.view is None:
            raise UsageError("there is no folder to serve at: `mount` was called without `view`")
        fuse = library()
        with translate_os_errors(self.view):
            self.view.mkdir(parents=True, exist_ok=True)
        served = _Served(self.conversion)
        shown = {"fsname": self.conversion.source.path.replace(",", "_"), "subtype": "ckpt"}
        try:
            fuse.FUSE(served, str(self.view), foreground=foreground, ro=True, kernel_cache=True, **shown)
        except RuntimeError as error:
            if not served.was_mounted:  # libfuse also returns a code on unmount
                hint = "libfuse's own message is above; in a container it needs --device /dev/fuse --cap-add SYS_ADMIN"
                raise StorageError("the folder could not be mounted", path=self.view, hint=hint) from error


def _check_free(conversion: Conversion, view: Path) -> None:
    try:
        conversion.check_destination(view)
        if view.is_symlink() or (view.exists() and not view.is_dir()) or is_filled(view) or os.path.ismount(view):
            raise UsageError("this is not an empty folder", path=view)
    except UsageError as error:
        error.hint = "give an empty folder, or a new name"
        raise
    except OSError as error:
        is_dead = error.errno == errno.ENOTCONN
        hint = f"its server process has ended; use `fusermount3 -u {view}` to unmount it" if is_dead else None
        raise StorageError(error.strerror or str(error), path=view, hint=hint) from error


def library() -> Any:
    """Raise NotFoundError if mfusepy, libfuse or the device is missing."""
    try:
        import mfusepy
    except ImportError:
        raise NotFoundError(
            "`ckpt mount` needs the package mfusepy", hint="pip install 'ckpt-toolkit[mount]'"
        ) from None
    except OSError as error:  # raised without libfuse
        raise NotFoundError(
            "`ckpt mount` needs libfuse, but libfuse is not installed", found=str(error), hint="apt-get install fuse3"
        ) from None
    if not os.path.exists(DEVICE):
        raise NotFoundError(
            "`ckpt mount` needs FUSE, but this system has no FUSE",
            path=DEVICE,
            hint="in a container: --device /dev/fuse --cap-add SYS_ADMIN; or write the files with `ckpt convert`",
        )
    return mfusepy


class _Served:
    """FUSE callbacks. Errors are OSErrors, because the kernel passes on their errno."""

    use_ns = True

    def __init__(self, conversion: Conversion) -> None:
        self.was_mounted = False
        self._views = conversion.views
        self._sizes = {file.name: file.size for file in conversion.plan.target.files}
        self._folders: dict[str, dict[str, None]] = {"": {}}
        for name in self._sizes:
            parts = name.split("/")
            for depth, part in enumerate(parts):
                self._folders.setdefault("/".join(parts[:depth]), {})[part] = None
        self._time = time.time_ns()
        self._home = os.getcwd()
        self._block = lru_cache(_BLOCKS)(self._read_block)

    def init(self, path: str) -> None:
        self.was_mounted = True
        os.chdir(self._home)  # libfuse changes the folder, but source paths may be relative

    def getattr(self, path: str, handle: object = None) -> dict[str, int]:
        name = path.strip("/")
        if name not in self._sizes and name not in self._folders:
            raise OSError(errno.ENOENT, os.strerror(errno.ENOENT), path)
        times = dict.fromkeys(("st_atime", "st_mtime", "st_ctime"), self._time)
        owner = {"st_uid": os.getuid(), "st_gid": os.getgid()}
        if name in self._folders:
            return {"st_mode": stat.S_IFDIR | 0o555, "st_nlink": 2, **owner, **times}
        return {"st_mode": stat.S_IFREG | 0o444, "st_nlink": 1, "st_size": self._sizes[name], **owner, **times}

    def readdir(self, path: str, handle: object) -> list[str]:
        return [".", "..", *self._folders[path.strip("/")]]

    def read(self, path: str, size: int, offset: int, handle: object) -> bytes:
        name = path.strip("/")
        try:
            numbers = range(offset // _BLOCK, -(-min(offset + size, self._sizes[name]) // _BLOCK))
            content = b"".join(self._block(name, number) for number in numbers)
        except CkptError as error:
            print(f"error: {error.on_command_line()}", file=sys.stderr, flush=True)
            raise OSError(errno.EIO, error.what, path) from None
        start = offset - offset // _BLOCK * _BLOCK
        return content[start : start + size]

    def _read_block(self, name: str, number: int) -> bytes:
        start = number * _BLOCK
        buffer = bytearray(min(_BLOCK, self._sizes[name] - start))
        self._views.read_into(name, start, memoryview(buffer))
        return bytes(buffer)


@contextmanager
def _served_by(words: Sequence[str], view: str | os.PathLike[str] | None) -> Iterator[Path]:
    """Have `ckpt WORDS VIEW` serve `view` (default: a temporary folder) during the block.

    A separate process serves it: a page fault in a mapped file would block this interpreter forever. Raise StorageError
    if the process ends before the mount exists.
    """
    place = Path(tempfile.mkdtemp(prefix="ckpt-view-")) if view is None else Path(view)
    env = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    command = [sys.executable, "-m", "ckpt", *words, str(place)]
    process = subprocess.Popen(command, env=env, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    try:
        while not os.path.ismount(place):
            if process.poll() is not None:
                said = process.communicate()[1]
                raise StorageError("the folder could not be mounted", path=place, found=printable(said[-2000:]))
            time.sleep(_POLL)
        yield place
    finally:
        while os.path.ismount(place):
            unmount = next(filter(shutil.which, ("fusermount3", "fusermount")), "umount")
            flags = [] if unmount == "umount" else ["-u"]
            subprocess.run([unmount, *flags, str(place)], check=False, capture_output=True)
            time.sleep(_POLL)  # busy while a file is open
        process.terminate()
        process.communicate()
        if view is None:
            place.rmdir()
