"""`ckpt/commands/clean/cleaning.py`, `ckpt/commands/resume/copies.py`: removal of ckpt's leftovers around a run."""

from __future__ import annotations

import fcntl
import json
import os
import pty
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import ckpt
from ckpt.commands.clean.cleaning import Cleaned
from ckpt.errors import NotFoundError
from tests.support.commands import ckpt as run_ckpt
from tests.support.places import FIXTURES


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """Copy an HF Trainer run under ZeRO-2 with steps 1 and 2."""
    return shutil.copytree(FIXTURES / "trainer-zero2", tmp_path / "run", ignore=shutil.ignore_patterns("truth"))


def content(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


def names(found: Cleaned, *, kept: bool) -> list[str]:
    return [Path(one.path).name for one in found.leftovers if one.is_kept is kept]


def test_clean_of_a_run_without_leftovers_removes_nothing(run: Path) -> None:
    before = content(run)
    assert ckpt.clean(run).leftovers == () and str(ckpt.clean(run).remove()) == "nothing to remove"
    assert content(run) == before
    with pytest.raises(NotFoundError):
        ckpt.clean(run / "no")


@pytest.mark.parametrize("asked", ["", "checkpoint-2", "checkpoint-2/global_step2"])
def test_clean_removes_a_staging_folder(run: Path, asked: str) -> None:
    ckpt.convert(run, "hf", run.parent / "run-hf")
    for staging in (run.parent / ".run-full.ckpt-staging", run / ".view.ckpt-staging"):
        staging.mkdir()
        (staging / "model.bin").write_bytes(bytes(10_000))
    before = content(run / "checkpoint-2"), content(run.parent / "run-hf")
    found = ckpt.clean(run / asked)
    assert names(found, kept=False) == [".run-full.ckpt-staging", ".view.ckpt-staging"] and found.num_bytes >= 20_000
    done = found.remove()
    assert sorted(done.removed) == sorted(one.path for one in found.leftovers) and "2 folders" in str(done)
    assert not list(run.parent.glob("**/.*ckpt-staging"))
    assert (content(run / "checkpoint-2"), content(run.parent / "run-hf")) == before


def test_clean_leaves_a_staging_folder_of_a_living_process(run: Path) -> None:
    staging = run.parent / ".run-hf.ckpt-staging"
    staging.mkdir()
    (staging / "model.safetensors").write_bytes(b"x")
    lock = os.open(staging, os.O_RDONLY)
    fcntl.flock(lock, fcntl.LOCK_EX)
    done = ckpt.clean(run).remove()
    assert done.removed == () and names(done, kept=True) == [staging.name] and staging.is_dir()
    assert "another process is writing" in done.leftovers[0].why
    os.close(lock)
    assert ckpt.clean(run).remove().removed == (str(staging),)


def test_clean_restores_an_output_whose_replacement_was_interrupted(run: Path) -> None:
    ckpt.convert(run, "hf", run.parent / "run-hf")
    before = content(run.parent / "run-hf")
    (run.parent / "run-hf").rename(run.parent / ".run-hf.ckpt-old")
    assert "restored" in ckpt.clean(run).leftovers[0].why
    ckpt.clean(run).remove()
    assert content(run.parent / "run-hf") == before


def resumed(run: Path, step: int) -> Path:
    """Resume a step on three ranks and return the copy."""
    return Path(ckpt.resume(run, world_size=3, tag=f"checkpoint-{step}", say=lambda _: None))


def test_clean_keeps_the_copy_that_the_next_resume_uses(run: Path) -> None:
    first, second = resumed(run, 1), resumed(run, 2)
    if not first.exists():  # resume itself removed it
        first = resumed(run, 1)
    done = ckpt.clean(run).remove()
    assert [Path(path).name for path in done.removed] == [first.name] and not first.exists()
    assert names(done, kept=True) == [second.name] and second.is_dir()
    assert "step 2 of the run is newer" in str(done) and "the next `ckpt resume` uses it" in str(done)
    assert resumed(run, 2) == second


def test_clean_keeps_the_only_copy_of_a_lost_step(run: Path) -> None:
    copy = resumed(run, 2)
    shutil.rmtree(run / "checkpoint-2")
    found = ckpt.clean(run)
    assert names(found, kept=True) == [copy.name] and "only copy of step 2" in found.leftovers[0].why
    shutil.rmtree(run / "checkpoint-1")
    found = ckpt.clean(run)
    assert names(found, kept=True) == [copy.name] and "no complete checkpoint" in found.leftovers[0].why
    assert found.remove().removed == () and copy.is_dir()


@pytest.fixture
def converted(run: Path) -> Iterator[tuple[Path, Path]]:
    """Convert both steps to their default outputs."""
    places = run.parent / "run-checkpoint-1-hf", run.parent / "run-checkpoint-2-hf"
    for step, place in enumerate(places, 1):
        ckpt.convert(run / f"checkpoint-{step}", "hf", place)
    yield places


def test_clean_removes_a_conversion_that_a_newer_one_replaces(run: Path, converted: tuple[Path, Path]) -> None:
    older, newer = converted
    other = run.parent / "runs-checkpoint-1-hf"
    shutil.copytree(older, other)  # another run's, by its name
    done = ckpt.clean(run).remove()
    assert done.removed == (str(older),) and not older.exists()
    assert newer.is_dir() and other.is_dir() and (run / "checkpoint-1").is_dir()


def test_clean_removes_older_outputs_of_the_callback(run: Path, converted: tuple[Path, Path]) -> None:
    (run.parent / "run-hf").mkdir()
    for step, place in enumerate(converted, 1):
        place.rename(run.parent / f"run-hf/checkpoint-{step}")
    assert ckpt.clean(run).remove().removed == (str(run.parent / "run-hf/checkpoint-1"),)


def test_clean_leaves_conversions_of_a_run_whose_name_begins_alike(run: Path, converted: tuple[Path, Path]) -> None:
    for place in converted:  # from the deleted run `run-2`
        place.rename(run.parent / place.name.replace("run-", "run-2-"))
    assert ckpt.clean(run).leftovers == ()


@pytest.mark.parametrize("lost", ["weights cut", "no weights", "empty folder"])
def test_clean_keeps_the_conversion_of_a_damaged_step(run: Path, converted: tuple[Path, Path], lost: str) -> None:
    step = run / "checkpoint-1"
    if lost == "weights cut":
        os.truncate(next(step.glob("global_step1/*optim_states.pt")), 1000)
        for file in step.glob("model*.safetensors"):
            os.truncate(file, 1000)
    elif lost == "no weights":
        for file in [*step.rglob("*.pt"), *step.glob("model*.safetensors")]:
            file.unlink()
    else:
        shutil.rmtree(step)
        step.mkdir()
    found = ckpt.clean(run)
    assert names(found, kept=True) == [converted[0].name] and "only copy" in found.leftovers[0].why


@pytest.mark.parametrize("change", ["file added", "byte changed", "step lost", "newer one damaged", "a link"])
def test_clean_keeps_a_conversion_that_may_be_missed(run: Path, converted: tuple[Path, Path], change: str) -> None:
    older, newer = converted
    if change == "file added":
        (older / "notes.txt").write_text("mine")
    elif change == "byte changed":
        (older / "config.json").write_text((older / "config.json").read_text().replace("{", "{ ", 1))
    elif change == "step lost":
        shutil.rmtree(run / "checkpoint-1")
    elif change == "newer one damaged":
        os.truncate(newer / "model.safetensors", 100)
    else:
        older.rename(run.parent / "elsewhere")
        older.symlink_to(run.parent / "elsewhere")
    assert ckpt.clean(run).remove().removed == () and (older / "model.safetensors").is_file()


def test_clean_asks_before_it_removes(run: Path, converted: tuple[Path, Path]) -> None:
    listed = run_ckpt("clean", run)
    assert listed.code == 0 and listed.out.startswith(f"remove: {converted[0]} (conversion, "), listed
    assert listed.err == "nothing was removed; use --yes to remove without being asked\n" and converted[0].is_dir()
    done = run_ckpt("clean", run, "--yes", "--json")
    assert done.code == 0 and [one["removed"] for one in json.loads(done.out)["leftovers"]] == [True]
    assert not converted[0].exists()
    assert run_ckpt("clean", run, "--yes").out == "nothing to remove\n"


def test_clean_takes_the_answer_of_a_terminal(run: Path, converted: tuple[Path, Path]) -> None:
    for answer, is_there in ((b"n\n", True), (b"y\n", False)):
        controller, terminal = pty.openpty()
        os.write(controller, answer)
        words = [sys.executable, "-m", "ckpt", "clean", str(run)]
        done = subprocess.run(words, stdin=terminal, stderr=terminal, stdout=subprocess.DEVNULL, check=False)
        os.close(controller)
        os.close(terminal)
        assert done.returncode == 0 and converted[0].exists() is is_there
