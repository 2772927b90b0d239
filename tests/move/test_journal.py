"""`ckpt/move/journal.py`: killed conversions continue, with the bytes to move again and to check."""

from __future__ import annotations

import os
import random
import shutil
import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from filecmp import dircmp
from pathlib import Path
from typing import Any

import pytest

import ckpt
from ckpt.errors import CorruptError, UsageError
from ckpt.move import blocks, journal
from ckpt.move.files import staging_folder
from ckpt.move.journal import JOURNAL
from ckpt.move.run import execute
from ckpt.move.workers import FileDigests, Resources
from ckpt.plan.checkpoint import Checkpoint, Slot, SourceFile, Target, TargetFile
from ckpt.plan.dtypes import BY_NAME
from ckpt.plan.planner import Plan, make_plan
from ckpt.plan.tensors import Extent, Tensor, Whole, whole
from tests.support.killing import in_small_process, killed_before_call
from tests.support.moving import Case, listing, make_case

UINT8 = BY_NAME["uint8"]
SOURCE = random.Random(3).randbytes(200 << 17)
pytestmark = pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")


def run(
    plan: Plan, out: Path, *, restart: bool = False, kill_at: float = 2.0, num_lines: int = 0
) -> tuple[int, FileDigests]:
    """Return the number of bytes already there, and the digests.

    Kill the process after the fraction `kill_at` is moved or after `num_lines` in the journal.
    """
    digests, moved = [], [0]

    def progress(count: int) -> None:
        moved[0] += count
        if moved[0] < kill_at * plan.moved_bytes:
            return
        while num_lines and sum(map(bool, (staging_folder(out) / JOURNAL).read_bytes().splitlines())) < num_lines:
            time.sleep(0.001)
        os.kill(os.getpid(), signal.SIGKILL)

    def describe(_: Path, found: FileDigests) -> dict[str, bytes]:
        digests.append(found)
        return {}

    resources = Resources(workers=2)
    done = execute(plan, out, restart=restart, resources=resources, progress=progress, describe=describe)
    assert moved[0] == plan.moved_bytes
    return done, digests[0]


def killed(action: Callable[[], object]) -> None:
    child = os.fork()
    if not child:
        try:
            action()
        finally:
            os._exit(1)
    assert os.WTERMSIG(os.waitpid(child, 0)[1]) == signal.SIGKILL


def many_tensors(folder: Path) -> Plan:
    """Plan 200 tensors from one file to 4 files."""
    (folder / "source.bin").write_bytes(SOURCE)
    size, tensors, files = len(SOURCE) // 200, {}, []
    for number in range(4):
        slots = []
        for place in range(50):
            key, at = (f"w{50 * number + place}", "weight"), (50 * number + place) * size
            stored = Extent.contiguous(str(folder / "source.bin"), at, UINT8, (size,))
            tensors[key] = Tensor(*key, UINT8, (size,), Whole(stored))
            extent = Extent.contiguous(f"out{number}.bin", place * size, UINT8, (size,))
            slots.append(Slot(key, whole((size,)), extent))
        files.append(TargetFile(f"out{number}.bin", 50 * size, slots=tuple(slots)))
    seen = (SourceFile.stat(str(folder / "source.bin")),)
    return make_plan(Checkpoint(str(folder / "source.bin"), "test", tensors, seen), Target(tuple(files)))


@pytest.fixture
def case(tmp_path: Path) -> Case:
    """Kill a conversion after half its bytes."""
    case = make_case(tmp_path / "source", num_files=10, rows=5000)
    killed(lambda: run(case.plan, tmp_path / "out", kill_at=0.5, num_lines=21))
    return case


class TestGoingOn:
    @pytest.mark.parametrize(("kill_at", "num_lines", "at_most"), [(0.5, 94, 0.55), (0.9, 177, 0.12)])
    def test_killed_and_given_again_it_moves_little_more_than_the_rest(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kill_at: float, num_lines: int, at_most: float
    ) -> None:
        """Only the tensors in flight are lost, here with 200 tensors like a real model."""
        # Small relative to these tensors, like the real value.
        monkeypatch.setattr(blocks, "_BATCH", len(SOURCE) // 200)
        plan, moved = many_tensors(tmp_path), [0]
        killed(lambda: run(plan, tmp_path / "out", kill_at=kill_at, num_lines=num_lines))
        carry_out = blocks.SpanBatch.carry_out

        def counted(batch: blocks.SpanBatch, *arguments: Any) -> Iterator[int]:
            for size in carry_out(batch, *arguments):
                moved[0] += size
                yield size

        monkeypatch.setattr(blocks.SpanBatch, "carry_out", counted)
        done, _ = run(plan, tmp_path / "out")
        assert moved[0] == plan.moved_bytes - done <= at_most * plan.moved_bytes
        assert b"".join(path.read_bytes() for path in sorted((tmp_path / "out").iterdir())) == SOURCE

    def test_it_is_as_if_it_had_not_been_killed(self, tmp_path: Path, case: Case) -> None:
        done, digests = run(case.plan, tmp_path / "out")
        assert 0.3 * case.plan.moved_bytes < done < 0.5 * case.plan.moved_bytes
        case.assert_written(tmp_path / "out")
        assert listing(tmp_path) == ["out", "source"]
        assert digests == run(case.plan, tmp_path / "unbroken", restart=True)[1]

    @in_small_process
    def test_killed_before_every_call(self, tmp_path: Path) -> None:
        case, out, number, partly = make_case(tmp_path / "source", num_files=2, rows=8), tmp_path / "out", 1, 0
        while killed_before_call(number, lambda: run(case.plan, out)):
            if not out.exists():
                done, _ = run(case.plan, out)
                partly += 0 < done < case.plan.moved_bytes
            case.assert_written(out)
            assert listing(tmp_path) == ["out", "source"], f"killed before call {number}"
            shutil.rmtree(out)
            number += 1
        assert number > 40 and partly > 5

    def test_what_is_not_as_it_was_written_is_written_again(self, tmp_path: Path, case: Case) -> None:
        staging = staging_folder(tmp_path / "out")
        journal = (staging / JOURNAL).read_bytes()
        (staging / JOURNAL).write_bytes(journal[:-20] + b"\0\0\0")  # its end was not written
        (staging / "ckpt-manifest.json").write_bytes(b"half of a man")
        written = staging / "out0.bin"
        written.write_bytes(bytes(len(written.read_bytes())))
        done, _ = run(case.plan, tmp_path / "out")
        # four tenths were moved and the fifth was under way: one is lost
        assert 0.25 * case.plan.moved_bytes < done < 0.45 * case.plan.moved_bytes
        case.assert_written(tmp_path / "out")

    def test_a_journal_without_its_header_says_nothing(self, tmp_path: Path, case: Case) -> None:
        """It may belong to another conversion: here the source has changed, too."""
        path = staging_folder(tmp_path / "out") / JOURNAL
        path.write_bytes(path.read_bytes().replace(b"version", b"version\xff", 1))
        case.sources[1].write_bytes(case.sources[1].read_bytes()[::-1])
        seen = tuple(SourceFile.stat(str(path)) for path in case.sources)
        changed = replace(case.plan, checkpoint=replace(case.plan.checkpoint, files=seen))
        assert run(changed, tmp_path / "out")[0] == 0
        run(changed, tmp_path / "unbroken", restart=True)
        assert not dircmp(tmp_path / "out", tmp_path / "unbroken").diff_files

    def test_without_it_nothing_is_taken_over(self, tmp_path: Path, case: Case) -> None:
        assert run(case.plan, tmp_path / "out", restart=True)[0] == 0
        case.assert_written(tmp_path / "out")

    def test_it_is_kept_when_it_fails_again(self, tmp_path: Path, case: Case) -> None:
        def fail(_: int) -> None:
            raise ZeroDivisionError

        with pytest.raises(ZeroDivisionError):
            execute(case.plan, tmp_path / "out", progress=fail)
        assert run(case.plan, tmp_path / "out")[0] > 0.3 * case.plan.moved_bytes


class TestRefused:
    def test_a_source_that_has_changed(self, tmp_path: Path, case: Case) -> None:
        """The file was rewritten in place with its old mtime; its ctime differs."""
        victim = case.sources[1]
        before = victim.stat()
        victim.write_bytes(victim.read_bytes()[::-1])
        os.utime(victim, ns=(before.st_atime_ns, before.st_mtime_ns))
        seen = tuple(SourceFile.stat(str(path)) for path in case.sources)
        changed = replace(case.plan, checkpoint=replace(case.plan.checkpoint, files=seen))
        with pytest.raises(CorruptError, match="the source has changed") as caught:
            run(changed, tmp_path / "out")
        assert caught.value.path == str(victim) and "restart=True to discard" in str(caught.value)
        assert staging_folder(tmp_path / "out").exists() and not (tmp_path / "out").exists()

    def test_another_version(self, tmp_path: Path, case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(journal, "__version__", "99.0")
        with pytest.raises(UsageError, match="another version of ckpt") as caught:
            run(case.plan, tmp_path / "out")
        assert caught.value.expected == "99.0" and caught.value.found == ckpt.__version__
        assert staging_folder(tmp_path / "out").exists() and not (tmp_path / "out").exists()

    def test_another_conversion(self, tmp_path: Path, case: Case) -> None:
        other = make_case(tmp_path / "source", num_files=10, rows=5000)
        file = replace(other.plan.target.files[0], literals=((0, b"HEADER 0: "),))
        plan = replace(other.plan, target=replace(other.plan.target, files=(file, *case.plan.target.files[1:])))
        checkpoint = replace(plan.checkpoint, files=case.plan.checkpoint.files)
        with pytest.raises(UsageError, match="has other options or another source"):
            run(replace(plan, checkpoint=checkpoint), tmp_path / "out")
