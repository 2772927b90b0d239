"""What docs/resume.md shows of the bundled trainer: which checkpoints it refuses, and the command that it hints at."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest

import ckpt
from ckpt.plan.checkpoint import Layout
from tests.support.pages import Command, commands, differences
from tests.support.places import REPOSITORY
from train import config, folders

PAGE = (REPOSITORY / "docs" / "resume.md").read_text()
COMMANDS = [one for one in commands(PAGE) if one.text.startswith("torchrun")]


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with `outputs`, a full state dict, and `run`, Megatron's at TP 2 and PP 2."""
    run = ckpt.open(REPOSITORY / "fixtures" / "trl-zero3" / "outputs")
    ckpt.plan(run, "full").run(tmp_path / "outputs")
    ckpt.plan(run, "megatron", Layout(tp=2, pp=2)).run(tmp_path / "run")
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.usefixtures("here")
@pytest.mark.parametrize("command", COMMANDS, ids=["another format", "another layout"])
def test_what_is_refused(command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the first rank prints; torchrun prints more behind it, which the page leaves out."""
    words = shlex.split(command.text)
    assert words[:2] == ["torchrun", "--nproc-per-node"] and words[3:5] == ["-m", "train"]
    monkeypatch.setattr(folders.dist, "get_world_size", lambda: int(words[2]))
    parser = config.Parser()
    config.add_options(parser)
    with pytest.raises(config.UserError) as refused:
        folders.find_checkpoint(config.parse_options(parser.parse_args(words[5:])))
    different = differences(command.printed or [], f"train: error: {refused.value}\n")
    assert not different, different
