"""`ckpt/compare/training.py`, `skipped_content.py`: `ckpt verify --run`: two runs' records beside their tensors."""

from __future__ import annotations

import json
import random
import shutil
from pathlib import Path

import pytest
import torch

from tests.support.commands import ckpt
from tests.support.model_files import rewriting

STEP = "checkpoint-2"


@pytest.fixture
def runs(fixtures: Path, tmp_path: Path) -> tuple[Path, Path]:
    """Copy the same HF Trainer run under ZeRO-2 twice."""
    for name in ("a", "b"):
        shutil.copytree(fixtures / "trainer-zero2", tmp_path / name)
    return tmp_path / "a", tmp_path / "b"


def test_the_same_run(runs: tuple[Path, Path]) -> None:
    done = ckpt("verify", "--run", *runs)
    assert done.code == 0
    assert done.out.startswith("equal: ") and done.out.endswith(" values in the training state equal\n")


def test_another_step(runs: tuple[Path, Path]) -> None:
    done = ckpt("verify", "--run", runs[0] / "checkpoint-1", runs[1] / STEP)
    assert done.code == 1
    assert done.out.splitlines()[:-1] == [
        "differs  step: 1 and 2",
        "differs  sequences: 24 and 48",
        "differs  param_groups[0].lr: 0.0001 and 0.0006678367782143116",
        "differs  param_groups[1].lr: 5e-05 and 0.0003339183891071558",
        "differs  scalars.step: 1.0 and 2.0",
        "differs  lr_scheduler.last_batch_iteration: 0 and 1",
        "differs  global_samples: 24 and 48",
    ]
    assert done.out.splitlines()[-1].startswith("different: 7 values in the training state, ")


def test_random_states_and_schedules_beside_the_checkpoint(runs: tuple[Path, Path]) -> None:
    file = runs[1] / STEP / "rng_state_1.pth"
    with rewriting(file) as states:
        states["cpu"][0] ^= 1
        states["python"] = random.Random(5).getstate()
    torch.save({"last_epoch": 2}, runs[1] / STEP / "scheduler.pt")
    done = ckpt("verify", "--run", "--json", *runs)
    assert done.code == 1
    found = {one["name"]: (one["a"], one["b"]) for one in json.loads(done.out)["differences"]}
    assert set(found) == {"rng_state_1.pth.cpu", "rng_state_1.pth.python[1]", "scheduler.pt.last_epoch"}
    assert all(text.startswith("uint8 [5056] ") for text in found["rng_state_1.pth.cpu"])
    assert found["scheduler.pt.last_epoch"] == (None, "2")


def test_what_the_bundled_trainer_recorded(runs: tuple[Path, Path]) -> None:
    record = {"version": 1, "step": 2, "files": {"x": 1}, "checkpoint": "a"}
    for run, dropout in zip(runs, (0.1, 0.0), strict=True):
        (run / "records").mkdir()
        facts = record | {
            "checkpoint": run.name,
            "settings": {"dtype": "bf16"},
            "ranks": [{"dropout": {"p": [dropout]}}],
        }
        (run / "records" / "step-2.json").write_text(json.dumps(facts))
    done = ckpt("verify", "--run", *runs)
    assert (done.code, done.out.splitlines()[0]) == (1, "differs  record.ranks[0].dropout.p[0]: 0.1 and 0.0")
    assert done.out.splitlines()[1].startswith("different: 1 value in the training state, ")


def test_no_state_at_all_is_not_equal(runs: tuple[Path, Path], tmp_path: Path) -> None:
    weights = tmp_path / "weights"
    assert ckpt("convert", "zero2", "hf", runs[0], "-o", weights).code == 0
    done = ckpt("verify", "--run", weights, weights)
    assert (done.code, done.out) == (1, "different: neither run recorded a training state\n")


def test_two_are_needed_and_one_kind_of_comparison(runs: tuple[Path, Path]) -> None:
    for words in (["--run", runs[0]], ["--run", "--loads", runs[0]], ["--run", "--cast", *runs]):
        assert ckpt("verify", *words).code == 2, words
