"""`ckpt/runs/half_checkpoints.py`: a step or an adapter that lost its weights is incomplete, for every command."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from ckpt import api
from ckpt.errors import CorruptError, HalfError, IncompleteError
from tests.support.commands import ckpt
from tests.support.places import FIXTURES

LOST = CorruptError.exit_code


@pytest.fixture(scope="module")
def adapter(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("adapter") / "adapter"
    api.plan(api.open(FIXTURES / "lora-zero3"), "peft").run(place)
    (place / "ckpt-manifest.json").unlink()
    return place


def base_of(adapter: Path, folder: Path) -> Path:
    """Write weights with shapes that fit the adapter's factors."""
    factors = load_file(adapter / "adapter_model.safetensors")
    pairs = ((name, name.replace("lora_A", "lora_B")) for name in factors if ".lora_A." in name)
    tensors = {
        a.removeprefix("base_model.model.").replace(".lora_A", ""): torch.ones(len(factors[b]), factors[a].shape[1])
        for a, b in pairs
    }
    folder.mkdir()
    save_file(tensors, folder / "model.safetensors")
    return folder


def commands(place: Path, out: Path) -> list[tuple[str | Path, ...]]:
    return [
        ("inspect", place),
        ("convert", "auto", "peft", place, "-o", out),
        ("resume", place),
        ("merge-lora", place, "--dry-run"),
        ("hash", place),
    ]


def test_an_adapter_without_weights_is_incomplete_for_every_command(adapter: Path, tmp_path: Path) -> None:
    place = shutil.copytree(adapter, tmp_path / "adapter")
    assert ckpt("check", place).code == 0
    (place / "adapter_model.safetensors").unlink()
    for command in commands(place, tmp_path / "out"):
        done = ckpt(*command)
        assert done.code == LOST and "the adapter's weights are missing" in done.err, done.err
    checked = ckpt("check", place)
    assert checked.code == LOST and "incomplete" in checked.out
    assert not (tmp_path / "out").exists()


def test_a_step_without_its_adapter_is_skipped_with_a_note(adapter: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    for number in (2, 4):
        step = shutil.copytree(adapter, run / f"checkpoint-{number}")
        (step / "trainer_state.json").write_text(json.dumps({"global_step": number}))
    told = "checkpoint-4 is skipped, it is not complete: the adapter's weights are missing"
    done = ckpt("convert", "auto", "peft", run, "-o", tmp_path / "whole")
    assert done.code == 0 and told not in done.err
    (run / "checkpoint-4" / "adapter_model.safetensors").unlink()
    assert ckpt("check", run).code == LOST
    done = ckpt("convert", "auto", "peft", run, "-o", tmp_path / "out")
    assert done.code == 0 and told in done.err
    base = base_of(adapter, tmp_path / "base")
    merged = ckpt("merge-lora", run, "--base", base, "--dry-run", "-q")
    assert merged.code == 0 and told in merged.err, merged.err
    tagged = ckpt("merge-lora", run, "--tag", "checkpoint-4", "--base", base, "--dry-run")
    assert tagged.code == LOST and "the adapter's weights are missing" in tagged.err
    resumed = ckpt("resume", run, "--model-only", "--format", "peft")
    assert resumed.out.strip().endswith("checkpoint-2"), resumed.err


@pytest.mark.parametrize("keeps_optimizer", [True, False])
def test_a_trainers_step_without_weights(keeps_optimizer: bool, tmp_path: Path) -> None:
    step = shutil.copytree(FIXTURES / "trainer-plain" / "checkpoint-2", tmp_path / "run" / "checkpoint-2")
    other = ckpt("convert", "dcp", "hf", step, "-o", tmp_path / "out")
    assert other.code == 3 and "only optimizer states" not in other.err
    (step / "model.safetensors").unlink()
    if not keeps_optimizer:
        (step / "optimizer.pt").unlink()
    code, told = (HalfError.exit_code, "only optimizer states") if keeps_optimizer else (LOST, "the step's weights")
    for place in (step, step.parent):
        for command in commands(place, tmp_path / "out"):
            done = ckpt(*command)
            assert done.code == code and told in done.err, done.err
        assert ckpt("check", place).code == LOST


def lerobot(run: Path) -> Path:
    """Write a run like LeRobot's `save_checkpoint`."""
    step = run / "checkpoints" / "000004"
    for part in ("pretrained_model", "training_state"):
        (step / part).mkdir(parents=True)
    save_file({"model.w": torch.ones(4, 4)}, step / "pretrained_model" / "model.safetensors")
    (step / "pretrained_model" / "config.json").write_text('{"type": "act"}')
    state = {f"state/0/{name}": torch.ones(4, 4) for name in ("exp_avg", "exp_avg_sq")}
    save_file(state, step / "training_state" / "optimizer_state.safetensors")
    (step / "training_state" / "optimizer_param_groups.json").write_text("[]")
    (step / "training_state" / "training_step.json").write_text('{"step": 4}')
    return step


def test_lerobots_training_state_is_named_as_not_read(tmp_path: Path) -> None:
    step = lerobot(tmp_path / "run")
    for number, place in enumerate((tmp_path / "run", step, step / "pretrained_model")):
        checked = ckpt("check", place)
        assert checked.code == 0 and "training_state: not read" in checked.out
        done = ckpt("convert", "auto", "full", place, "-o", tmp_path / f"out{number}")
        assert done.code == 0 and "not read: ../training_state/" in done.err, done.err
        assert ckpt("resume", place).code == 6
    shutil.rmtree(step / "training_state")
    assert "training_state: not read" not in ckpt("check", step).out


def test_lerobots_training_state_alone_is_half(tmp_path: Path) -> None:
    step = lerobot(tmp_path / "run")
    state = step / "training_state"
    for place in (state, state / "optimizer_state.safetensors"):
        for command in commands(place, tmp_path / "out"):
            done = ckpt(*command)
            assert done.code == HalfError.exit_code, done.err
        assert ckpt("check", place).code == LOST
    assert f"the model is in {step / 'pretrained_model'}: give that folder" in ckpt("hash", state).err


def of_step(step: Path, taken: float) -> Path:
    """Set the step count in HF Trainer's optimizer."""
    optimizer = torch.load(step / "optimizer.pt", weights_only=True)
    for state in optimizer["state"].values():
        state["step"] = torch.tensor(taken)
    torch.save(optimizer, step / "optimizer.pt")
    return step


def of_model_step(run: Path, number: int) -> Path:
    """Change the step number in DeepSpeed's model file. The folder gets Accelerate's name."""
    place = next(run.glob("global_step*")).rename(run / "pytorch_model")
    (run / "latest").write_text(place.name)
    file = place / "mp_rank_00_model_states.pt"
    torch.save(torch.load(file, weights_only=False) | {"global_steps": number}, file)
    return run


def every_command(place: Path, out: Path) -> list[tuple[str | Path, ...]]:
    converted = [("convert", "auto", target, place, "-o", out) for target in ("full", "hf")]
    return [*converted, ("check", place), ("resume", place), ("inspect", place), ("hash", place)]


def check_all_refuse(place: Path, out: Path, told: str) -> None:
    for command in every_command(place, out):
        done = ckpt(*command)
        assert done.code == LOST and told in done.out + done.err, (command, done)


def test_an_optimizer_of_a_later_step_is_refused_by_every_command(tmp_path: Path) -> None:
    step = Path(shutil.copytree(FIXTURES / "trainer-plain" / "checkpoint-2", tmp_path / "checkpoint-2"))
    zero = Path(shutil.copytree(FIXTURES / "toy-zero2", tmp_path / "zero"))
    for place in (step, zero):
        assert ckpt("check", place).code == 0
    for place, told in (
        (of_step(step, 7.0), "the model is from step 2, but the optimizer has taken 7"),
        (of_model_step(zero, 0), "the model is from step 0, but the optimizer has taken 2"),
    ):
        check_all_refuse(place, tmp_path / "out", told)
        with pytest.raises(IncompleteError, match=told):
            api.open(place)


def test_an_optimizer_of_one_more_step_is_refused_if_the_weights_are_of_another_save(tmp_path: Path) -> None:
    """DeepSpeed's BF16_Optimizer counts one step more than the engine, and its masters round to the weights."""
    run = Path(shutil.copytree(FIXTURES / "trainer-zero2", tmp_path / "run"))
    for file in (run / "checkpoint-2/global_step2").glob("*optim_states.pt"):
        shutil.copy(file, run / "checkpoint-1/global_step1")
    told = "the model is from step 1, but the optimizer has taken 2: are all files from one save?"
    check_all_refuse(run / "checkpoint-1", tmp_path / "out", told)
    alike = of_model_step(Path(shutil.copytree(FIXTURES / "toy-zero2", tmp_path / "alike")), 1)
    assert ckpt("check", alike).code == 0


def test_an_optimizer_of_fewer_steps_is_refused_if_the_weights_are_of_another_save(tmp_path: Path) -> None:
    """DeepSpeed writes the model first: an interrupted save into a reused folder leaves an older optimizer."""
    run = Path(shutil.copytree(FIXTURES / "trainer-zero2", tmp_path / "run"))
    for file in (run / "checkpoint-1/global_step1").glob("*optim_states.pt"):
        shutil.copy(file, run / "checkpoint-2/global_step2")
    told = "the model is from step 2, but the optimizer has taken 1: are all files from one save?"
    check_all_refuse(run / "checkpoint-2", tmp_path / "out", told)
    older = ckpt("resume", run)
    assert older.out.strip().endswith("checkpoint-1") and "checkpoint-2 is skipped" in older.err


def test_an_optimizer_that_began_anew_is_named(tmp_path: Path) -> None:
    """Its masters round to the model's weights: only weights were loaded, and steps count from their save."""
    run = of_model_step(Path(shutil.copytree(FIXTURES / "toy-zero2", tmp_path / "run")), 7)
    told = "the model is from step 7, but the optimizer has taken 2: are all files from one save?"
    for command in every_command(run, tmp_path / "out"):
        shutil.rmtree(tmp_path / "out", ignore_errors=True)
        done = ckpt(*command)
        assert done.code == 0 and told in done.out + done.err, (command, done)
    assert "every part of every tensor is there" not in ckpt("check", run).out
