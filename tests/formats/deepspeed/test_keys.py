"""`converters/deepspeed/keys.py`: the table of entries matches the files of DeepSpeed and ckpt."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import ckpt
from ckpt.containers.torchfile import read as torchfile
from ckpt.plan.checkpoint import Layout
from converters.deepspeed.keys import MODEL_FILE, OPTIMIZER_FILE, OPTIMIZER_STATE
from tests.support.building import write_stage2, write_stage3

TOYS = ("toy-zero1", "toy-zero2", "toy-zero3", "trainer-zero2", "lora-zero3", "moe-zero3")


def assert_known(step: Path) -> None:
    for path in step.rglob("*_model_states.pt"):
        content = torchfile.read(path).root
        assert set(content) - MODEL_FILE <= {"client_state", "train_state", "rng"}, path
    for path in step.rglob("*_optim_states.pt"):
        content = torchfile.read(path).root
        assert set(content["optimizer_state_dict"]) <= OPTIMIZER_FILE | set(OPTIMIZER_STATE), path


@pytest.mark.parametrize("toy", TOYS)
def test_what_deepspeed_writes_is_in_the_table(fixtures: Path, toy: str) -> None:
    assert_known(fixtures / toy)


@pytest.mark.parametrize("target", ["zero1", "zero2", "zero3", "universal"])
def test_what_is_written_is_in_the_table(fixtures: Path, tmp_path: Path, target: str) -> None:
    ckpt.plan(ckpt.open(fixtures / "lora-zero3"), target).run(tmp_path / "out")
    assert_known(tmp_path / "out")


@pytest.mark.parametrize("target", ["zero2", "zero3"])
def test_weights_alone_record_no_frozen_parameters(fixtures: Path, tmp_path: Path, target: str) -> None:
    """The engine rejects a dict that lacks parameters it will freeze (engine.py, `load_module_state_dict`)."""
    ckpt.plan(ckpt.open(fixtures / "trl-zero3/outputs/qwen3-sft"), "hf").run(tmp_path / "model")
    ckpt.plan(ckpt.open(tmp_path / "model"), target, Layout(world_size=2)).run(tmp_path / "out")
    (path, *_) = (tmp_path / "out").rglob("*_model_states.pt")
    assert torchfile.read(path).root.keys() & {"frozen_param_shapes", "frozen_param_fragments"} == set()
    assert not any("frozen" in note for note in ckpt.open(tmp_path / "out").notes)


@pytest.mark.parametrize("write", [write_stage2, write_stage3])
def test_every_reader_takes_the_same_for_the_users(tmp_path: Path, write: Callable[..., Path]) -> None:
    """`sparse_tensor_module_names` is no client state, and an elastic schema's step no training state."""

    def add(model: dict[str, Any], rank: int) -> None:
        model |= {"sparse_tensor_module_names": ["embed"], "mine": 1}

    def elastic(inner: dict[str, Any], rank: int) -> None:
        inner["base_optimizer_state_step"] = 2

    run = write(tmp_path / "run", [{"a": torch.ones(4)}], 2, change_model=add, change=elastic)
    checkpoint = ckpt.open(run)
    ckpt.plan(checkpoint, "universal").run(tmp_path / "universal")
    for one in (checkpoint, ckpt.open(tmp_path / "universal")):
        assert one.state.client_state == {"mine": 1}
        assert "base_optimizer_state_step" not in one.state.entries()
