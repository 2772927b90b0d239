"""`make demo` prints the text in README.md; other runs of the bundled trainer print the text in docs/."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.engines import forked, launch
from tests.support.pages import blocks, commands, differences
from tests.support.places import REPOSITORY

pytestmark = pytest.mark.slow

README = (REPOSITORY / "README.md").read_text()
#: Sections with commands on other runs, and the folder to start in.
SECTIONS = {("resume.md", "From 2 ranks to 3"): ".", ("merge-lora.md", "A run under ZeRO-3"): "lora"}


def printed(command: list[str], folder: Path) -> str:
    """Return both streams in printing order."""
    env = os.environ | {"PYTHONPATH": str(REPOSITORY), "PYTHONUNBUFFERED": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=folder, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    assert done.returncode == 0, done.stdout[-6000:]
    return done.stdout


def test_the_demo(tmp_path: Path) -> None:
    (shown,) = (block.lines for block in blocks(README) if block.lines[0].startswith("== "))
    different = differences(shown, printed([sys.executable, "-m", "examples.demo"], tmp_path))
    assert not different, different


def test_what_is_shown_of_other_runs(tmp_path: Path) -> None:
    """A 2-rank run that resumes on 3 ranks, and a LoRA run: the pages show no command to train them."""
    job = {"strategy": "zero3", "model": "llama"}
    (tmp_path / "lora").mkdir()
    lora = job | {"steps": 3, "lora": 4, "output": str(tmp_path / "lora" / "outputs")}
    launch([job | {"steps": 2, "output": str(tmp_path / "outputs")}, lora], 2, tmp_path)
    known = [
        (command, tmp_path / folder)
        for (page, heading), folder in SECTIONS.items()
        for command in commands((REPOSITORY / "docs" / page).read_text())
        if command.heading == heading
    ]
    assert len(known) == 4
    for command, folder in known:
        words = command.words
        if words[0] == "ckpt":
            start = [sys.executable, "-m", *words]
        else:  # forked ranks start faster
            assert command.text.startswith("python -m torch.distributed.run --nproc-per-node 3 -m train --")
            start = forked([(3, "train.__main__", words[7:])], ["train.engines.zero"])
        different = differences(command.printed or [], printed(start, folder))
        assert not different, f"{command.text}\n{different}"
