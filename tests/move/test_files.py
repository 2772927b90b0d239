"""`ckpt/move/files.py`: staging and confinement: kills at every call, two writers, and poor filesystems."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import gc
import os
import select
import shutil
import stat
import sys
import threading
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

from ckpt.errors import CkptError, CorruptError, NotFoundError, StorageError, UnsafeError, UsageError
from ckpt.move import files
from ckpt.move.files import (
    SharedStaging,
    Staging,
    check_destination,
    confined,
    sync_folder,
    translate_os_errors,
    write_file,
)
from tests.support.killing import in_small_process, killed_before_call

NEW = {"model.bin": b"new" * 1000, "part/index.json": b"{}", "part/deep/x.bin": b"x"}
OLD = {"model.bin": b"old", "notes/kept.txt": b"by somebody"}


def write(destination: Path, *, overwrite: bool = False, total_bytes: int = 1) -> None:
    """Write an output like a conversion, in one thread."""
    with Staging(destination, overwrite=overwrite, total_bytes=total_bytes) as staging:
        staging.clear()
        for name, content in NEW.items():
            with translate_os_errors(name), staging.create(name, len(content)) as file:
                os.pwrite(file.fileno(), content, 0)
                files.sync(file.fileno())
        staging.commit()


def make(folder: Path, contents: dict[str, bytes]) -> None:
    for name, content in contents.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)


def contents(folder: Path) -> dict[str, bytes] | None:
    """Return a folder's content, or None if it is missing."""
    if not folder.exists():
        return None
    return {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if not p.is_dir()}


def set_swap(swap: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Simulate a kernel or filesystem that can't exchange two folders atomically, if `swap` says so."""
    if swap == "two renames":
        monkeypatch.setattr(files, "_exchange", lambda a, b: False)


@pytest.fixture(params=["exchange", "two renames"])
def swap(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    set_swap(request.param, monkeypatch)
    return request.param


@pytest.fixture(autouse=True)
def nothing_left_open() -> Iterator[None]:
    def open_files() -> Counter[str]:
        found: Counter[str] = Counter()
        for name in os.listdir("/proc/self/fd"):
            with contextlib.suppress(FileNotFoundError):
                found[os.readlink(f"/proc/self/fd/{name}")] += 1
        return found

    before = open_files()
    yield
    assert not open_files() - before


def test_ctrl_c_at_any_instruction_of_making_a_file_leaves_none_open(tmp_path: Path) -> None:
    """`nothing_left_open` also checks, but only after each frame has closed its files."""

    def strike(number: int) -> bool:
        """Return True if it was interrupted before the module's instruction with this number."""
        left = number

        def trace(frame: FrameType, event: str, _: Any) -> Any:
            nonlocal left
            if frame.f_code.co_filename != files.__file__:
                return None
            frame.f_trace_opcodes = True
            left -= event == "opcode"
            if not left and event == "opcode":
                raise KeyboardInterrupt
            return trace

        sys.settrace(trace)
        try:
            staging.create("x", 10).close()
        except KeyboardInterrupt:
            return True
        finally:
            sys.settrace(None)
        return False

    def opened() -> list[str]:
        """Return the open files in the staging folder, deleted ones too. Leaks of other tests don't count."""
        found = []
        for name in os.listdir("/proc/self/fd"):
            with contextlib.suppress(FileNotFoundError):
                found.append(os.readlink(f"/proc/self/fd/{name}"))
        return sorted(path for path in found if path.startswith(str(staging.path)))

    gc.freeze()  # keep other tests' garbage out of the collections
    with Staging(tmp_path / "out", overwrite=False, total_bytes=1) as staging:
        before, number = opened(), 1
        while strike(number):
            gc.collect()
            assert opened() == before, f"left open when struck at instruction {number}"
            with contextlib.suppress(FileNotFoundError):
                (staging.path / "x").unlink()
            number += 1
    assert number > 50


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
class TestKilled:
    @in_small_process
    def test_without_a_destination_it_is_absent_or_complete(self, tmp_path: Path) -> None:
        out, number, states = tmp_path / "out", 1, Counter[bool]()
        while killed_before_call(number, lambda: write(out)):
            found = contents(out)
            assert found in (None, NEW), f"killed before call {number}"
            states[found == NEW] += 1
            if found is None:
                write(out)  # a rerun uses the leftovers and finishes
                assert contents(out) == NEW
            assert os.listdir(tmp_path) == ["out"], f"killed before call {number}"
            shutil.rmtree(out)
            number += 1
        assert number > 25
        assert states[True] and states[False] > 20, "it was killed before the rename, and behind it"

    @in_small_process
    def test_with_a_destination_it_is_old_or_new(self, tmp_path: Path, swap: str) -> None:
        set_swap(swap, pytest.MonkeyPatch())
        out, number, states = tmp_path / "out", 1, Counter[str]()
        make(out, OLD)
        while killed_before_call(number, lambda: write(out, overwrite=True)):
            found = contents(out)
            state = "absent" if found is None else "old" if found == OLD else "new" if found == NEW else "mixed"
            states[state] += 1
            assert state != "mixed", f"killed before call {number}"
            if state == "absent":  # killed between the two renames: a rerun restores the old output
                assert swap == "two renames"
                assert contents(tmp_path / ".out.ckpt-old") == OLD
                with pytest.raises(UsageError, match="the destination exists"):
                    write(out)
                assert contents(out) == OLD
            write(out, overwrite=True)
            assert contents(out) == NEW
            assert os.listdir(tmp_path) == ["out"], f"killed before call {number}"
            shutil.rmtree(out)
            make(out, OLD)
            number += 1
        assert number > 30
        assert states["old"] > 20 and states["new"] > 3
        assert states["absent"] == (1 if swap == "two renames" else 0)

    @in_small_process
    def test_while_a_rerun_clears_what_was_left(self, tmp_path: Path) -> None:
        """The rerun is killed too."""
        out, number = tmp_path / "out", 1
        while True:
            make(tmp_path / ".out.ckpt-staging", OLD)
            if not killed_before_call(number, lambda: write(out)):
                break
            assert contents(out) in (None, NEW)
            if contents(out) is None:
                write(out)
            assert contents(out) == NEW and os.listdir(tmp_path) == ["out"]
            shutil.rmtree(out)
            number += 1
        assert contents(out) == NEW and os.listdir(tmp_path) == ["out"]


class TestFailing:
    @pytest.mark.parametrize("error", [errno.EIO, errno.ENOSPC, errno.EACCES, None], ids=str)
    @pytest.mark.parametrize("name", ["mkdir", "open", "ftruncate", "pwrite", "fsync", "rename"])
    @pytest.mark.parametrize("existing", [False, True])
    def test_any_call_fails_once(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, swap: str, name: str, error: int | None, existing: bool
    ) -> None:
        """After a disk error or Ctrl-C the output is old or new, and nothing is left beside it."""
        out, number, real, done = tmp_path / "out", 0, getattr(os, name), False
        left = [0]

        def fail(*args: Any, **kwargs: Any) -> Any:
            left[0] -= 1
            if not left[0]:
                raise KeyboardInterrupt if error is None else OSError(error, os.strerror(error))
            return real(*args, **kwargs)

        monkeypatch.setattr(os, name, fail)
        while not done:
            number += 1
            left[0] = 0
            shutil.rmtree(out, ignore_errors=True)
            if existing:
                make(out, OLD)
            left[0] = number
            before = contents(out)
            try:
                write(out, overwrite=existing)
                done = left[0] > 0
            except StorageError as caught:
                assert error is not None and caught.exit_code == 7
                assert os.strerror(error) in str(caught)
            except KeyboardInterrupt:
                assert error is None
            left[0] = 0
            assert contents(out) in (before, NEW), f"call {number}"
            left_over = [entry for entry in os.listdir(tmp_path) if entry != "out"]
            if left_over and contents(out) == NEW:  # leftover of the replaced output
                assert existing, f"call {number}"
                write(out, overwrite=True)
            elif left_over:  # the new staging folder is empty and could not be opened
                assert name == "open" and number == 1
                os.rmdir(tmp_path / ".out.ckpt-staging")
            assert os.listdir(tmp_path) in (["out"], []), f"call {number}"
        assert contents(out) == NEW
        assert number > 1 or (name == "rename" and existing and swap == "exchange")  # this case never calls rename

    def test_what_was_replaced_and_cannot_be_removed_is_said(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, swap: str
    ) -> None:
        out = tmp_path / "out"
        make(out, OLD)
        real = shutil.rmtree

        def denied(path: Any, *args: Any, **kwargs: Any) -> None:
            raise PermissionError(errno.EACCES, "Permission denied", str(path))

        monkeypatch.setattr(shutil, "rmtree", denied)
        with pytest.raises(StorageError, match="the output is complete") as caught:
            write(out, overwrite=True)
        assert contents(out) == NEW
        assert caught.value.path is not None and contents(Path(caught.value.path)) == OLD
        monkeypatch.setattr(shutil, "rmtree", real)
        write(out, overwrite=True)
        assert contents(out) == NEW and os.listdir(tmp_path) == ["out"]

    def test_without_commit_nothing_stays(self, tmp_path: Path) -> None:
        with pytest.raises(ZeroDivisionError), Staging(tmp_path / "out", overwrite=False, total_bytes=1) as staging:
            staging.clear()
            staging.create("a/b.bin", 10).close()
            raise ZeroDivisionError
        assert os.listdir(tmp_path) == []

    def test_a_file_is_not_made_twice(self, tmp_path: Path) -> None:
        with Staging(tmp_path / "out", overwrite=False, total_bytes=1) as staging:
            staging.create("a.bin", 10).close()
            with pytest.raises(StorageError, match="File exists"):
                staging.create("a.bin", 10)


@pytest.mark.usefixtures("real_fsync")
class TestDurable:
    @pytest.mark.parametrize("existing", [False, True])
    def test_everything_is_synced_before_it_is_seen_and_the_old_goes_last(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, swap: str, existing: bool
    ) -> None:
        out, log = tmp_path / "out", []
        if existing:
            make(out, OLD)

        def watch(name: str, describe: Callable[..., str]) -> None:
            real = getattr(os, name)

            def watched(*args: Any, **kwargs: Any) -> Any:
                log.append(f"{name} {describe(*args)}")
                return real(*args, **kwargs)

            monkeypatch.setattr(os, name, watched)

        watch("fsync", lambda fd: os.path.relpath(os.readlink(f"/proc/self/fd/{fd}"), tmp_path))
        watch("rename", lambda a, b: f"{Path(a).name} {Path(b).name}")
        exchange = files._exchange

        def exchanged(a: Path, b: Path) -> bool:
            log.append("exchange")
            return exchange(a, b)

        monkeypatch.setattr(files, "_exchange", exchanged)
        remove = shutil.rmtree
        monkeypatch.setattr(shutil, "rmtree", lambda path, **more: (log.append("remove"), remove(path, **more)))
        write(out, overwrite=True)
        seen = {
            (False, "exchange"): ["rename .out.ckpt-staging out"],
            (False, "two renames"): ["rename .out.ckpt-staging out"],
            (True, "exchange"): ["exchange"],
            (True, "two renames"): ["exchange", "rename out .out.ckpt-old", "rename .out.ckpt-staging out"],
        }[existing, swap]
        staged = ("model.bin", "part/index.json", "part/deep/x.bin", "part/deep", "part", ".")
        before = [os.path.normpath(f"fsync .out.ckpt-staging/{name}") for name in staged]
        assert log == before + seen + ["fsync ."] + (["remove"] if existing else [])

    @pytest.mark.parametrize("umask", [0o000, 0o022, 0o027, 0o077])
    def test_modes_follow_the_umask(self, tmp_path: Path, umask: int) -> None:
        previous = os.umask(umask)
        try:
            write(tmp_path / "out")
        finally:
            os.umask(previous)
        for path in (tmp_path / "out").rglob("*"):
            full = 0o777 if path.is_dir() else 0o666
            assert stat.S_IMODE(path.stat().st_mode) == full & ~umask
        assert stat.S_IMODE((tmp_path / "out").stat().st_mode) == 0o777 & ~umask


class TestLesserFilesystems:
    @pytest.mark.parametrize("code", sorted(files._NO_SYNC))
    def test_without_fsync(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int) -> None:
        def refuse(descriptor: int) -> None:
            raise OSError(code, os.strerror(code))

        monkeypatch.setattr(os, "fsync", refuse)
        write(tmp_path / "out")
        assert contents(tmp_path / "out") == NEW

    @pytest.mark.parametrize("code", [None, errno.EIO, errno.ENOTTY])
    def test_macos_flushes_the_drive_or_falls_back_to_fsync(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int | None
    ) -> None:
        calls = []

        def full(descriptor: int, command: int) -> int:
            calls.append(command)
            if code is not None:
                raise OSError(code, os.strerror(code))
            return 0

        monkeypatch.setattr(files, "_FULL_SYNC", 51)
        monkeypatch.setattr(files.fcntl, "fcntl", full)
        monkeypatch.setattr(os, "fsync", lambda descriptor: calls.append(0))
        with pytest.raises(OSError, match="Input/output") if code == errno.EIO else contextlib.nullcontext():
            sync_folder(tmp_path)
        assert calls == ([51, 0] if code == errno.ENOTTY else [51])

    def test_a_folder_that_cannot_be_synced_for_another_reason_is_an_error(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def fail(descriptor: int) -> None:
            raise OSError(errno.EIO, "Input/output error")

        monkeypatch.setattr(os, "fsync", fail)
        with pytest.raises(OSError, match="Input/output error"):
            sync_folder(tmp_path)

    @pytest.mark.parametrize("existing", [False, True])
    def test_a_parent_that_cannot_be_synced_when_the_output_is_there(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, existing: bool
    ) -> None:
        """The old output is kept then, and the message names it."""
        sync = os.fsync

        def fail(descriptor: int) -> None:
            if os.path.samestat(os.fstat(descriptor), os.stat(tmp_path)):
                raise OSError(errno.EIO, "Input/output error")
            sync(descriptor)

        if existing:
            make(tmp_path / "out", OLD)
        monkeypatch.setattr(os, "fsync", fail)
        with pytest.raises(StorageError, match="the output is complete, but may not survive") as caught:
            write(tmp_path / "out", overwrite=True)
        assert contents(tmp_path / "out") == NEW
        assert ("is still there, in .out.ckpt-" in str(caught.value)) == existing
        monkeypatch.undo()
        write(tmp_path / "out", overwrite=True)
        assert os.listdir(tmp_path) == ["out"]

    @pytest.mark.parametrize("code", [errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS, errno.EBADF])
    def test_without_locks(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int) -> None:
        def refuse(descriptor: int, operation: int) -> None:
            raise OSError(code, os.strerror(code))

        monkeypatch.setattr(fcntl, "flock", refuse)
        make(tmp_path / "out", OLD)
        make(tmp_path / ".out.ckpt-staging", OLD)
        write(tmp_path / "out", overwrite=True)
        assert contents(tmp_path / "out") == NEW and os.listdir(tmp_path) == ["out"]

    @pytest.mark.parametrize("lacking", ["the library", "the filesystem"])
    def test_without_an_exchange(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lacking: str) -> None:
        class Library:
            if lacking == "the filesystem":

                @staticmethod
                def renameat2(*_: Any) -> int:
                    return -1

        monkeypatch.setattr(files.ctypes, "CDLL", lambda _: Library())
        make(tmp_path / "out", OLD)
        write(tmp_path / "out", overwrite=True)
        assert contents(tmp_path / "out") == NEW and os.listdir(tmp_path) == ["out"]

    def test_the_exchange_of_this_one(self, tmp_path: Path) -> None:
        make(tmp_path / "a", OLD)
        make(tmp_path / "b", NEW)
        if not files._exchange(tmp_path / "a", tmp_path / "b"):
            pytest.skip("the filesystem of the temporary folder cannot exchange two folders")
        assert contents(tmp_path / "a") == NEW and contents(tmp_path / "b") == OLD
        assert not files._exchange(tmp_path / "a", tmp_path / "missing")

    def test_a_second_rename_that_fails_brings_the_old_one_back(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        set_swap("two renames", monkeypatch)
        out, real = tmp_path / "out", os.rename
        make(out, OLD)

        def fail(a: Any, b: Any) -> None:
            if Path(a).name == ".out.ckpt-staging":
                raise OSError(errno.EIO, "Input/output error")
            real(a, b)

        monkeypatch.setattr(os, "rename", fail)
        with pytest.raises(StorageError):
            write(out, overwrite=True)
        assert contents(out) == OLD and os.listdir(tmp_path) == ["out"]


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
class TestTwoWriters:
    @pytest.mark.parametrize("existing", [False, True])
    def test_the_second_is_refused_and_the_first_goes_on(self, tmp_path: Path, existing: bool) -> None:
        out = tmp_path / "out"
        if existing:
            make(out, OLD)
        ready, go = os.pipe(), os.pipe()
        child = os.fork()
        if not child:
            status = 1
            try:
                with Staging(out, overwrite=True, total_bytes=1) as staging:
                    staging.clear()
                    os.write(ready[1], b"!")
                    os.read(go[0], 1)
                    for name, content in NEW.items():
                        with staging.create(name, len(content)) as file:
                            file.write(content)
                    staging.commit()
                status = 0
            finally:
                os._exit(status)
        assert os.read(ready[0], 1)
        for _ in range(3):
            with pytest.raises(StorageError, match="another process is writing") as caught:
                write(out, overwrite=True)
            assert caught.value.exit_code == 7
        os.write(go[1], b"!")
        assert os.waitpid(child, 0)[1] == 0
        for descriptor in (*ready, *go):
            os.close(descriptor)
        assert contents(out) == NEW and os.listdir(tmp_path) == ["out"]

    def test_many_at_once(self, tmp_path: Path, swap: str) -> None:
        """The losers get an error, the winner is complete, and no partial output is ever visible."""
        out = tmp_path / "out"
        make(out, OLD)
        children = []
        for _ in range(4):
            child = os.fork()
            if not child:
                status = 1
                try:
                    for _ in range(15):
                        with contextlib.suppress(StorageError):
                            write(out, overwrite=True)
                    status = 0
                finally:
                    if status:
                        traceback.print_exc()
                    os._exit(status)
            children.append(child)
        absent = 0
        while children:
            pid, status = os.waitpid(children[-1], os.WNOHANG)
            if pid:
                children.pop()
                assert status == 0
            absent += not out.exists()
            select.select([], [], [], 0.001)
        assert not absent or swap == "two renames"
        write(out, overwrite=True)
        assert contents(out) == NEW and os.listdir(tmp_path) == ["out"]

    def test_two_threads(self, tmp_path: Path) -> None:
        with Staging(tmp_path / "out", overwrite=False, total_bytes=1):
            errors: list[CkptError] = []

            def second() -> None:
                try:
                    write(tmp_path / "out")
                except CkptError as error:
                    errors.append(error)

            thread = threading.Thread(target=second)
            thread.start()
            thread.join()
            assert [type(error) for error in errors] == [StorageError]

    def test_a_staging_folder_that_goes_while_it_is_locked(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """The first conversion finishes between the second's open and lock, so the second makes a new folder."""
        real, raced = fcntl.flock, []

        def flock(descriptor: int, operation: int) -> None:
            if not raced:
                raced.append(descriptor)
                os.rmdir(tmp_path / ".out.ckpt-staging")
            real(descriptor, operation)

        monkeypatch.setattr(fcntl, "flock", flock)
        write(tmp_path / "out")
        assert raced and contents(tmp_path / "out") == NEW


class TestDestination:
    def test_an_existing_one_needs_overwrite(self, tmp_path: Path) -> None:
        make(tmp_path / "out", OLD)
        with pytest.raises(UsageError, match="the destination exists") as caught:
            write(tmp_path / "out")
        assert caught.value.exit_code == 2 and "--overwrite" in (caught.value.hint or "")
        assert contents(tmp_path / "out") == OLD and os.listdir(tmp_path) == ["out"]

    def test_one_that_appears_meanwhile_is_not_replaced(self, tmp_path: Path) -> None:
        with (
            pytest.raises(UsageError, match="the destination exists"),
            Staging(tmp_path / "out", overwrite=False, total_bytes=1) as staging,
        ):
            staging.clear()
            make(tmp_path / "out", OLD)
            staging.commit()
        assert contents(tmp_path / "out") == OLD and os.listdir(tmp_path) == ["out"]

    def test_an_empty_folder_is_as_good_as_none(self, tmp_path: Path) -> None:
        (tmp_path / "out").mkdir()
        write(tmp_path / "out")
        assert contents(tmp_path / "out") == NEW

    def test_missing_parents_are_made(self, tmp_path: Path) -> None:
        write(tmp_path / "a" / "b" / "out")
        assert contents(tmp_path / "a" / "b" / "out") == NEW

    @pytest.mark.parametrize("kind", ["file", "link to a folder", "link to nothing"])
    def test_what_is_no_folder_is_never_replaced(self, tmp_path: Path, kind: str) -> None:
        out = tmp_path / "out"
        if kind == "file":
            out.write_bytes(b"mine")
        else:
            out.symlink_to(tmp_path / "target")
            if kind == "link to a folder":
                make(tmp_path / "target", OLD)
        with pytest.raises(UsageError, match="is not a folder"):
            write(out, overwrite=True)
        assert os.path.lexists(out) and not (tmp_path / ".out.ckpt-staging").exists()

    def test_a_mount_point_is_refused_at_the_start(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """A rename can't replace a mount point, and the error would come hours later."""
        (tmp_path / "out").mkdir()
        monkeypatch.setattr(os.path, "ismount", lambda path: Path(path) == tmp_path / "out")
        with pytest.raises(UsageError, match="mount point") as caught:
            write(tmp_path / "out")
        assert "-o" in (caught.value.hint or "")
        with pytest.raises(UsageError, match="root folder"):
            Staging(Path("/"), overwrite=True, total_bytes=1)

    def test_not_enough_space_is_said_before_the_first_byte(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        real = os.statvfs

        def nearly_full(path: Any) -> os.statvfs_result:
            found = list(real(path))
            found[1], found[4] = 512, 10  # 10 blocks with 512 bytes for users other than root
            return os.statvfs_result(found)

        monkeypatch.setattr(os, "statvfs", nearly_full)
        make(tmp_path / "out", OLD)
        with pytest.raises(StorageError, match="not enough space") as caught:
            write(tmp_path / "out", overwrite=True, total_bytes=5121)
        assert caught.value.exit_code == 7
        assert (caught.value.expected, caught.value.found) == ("5.12 kB", "5.12 kB free, 1 B too few")
        assert contents(tmp_path / "out") == OLD and os.listdir(tmp_path) == ["out"]
        write(tmp_path / "out", overwrite=True, total_bytes=5120)

    def test_what_a_killed_run_left_does_not_count_as_used(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        stale, real = tmp_path / ".out.ckpt-staging", os.statvfs
        make(stale, OLD)

        def full_of_it(path: Any) -> os.statvfs_result:
            found = list(real(path))
            found[4] = 0 if any(stale.iterdir()) else 100
            return os.statvfs_result(found)

        monkeypatch.setattr(os, "statvfs", full_of_it)
        write(tmp_path / "out")
        assert contents(tmp_path / "out") == NEW

    def test_a_folder_that_may_not_be_written(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        def denied(path: Any, *_: Any, **__: Any) -> None:
            raise PermissionError(errno.EACCES, "Permission denied", str(path))

        monkeypatch.setattr(os, "mkdir", denied)
        with pytest.raises(StorageError, match="Permission denied") as caught:
            write(tmp_path / "out")
        assert caught.value.path == str(tmp_path / "out")
        assert "-o" in str(caught.value.hint)

    def test_a_source_that_may_not_be_read(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """Another destination would not help."""

        def denied(path: Any, *_: Any, **__: Any) -> int:
            raise PermissionError(errno.EACCES, "Permission denied", str(path))

        monkeypatch.setattr(os, "open", denied)
        with files.OpenFiles() as sources, pytest.raises(StorageError, match="Permission denied") as caught:
            sources.descriptor(str(tmp_path / "model.safetensors"))
        assert caught.value.hint is None

    def test_a_link_in_the_place_of_the_staging_folder_is_not_followed(self, tmp_path: Path) -> None:
        """In a folder writable by others, a link could redirect the cleanup to someone else's files."""
        make(tmp_path / "precious", OLD)
        (tmp_path / ".out.ckpt-staging").symlink_to(tmp_path / "precious")
        with pytest.raises(StorageError):
            write(tmp_path / "out")
        (tmp_path / ".out.ckpt-staging").unlink()
        (tmp_path / ".out.ckpt-staging").symlink_to(tmp_path / "nothing")
        with pytest.raises(StorageError):
            write(tmp_path / "out")
        assert contents(tmp_path / "precious") == OLD

    def test_links_in_what_is_cleared_are_removed_and_not_followed(self, tmp_path: Path) -> None:
        make(tmp_path / "precious", OLD)
        stale = tmp_path / ".out.ckpt-staging"
        stale.mkdir()
        (stale / "link").symlink_to(tmp_path / "precious")
        make(stale, {"folder/file": b"x"})
        (stale / "folder" / "link").symlink_to(tmp_path / "precious")
        write(tmp_path / "out")
        assert contents(tmp_path / "precious") == OLD
        assert sorted(os.listdir(tmp_path)) == ["out", "precious"]

    def test_a_link_in_a_shared_staging_folder_is_not_followed(self, tmp_path: Path) -> None:
        make(tmp_path / "precious", OLD)
        stale = tmp_path / ".out.ckpt-staging"
        stale.mkdir()
        (stale / "model.bin").symlink_to(tmp_path / "precious" / "model.bin")
        with pytest.raises(UnsafeError, match="a symlink leads out") as caught:
            SharedStaging(tmp_path / "out").create("model.bin", len(OLD["model.bin"]))
        assert caught.value.path == str(stale / "model.bin")
        assert contents(tmp_path / "precious") == OLD


class TestOverlap:
    @pytest.mark.parametrize("destination", ["run", "run/out", "run/step/out", ".", "run/../run", "link", "link/out"])
    def test_with_the_source(self, tmp_path: Path, destination: str) -> None:
        make(tmp_path / "run", OLD)
        (tmp_path / "link").symlink_to(tmp_path / "run")
        with pytest.raises(UsageError, match="overlap") as caught:
            check_destination(tmp_path / destination, tmp_path / "run")
        assert caught.value.exit_code == 2
        with pytest.raises(UsageError, match="overlap"):
            check_destination(tmp_path / destination, tmp_path / "link")

    @pytest.mark.parametrize("destination", ["run-hf", "ru", "other/run", "link-hf", "elsewhere/out"])
    def test_beside_it_is_fine(self, tmp_path: Path, destination: str) -> None:
        make(tmp_path / "run", OLD)
        (tmp_path / "link-hf").symlink_to(tmp_path / "elsewhere")
        before = sorted(tmp_path.rglob("*"))
        check_destination(tmp_path / destination, tmp_path / "run")
        assert sorted(tmp_path.rglob("*")) == before  # asking makes nothing

    def test_a_parent_that_is_a_link_into_the_source(self, tmp_path: Path) -> None:
        make(tmp_path / "run" / "sub", OLD)
        (tmp_path / "away").symlink_to(tmp_path / "run" / "sub")
        with pytest.raises(UsageError, match="overlap"):
            check_destination(tmp_path / "away" / "out", tmp_path / "run")

    def test_a_source_that_is_a_file(self, tmp_path: Path) -> None:
        make(tmp_path, {"model.safetensors": b"x"})
        for overlapping in (tmp_path, tmp_path / "model.safetensors"):
            with pytest.raises(UsageError, match="overlap"):
                check_destination(overlapping, tmp_path / "model.safetensors")
        check_destination(tmp_path / "model.safetensors-hf", tmp_path / "model.safetensors")


class TestConfined:
    @pytest.mark.parametrize(
        "name",
        ["", "..", "../x", "a/../../x", "a/..", "/etc/passwd", "//x", "a\0b", "\ud800", "a/\udfff.bin"],
        ids=repr,
    )
    def test_names_that_lead_out(self, tmp_path: Path, name: str) -> None:
        with pytest.raises(UnsafeError, match="leads out") as caught:
            confined(tmp_path, name)
        assert caught.value.exit_code == 5
        assert str(caught.value).isprintable() or "\n" in str(caught.value)
        str(caught.value).encode()

    @pytest.mark.parametrize("name", ["a", "a/b", "./a", "a//b", "..a", "a..", "...", "a b", "é", "\udc80"])
    def test_names_that_do_not(self, tmp_path: Path, name: str) -> None:
        assert confined(tmp_path, name) == tmp_path / name

    def test_without_links_only_what_lies_below_the_root_is_looked_at(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        looked, lstat = [], os.lstat
        monkeypatch.setattr(os, "lstat", lambda path, **options: looked.append(str(path)) or lstat(path, **options))
        assert confined(tmp_path, "a/b") == tmp_path / "a" / "b"
        assert looked == [str(tmp_path / "a"), str(tmp_path / "a" / "b")]

    @pytest.mark.parametrize("target", ["/etc/passwd", "../outside", "../root-not", "sub/../../outside"])
    def test_links_that_lead_out(self, tmp_path: Path, target: str) -> None:
        root = tmp_path / "root"
        (root / "sub").mkdir(parents=True)
        (root / "link").symlink_to(target)
        (root / "folder").symlink_to(tmp_path)
        for name in ("link", "folder/x"):
            with pytest.raises(UnsafeError, match="symlink leads out") as caught:
                confined(root, name)
            assert caught.value.path == str(root / name) and caught.value.hint

    def test_links_that_stay(self, tmp_path: Path) -> None:
        root = tmp_path / "root"
        make(root, {"sub/a.bin": b"x"})
        (root / "link").symlink_to("sub/a.bin")
        (tmp_path / "root-link").symlink_to(root)
        assert confined(root, "link") == root / "link"
        assert confined(tmp_path / "root-link", "link") == tmp_path / "root-link" / "link"

    def test_the_cache_of_hugging_face(self, tmp_path: Path) -> None:
        entry = tmp_path / "models--org--name"
        root = entry / "snapshots" / "0123"
        make(entry, {"blobs/abcd": b"x"})
        (root / "sub").mkdir(parents=True)
        (root / "model.safetensors").symlink_to("../../blobs/abcd")
        (root / "sub" / "model.safetensors").symlink_to("../../../blobs/abcd")
        assert confined(root, "model.safetensors").read_bytes() == b"x"
        assert confined(root, "sub/model.safetensors").read_bytes() == b"x"
        assert confined(root / "sub", "model.safetensors").read_bytes() == b"x"
        make(tmp_path, {"models--org--other/blobs/abcd": b"y", "snapshots": b"", "blobs": b""})
        for number, target in enumerate(("../../../models--org--other/blobs/abcd", "../../refs", "../../../../blobs")):
            (root / f"link{number}").symlink_to(target)
            with pytest.raises(UnsafeError):
                confined(root, f"link{number}")

    def test_a_loop_of_links_is_no_way_out(self, tmp_path: Path) -> None:
        (tmp_path / "loop").symlink_to("loop")
        with pytest.raises(CorruptError), translate_os_errors():
            confined(tmp_path, "loop").open()


class TestErrors:
    def test_each_has_its_exit_code(self, tmp_path: Path) -> None:
        with pytest.raises(NotFoundError) as missing, translate_os_errors("shown where the error names nothing"):
            (tmp_path / "missing").open()
        assert (missing.value.exit_code, missing.value.path) == (3, str(tmp_path / "missing"))
        with pytest.raises(StorageError) as nameless, translate_os_errors("the file"):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        assert (nameless.value.exit_code, nameless.value.path) == (7, "the file")
        assert nameless.value.hint and "free some space" in nameless.value.hint
        with pytest.raises(StorageError) as bare, translate_os_errors():
            raise OSError("no number")
        assert (bare.value.what, bare.value.path, bare.value.hint) == ("no number", None, None)

    def test_others_pass(self) -> None:
        with pytest.raises(UsageError), translate_os_errors("x"):
            raise UsageError("as it was")


class TestOneFile:
    def test_it_is_there_as_a_whole(self, tmp_path: Path) -> None:
        write_file(tmp_path / "new" / "out.svg", b"content", overwrite=False)
        assert (tmp_path / "new" / "out.svg").read_bytes() == b"content"
        assert [path.name for path in (tmp_path / "new").iterdir()] == ["out.svg"]

    def test_one_that_exists_is_kept(self, tmp_path: Path) -> None:
        (tmp_path / "out.svg").symlink_to("nowhere")
        with pytest.raises(UsageError, match="exists"):
            write_file(tmp_path / "out.svg", b"content", overwrite=False)
        write_file(tmp_path / "out.svg", b"content", overwrite=True)
        assert not (tmp_path / "out.svg").is_symlink()

    def test_a_failure_leaves_what_was_there(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        path = tmp_path / "out.svg"
        path.write_bytes(b"old")
        monkeypatch.setattr(files, "sync", raise_no_space)
        with pytest.raises(StorageError):
            write_file(path, b"content", overwrite=True)
        assert path.read_bytes() == b"old"
        assert [entry.name for entry in tmp_path.iterdir()] == ["out.svg"]

    def test_a_folder_is_refused(self, tmp_path: Path) -> None:
        with pytest.raises(UsageError, match="folder"):
            write_file(tmp_path, b"content", overwrite=True)


def raise_no_space(descriptor: int) -> None:
    raise OSError(errno.ENOSPC, "No space left on device")


def test_a_source_whose_closing_fails_loses_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a network filesystem a thread died with a traceback, and the run did not notice."""
    for name in ("a", "b"):
        (tmp_path / name).touch()
    closed, close = [], os.close

    def failing(descriptor: int) -> None:
        closed.append(descriptor)
        close(descriptor)
        raise OSError(errno.EIO, "Input/output error")

    with files.OpenFiles() as sources:
        opened = {sources.descriptor(str(tmp_path / name)) for name in ("a", "b")}
        monkeypatch.setattr(os, "close", failing)
    monkeypatch.undo()
    assert set(closed) == opened


@pytest.mark.parametrize("name", [".out.ckpt-staging", ".out.ckpt-staging/model"])
def test_what_another_conversion_would_clear_is_no_destination(name: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="unfinished conversions, and may be cleared"):
        write(tmp_path / name)
    assert not os.listdir(tmp_path)
