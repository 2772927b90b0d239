"""A folder's meaning for the trainer: its own run, another run, or a checkpoint for its engine."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch.distributed as dist

from tests.support.places import FIXTURES
from train import folders, launch
from train.config import Config, UserError
from train.operations.monitoring import require_free


@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make this process the only rank."""
    monkeypatch.setattr(dist, "get_rank", lambda: 0)
    monkeypatch.setattr(dist, "get_world_size", lambda: 1)
    monkeypatch.setattr(launch, "gather_objects", lambda mine: [mine])


@pytest.mark.parametrize("strategy", ["fsdp1", "fsdp2", "hsdp", "tp-fsdp"])
def test_dcp_of_other_ranks_is_loaded(strategy: str, alone: None) -> None:
    """DCP loads on any number of ranks, so `ckpt resume` returns the folder itself; the trainer refused it."""
    checkpoint = FIXTURES / "dcp-fsdp2" / "step-2"
    assert len(list(checkpoint.glob("__*_*.distcp"))) > 1
    config = Config(strategy=strategy, resume=str(checkpoint))
    assert folders.find_checkpoint(config) == (checkpoint.parent, checkpoint.name)


@pytest.mark.parametrize(
    ("left", "said"),
    [
        (["global_step4/", "latest"], "global_step4, latest"),
        (["step-2/", "step-4/", "step-6/", "metrics.jsonl"], "step-4, step-6 there"),
        (["checkpoint-8/"], "checkpoint-8"),
        (["iter_0000004/", "latest_checkpointed_iteration.txt"], "iter_0000004, latest_chec"),
    ],
)
def test_a_new_run_is_not_mixed_with_another(left: list[str], said: str, tmp_path: Path, alone: None) -> None:
    """It overwrote the other run's checkpoints and continued its log, in silence."""
    for name in left:
        (tmp_path / name).mkdir() if name.endswith("/") else (tmp_path / name).touch()
    with pytest.raises(UserError) as caught:
        require_free(Config(output=str(tmp_path)))
    assert f"--output {tmp_path}: a run has left {said}" in str(caught.value)
    assert f"\nhint: use --resume {tmp_path} to continue" in str(caught.value)
    require_free(Config(output=str(tmp_path), resume=str(tmp_path)))


def test_other_files_are_no_run(tmp_path: Path, alone: None) -> None:
    """A log without any checkpoint is no run either, for example after an early failure."""
    for name in ("README.md", "metrics.jsonl", "config.json", "heartbeats/", "truth/", "outputs/step-4/"):
        (tmp_path / name).mkdir(parents=True) if name.endswith("/") else (tmp_path / name).touch()
    require_free(Config(output=str(tmp_path)))
    require_free(Config(output=str(tmp_path / "none")))
