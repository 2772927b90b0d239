"""`ckpt/run_folder/steps.py`: folders of steps and the files that say which one is the latest."""

from __future__ import annotations

from pathlib import Path

import pytest

from ckpt.run_folder.steps import (
    TITAN_STEP,
    TRAINER_STEP,
    enclosing_folders,
    recorded_step,
    step_folders,
    trainer_steps,
)

NAMES = ("checkpoint-9", "checkpoint-10", "step-3", "global_step_4", "iter_0000005", "epoch6", "step-seven", "runs")


@pytest.fixture
def run(tmp_path: Path) -> Path:
    for name in NAMES:
        (tmp_path / name).mkdir()
    (tmp_path / "step-99").write_text("no folder")
    return tmp_path


def test_steps_are_newest_first_by_their_numbers(run: Path) -> None:
    names = [folder.name for folder in step_folders(run)]
    assert names == ["checkpoint-10", "checkpoint-9", "epoch6", "iter_0000005", "global_step_4", "step-3"]
    assert [folder.name for folder in step_folders(run, TITAN_STEP)] == ["step-3"]
    assert step_folders(run, TRAINER_STEP) == trainer_steps(run) == [run / "checkpoint-10", run / "checkpoint-9"]
    assert trainer_steps(run, after=9) == [run / "checkpoint-10"]
    assert step_folders(run / "nowhere") == []


def test_files_of_a_run_stand_around_its_steps(run: Path) -> None:
    assert enclosing_folders(run / "checkpoint-9") == [run / "checkpoint-9", run]
    assert enclosing_folders(run / "runs") == [run / "runs"]


@pytest.mark.parametrize(
    ("content", "said"),
    [(b"global_step2", "global_step2"), (b" 100\n", "100"), (b"", ""), (b"\xff", "\N{REPLACEMENT CHARACTER}")],
)
def test_what_a_tracker_says(tmp_path: Path, content: bytes, said: str) -> None:
    (tmp_path / "latest").write_bytes(content)
    assert recorded_step(tmp_path / "latest") == said


def test_a_tracker_that_is_none_or_endless(tmp_path: Path) -> None:
    assert recorded_step(tmp_path / "latest") is None
    (tmp_path / "latest").mkdir()
    assert recorded_step(tmp_path / "latest") is None
    (tmp_path / "endless").write_text("9" * 1_000_000)
    assert len(recorded_step(tmp_path / "endless") or "") == 4096
