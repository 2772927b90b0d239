"""What a folder holds for the trainer: a run of its own, another's, or a checkpoint that its engine takes."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch.distributed as dist

from tests.support.places import FIXTURES
from train import folders, operations
from train.config import Config, UserError


@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """This process is the only rank."""
    monkeypatch.setattr(dist, "get_rank", lambda: 0)
    monkeypatch.setattr(dist, "get_world_size", lambda: 1)
    monkeypatch.setattr(dist, "broadcast_object_list", lambda *_: None)


@pytest.mark.parametrize("strategy", ["fsdp1", "fsdp2", "hsdp", "tp-fsdp"])
def test_dcp_of_other_ranks_is_loaded(strategy: str, alone: None) -> None:
    """DCP loads on any number of ranks, so `ckpt resume` gives it as it is; the trainer refused it."""
    checkpoint = FIXTURES / "dcp-fsdp2" / "step-2"
    assert len(list(checkpoint.glob("__*_*.distcp"))) > 1
    config = Config(strategy=strategy, resume=str(checkpoint))
    assert folders.find_checkpoint(config) == (checkpoint.parent, checkpoint.name)


def test_zero_of_other_ranks_is_refused_with_the_command_that_helps(alone: None) -> None:
    run = FIXTURES / "toy-zero3"
    with pytest.raises(UserError) as caught:
        folders.find_checkpoint(Config(strategy="zero3", resume=str(run)))
    assert str(caught.value).endswith(f"hint: ckpt convert zero3 zero3 {run} --world-size 1")


@pytest.mark.parametrize(
    ("left", "said", "hint"),
    [
        (["global_step4/", "latest"], "global_step4, latest", "--resume {} goes on"),
        (["step-2/", "step-4/", "step-6/", "metrics.jsonl"], "step-4, step-6, metrics.jsonl", "--resume {} goes on"),
        (["checkpoint-8/"], "checkpoint-8", "--resume {} goes on"),
        (["iter_0000004/", "latest_checkpointed_iteration.txt"], "iter_0000004, latest_chec", "--resume {} goes on"),
        (["metrics.jsonl"], "metrics.jsonl", "--resume auto goes on"),  # it has saved nothing, and auto begins
    ],
)
def test_a_new_run_is_not_mixed_with_another(
    left: list[str], said: str, hint: str, tmp_path: Path, alone: None
) -> None:
    """It overwrote the other's checkpoints and went on writing its log, without a word."""
    for name in left:
        (tmp_path / name).mkdir() if name.endswith("/") else (tmp_path / name).touch()
    with pytest.raises(UserError) as caught:
        operations.resolve(Config(output=str(tmp_path)))
    assert f"--output {tmp_path}: a run has left {said}" in str(caught.value)
    assert f"\nhint: {hint.format(tmp_path)}" in str(caught.value)
    for resume in ("auto", str(tmp_path)):
        operations.resolve(Config(output=str(tmp_path), resume=resume))


def test_other_files_are_no_run(tmp_path: Path, alone: None) -> None:
    for name in ("README.md", "config.json", "heartbeats/", "truth/", "outputs/step-4/"):
        (tmp_path / name).mkdir(parents=True) if name.endswith("/") else (tmp_path / name).touch()
    operations.resolve(Config(output=str(tmp_path)))
    operations.resolve(Config(output=str(tmp_path / "none")))
