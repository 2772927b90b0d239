"""`ckpt/runs/opening.py`, `steps.py`: a run's newest checkpoint is used."""

from __future__ import annotations

import random
import shutil
from pathlib import Path

import pytest

from ckpt import api
from ckpt.errors import CkptError, CorruptError
from tests.support.commands import ckpt


def flipped(path: Path, at: int, bit: int = 0) -> None:
    content = bytearray(path.read_bytes())
    content[at] ^= 1 << bit
    path.write_bytes(content)


@pytest.fixture
def run(fixtures: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(fixtures / "trainer-zero2", tmp_path / "run"))


def test_no_flipped_bit_makes_an_older_one_taken(run: Path) -> None:
    draw = random.Random(4)
    files = sorted(file for file in (run / "checkpoint-2").rglob("*") if file.is_file())
    for number in range(240):
        path = files[number % len(files)]
        content = path.read_bytes()
        # half of the flips hit structure or metadata
        at = draw.randrange(len(content)) if number % 2 else draw.randrange(max(0, len(content) - 400), len(content))
        flipped(path, at, draw.randrange(8))
        try:
            assert api.open(run).state.step == 2, (path, at)
        except CkptError as error:
            assert error.exit_code in (3, 4, 5), (path, at)
        path.write_bytes(content)


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
