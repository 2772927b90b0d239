"""`ckpt/runs/opening.py`, `steps.py`: of a run's checkpoints the newest is taken: an incomplete one is passed
over aloud, a damaged one never.
"""

from __future__ import annotations

import os
import random
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from ckpt import api
from ckpt.errors import CkptError, CorruptError
from tests.support.commands import ckpt, snapshot

OPTIMIZER, MODEL = "*rank_1_*optim_states.pt", "mp_rank_00_model_states.pt"


def one(checkpoint: Path, pattern: str) -> Path:
    return next(checkpoint.rglob(pattern))


def emptied(path: Path) -> None:
    os.truncate(path, 0)


def cut_in_half(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


def flipped(path: Path, at: int, bit: int = 0) -> None:
    content = bytearray(path.read_bytes())
    content[at] ^= 1 << bit
    path.write_bytes(content)


def with_another_step(checkpoint: Path) -> None:
    (checkpoint / "latest").write_text("global_step3")
    shutil.copytree(checkpoint / "global_step2", checkpoint / "global_step1")


def of_the_step_before(checkpoint: Path, pattern: str = OPTIMIZER) -> None:
    shutil.copy(one(checkpoint.parent / "checkpoint-1", pattern), one(checkpoint, pattern))


#: As a run leaves it that is still writing, or was killed.
INCOMPLETE: dict[str, Callable[[Path], None]] = {
    "no file of a rank": lambda c: one(c, OPTIMIZER).unlink(),
    "no latest": lambda c: (c / "latest").unlink(),
    "an empty latest": lambda c: emptied(c / "latest"),
    "no model": lambda c: one(c, MODEL).unlink(),
    "an empty model": lambda c: emptied(one(c, MODEL)),
    "half a model": lambda c: cut_in_half(one(c, MODEL)),
    "half of a rank's": lambda c: cut_in_half(one(c, OPTIMIZER)),
}
DAMAGED: dict[str, Callable[[Path], None]] = {
    "the pickle of a rank's": lambda c: flipped(one(c, OPTIMIZER), 400),
    "the last record of the model": lambda c: flipped(one(c, MODEL), -22),
    "latest names another step": lambda c: flipped(c / "latest", -1),
    "latest, beside another step": with_another_step,
    "a rank's file of the step before": of_the_step_before,
    "the model's file of the step before": lambda c: of_the_step_before(c, MODEL),
}


@pytest.fixture
def run(fixtures: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(fixtures / "trainer-zero2", tmp_path / "run"))


@pytest.mark.parametrize("what", INCOMPLETE)
def test_an_incomplete_one_is_passed_over_and_said_to_be(run: Path, what: str) -> None:
    INCOMPLETE[what](run / "checkpoint-2")
    out = run.with_name("out")
    result = ckpt("convert", "auto", "hf", run, "-o", out, "-q")
    assert (result.code, result.out) == (0, f"{out}\n"), result.err
    assert result.err.startswith("note: checkpoint-2 is skipped, it is not complete: ")
    for command in (("verify", run, run), ("hash", run)):
        assert "note: checkpoint-2 is skipped" in ckpt(*command, "-q").err


@pytest.mark.parametrize("what", DAMAGED)
def test_a_damaged_one_is_an_error_that_names_the_one_before(run: Path, what: str) -> None:
    DAMAGED[what](run / "checkpoint-2")
    before = snapshot(run.parent)
    result = ckpt("convert", "auto", "hf", run, "-o", run.with_name("out"))
    assert (result.code, result.out) == (4, "")
    assert "--tag checkpoint-1 takes the checkpoint before checkpoint-2" in result.err
    assert snapshot(run.parent) == before
    assert ckpt("convert", "auto", "hf", run, "-o", run.with_name("out"), "--tag", "checkpoint-1").code == 0


@pytest.mark.parametrize(
    ("fixture", "step", "pattern"),
    [("megatron-lm", "iter_000000{}", "__1_0.distcp"), ("toy-zero3", "global_step{}", "*rank_1*optim*")],
)
def test_where_the_recorded_step_is_not_whole_the_one_before_is_named_once(
    fixture: str, step: str, pattern: str, fixtures: Path, tmp_path: Path
) -> None:
    run = Path(shutil.copytree(fixtures / fixture, tmp_path / "run"))
    shutil.copytree(run / step.format(2), run / step.format(1))
    next((run / step.format(2)).glob(pattern)).unlink()
    result = ckpt("resume", run)
    assert result.code == 4 and result.err.count(f"--tag {step.format(1)}") == 1, result.err


def test_no_flipped_bit_makes_an_older_one_taken(run: Path) -> None:
    draw = random.Random(4)
    files = sorted(file for file in (run / "checkpoint-2").rglob("*") if file.is_file())
    for number in range(240):
        path = files[number % len(files)]
        content = path.read_bytes()
        # half of the flips where a file says what is in it
        at = draw.randrange(len(content)) if number % 2 else draw.randrange(max(0, len(content) - 400), len(content))
        flipped(path, at, draw.randrange(8))
        try:
            assert api.open(run).state.step == 2, (path, at)
        except CkptError as error:
            assert error.exit_code in (3, 4, 5), (path, at)
        path.write_bytes(content)


def test_steps_without_the_weights_that_are_looked_for(run: Path) -> None:
    """A format that finds the newest step with files of its own says which newer ones have none."""
    steps = run.with_name("steps")
    assert ckpt("convert", "zero2", "full", run, "-o", steps / "step-1").code == 0
    shutil.copytree(steps / "step-1", steps / "step-2")
    assert "skipped, " not in ckpt("inspect", steps).out
    for file in (steps / "step-2").glob("*.bin"):
        file.unlink()
    result = ckpt("convert", "full", "hf", steps, "-o", run.with_name("out"), "-q")
    assert result.code == 0
    assert result.err == "note: step-2 is skipped, it holds no checkpoint of the format wanted\n"


def test_a_newer_step_without_an_adapter(fixtures: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    assert ckpt("merge-lora", fixtures / "lora-zero3", "-o", tmp_path / "base").code == 0
    assert ckpt("convert", "auto", "peft", fixtures / "lora-zero3", "-o", run / "checkpoint-5").code == 0
    (run / "checkpoint-10").mkdir()
    result = ckpt("merge-lora", run, "--base", tmp_path / "base", "-o", tmp_path / "out", "-q")
    assert result.code == 0, result.err
    assert result.err == "note: checkpoint-10 is skipped, it holds no adapter\n"
    (run / "checkpoint-10" / "adapter_config.json").write_bytes((run / "checkpoint-5/adapter_config.json").read_bytes())
    emptied_file = run / "checkpoint-10" / "adapter_model.safetensors"
    emptied_file.write_bytes((run / "checkpoint-5" / "adapter_model.safetensors").read_bytes()[:-1])
    with pytest.raises(CorruptError):
        from ckpt.commands.merge_lora.find import open_adapter

        open_adapter(str(run))
