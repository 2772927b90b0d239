"""`ckpt/runs/opening.py`, `warn_of_skipped`: Python functions warn if an older step is used, as commands print it."""

from __future__ import annotations

import shutil
import warnings
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import ckpt
from tests.support.commands import ckpt as run_ckpt

SKIPPED = "checkpoint-2 is skipped, it is not complete"


def load(run: Path) -> object:
    """Load the run into a module with its names."""
    model = torch.nn.Module()
    checkpoint = ckpt.open(run)
    for fqn in {fqn for fqn, role in checkpoint.tensors if role == "weight"}:
        *path, leaf = fqn.split(".")
        module = model
        for part in path:
            if not hasattr(module, part):
                module.add_module(part, torch.nn.Module())
            module = getattr(module, part)
        module.register_buffer(leaf, torch.empty_like(checkpoint[fqn][...]))
    return ckpt.load_into(model, run)


CALLS: dict[str, Callable[[Path], object]] = {
    "hash": ckpt.hash,
    "verify": lambda run: ckpt.verify(run / "checkpoint-1", run),
    "diff": lambda run: ckpt.diff(run, run / "checkpoint-1"),
    "convert": lambda run: ckpt.convert(run, "hf", run.with_name("out"), overwrite=True),
    "load_into": load,
}


def warned(call: Callable[[Path], object], run: Path) -> list[str]:
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        call(run)
    return [text for text in (str(one.message) for one in found) if SKIPPED in text]


@pytest.mark.parametrize("name", CALLS)
def test_a_skipped_newer_step_is_warned_of_once(name: str, fixtures: Path, tmp_path: Path) -> None:
    run = shutil.copytree(fixtures / "trainer-zero2", tmp_path / "run")
    assert warned(CALLS[name], run) == []
    next((run / "checkpoint-2").rglob("*rank_1*optim_states.pt")).unlink()
    assert len(warned(CALLS[name], run)) == 1


@pytest.mark.parametrize("words", [["hash"], ["diff", "checkpoint-1"], ["convert", "auto", "hf"]], ids=str)
def test_a_command_prints_the_note_and_no_warning(words: list[str], fixtures: Path, tmp_path: Path) -> None:
    run = shutil.copytree(fixtures / "trainer-zero2", tmp_path / "run")
    next((run / "checkpoint-2").rglob("*rank_1*optim_states.pt")).unlink()
    command, *rest = words
    given = [run, run / rest[0]] if command == "diff" else [*rest, run]
    more = ["-o", tmp_path / "out"] if command == "convert" else []
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        assert run_ckpt(command, *given, *more).err.count(SKIPPED) == 1
