"""`ckpt/runs/steps.py`: step folders, and records that name the latest step."""

from __future__ import annotations

from pathlib import Path

import pytest

from ckpt.runs.steps import Run, enclosing_folders, recorded_step, run_at, step_number, trainer_steps

NAMES = ("checkpoint-9", "checkpoint-10", "step-3", "global_step_4", "iter_0000005", "epoch6", "step-seven", "runs")


@pytest.fixture
def run(tmp_path: Path) -> Path:
    for name in NAMES:
        (tmp_path / name).mkdir()
    (tmp_path / "step-99").write_text("no folder")
    return tmp_path


def names(run: Run) -> list[str]:
    return [run.name(step.path) for step in run.steps]


def test_steps_are_newest_first_by_their_numbers(run: Path) -> None:
    assert names(run_at(run)) == [
        *("checkpoint-10", "checkpoint-9", "epoch6", "iter_0000005", "global_step_4", "step-3")
    ]
    assert trainer_steps(run) == [run / "checkpoint-10", run / "checkpoint-9"]
    assert run_at(run / "nowhere").steps == ()


#: Trainers' names for steps, with the step number.
SAVED = {
    "checkpoint-500": 500,
    "checkpoint_3": 3,
    "checkpoint_000007": 7,
    "global_step40": 40,
    "global_step_40": 40,
    "step-8": 8,
    "step_8": 8,
    "step8": 8,
    "iter_0000100": 100,
    "epoch_2": 2,
    "epoch=0-step=12.ckpt": 12,
    "epoch=1-step=12-v1.ckpt": 12,
    "epoch=3-val_loss=0.25-step=90.ckpt": 90,
    "gpt--val_loss=5.26-step=10-consumed_samples=80.0-last": 10,
    "epoch_0_step_100": 100,
    "epoch-0_step-100": 100,
    "epoch1epochstep5globalstep9": 9,
    "ep0-ba100": 100,
    "checkpoint-best": None,
    "step-seven": None,
    "last": None,
    "epoch=0-step=12-EMA.ckpt": None,
    "tmp-checkpoint-5": None,
    "checkpoint-5-hf": None,
    "pytorch_model_1": None,
    "005000": None,
}


@pytest.mark.parametrize("name", SAVED)
def test_the_number_of_a_step_is_in_its_name(name: str) -> None:
    assert step_number(name) == SAVED[name]


@pytest.mark.parametrize(
    ("inside", "expected"),
    [
        ("checkpoint/step-5/.metadata", ["checkpoint/step-5"]),
        ("checkpoints/checkpoint_3/model.safetensors", ["checkpoints/checkpoint_3"]),
        ("checkpoints/005000/pretrained_model/config.json", ["checkpoints/005000"]),
        ("005000/pretrained_model/config.json", ["005000"]),
        ("checkpoints/epoch=0-step=2.ckpt", ["checkpoints/epoch=0-step=2.ckpt"]),
        ("epoch=0-step=2.ckpt/meta.pt", ["epoch=0-step=2.ckpt"]),
        ("2024/logs/events", []),
        ("logs/checkpoint-5/events", []),
    ],
)
def test_steps_lie_in_the_folder_or_in_its_folder_of_steps(inside: str, expected: list[str], tmp_path: Path) -> None:
    (tmp_path / inside).parent.mkdir(parents=True)
    (tmp_path / inside).touch()
    assert names(run_at(tmp_path)) == expected


def test_at_equal_numbers_the_step_with_the_trainers_record_comes_first(tmp_path: Path) -> None:
    for name in ("global_step4", "checkpoint-4", "step_4"):
        (tmp_path / name).mkdir()
    (tmp_path / "checkpoint-4/trainer_state.json").write_text("{}")
    assert names(run_at(tmp_path)) == ["checkpoint-4", "step_4", "global_step4"]


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
