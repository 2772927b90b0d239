"""`ckpt/runs/selection.py`, `unread_files.py`: a tensor file next to a step is not the run's model."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch

import ckpt
from ckpt.errors import LossError

STRAYS = ("value_head.bin", "reward_head.pth", "optimizer_1.bin", "final.pt")


@pytest.mark.parametrize("name", STRAYS)
@pytest.mark.parametrize("kind", ["toy-zero2", "dcp-fsdp2", "verl-fsdp1", "trainer-plain"])
def test_a_stray_file_next_to_steps_is_named_and_not_taken(
    fixtures: Path, tmp_path: Path, kind: str, name: str
) -> None:
    run = shutil.copytree(fixtures / kind, tmp_path / "run", ignore=shutil.ignore_patterns("truth"))
    before = ckpt.open(run).path
    torch.save({"head.weight": torch.ones(3, 2)}, run / name)
    assert ckpt.open(run).path == before
    said: list[str] = []
    ckpt.resume(run, say=said.append)
    assert name in "\n".join(said) and name in str(ckpt.check(run)) and name in str(ckpt.inspect(run))
    (run / name).rename(run / "pytorch_model.bin")
    assert ckpt.open(run).path == (before if kind == "toy-zero2" else str(run)), "a final model has a usual name"


def test_a_single_file_of_any_name_is_a_model(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    torch.save({"head.weight": torch.ones(3, 2)}, tmp_path / "run/final.pt")
    assert ckpt.open(tmp_path / "run").shapes == {"head.weight": (3, 2)} and ckpt.check(tmp_path / "run").whole


def test_resume_refuses_a_zero_step_without_the_optimizers_files(fixtures: Path, tmp_path: Path) -> None:
    """Alone, the model file from ZeRO-1 or 2 looks like stage 0, but it records the stage."""
    run = shutil.copytree(fixtures / "toy-zero2", tmp_path / "run", ignore=shutil.ignore_patterns("truth"))
    assert ckpt.check(run).whole and ckpt.resume(run, say=lambda _: None) == str(run)
    for file in run.glob("*/*_optim_states.pt"):
        file.unlink()
    report = ckpt.check(run)
    assert not report.whole and "(*_optim_states.pt) are missing: the run used ZeRO stage 2" in str(report)
    with pytest.raises(LossError):
        ckpt.resume(run, say=lambda _: None)
    assert len(ckpt.plan(run, "hf").files) == 1, "the model alone can be converted"
    assert ckpt.check(fixtures / "toy-zero0").whole
