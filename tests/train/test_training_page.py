"""`ckpt/commands/preflight/nodes.py`, docs/training.md: options for the trainer, preflight and batch scripts."""

from __future__ import annotations

import re
import shlex
import socket
import time

import pytest

from ckpt.commands.preflight import nodes
from tests.support.commands import ckpt
from tests.support.pages import commands, differences
from tests.support.places import REPOSITORY
from train import config

PAGE = (REPOSITORY / "docs" / "training.md").read_text()
COMMANDS = re.findall(r"^    (?:\$ )?((?:python|sbatch|srun) .*)$", PAGE, re.MULTILINE)


@pytest.mark.parametrize("line", COMMANDS)
def test_a_command_is_understood(line: str) -> None:
    words = shlex.split(line)
    if "preflight" in words:
        assert words[words.index("--need-gb") + 1] == "500"
        assert ckpt("preflight", *words[words.index("preflight") + 1 :], "--help").code == 0
        return
    parser = config.Parser()
    config.add_options(parser)
    if "train/slurm/simple.sbatch" in words:
        (strategy, *options) = words[words.index("train/slurm/simple.sbatch") + 1 :]
        text = (REPOSITORY / "train" / "simple.py").read_text()
        assert f'"{strategy}"' in text and all(f'"{name}"' in text for name in options[::2])
    elif words[0] == "sbatch":
        place = words.index("train/slurm/multinode.sbatch")
        assert words[1:place] == ["--nodes", "2-4"] and not words[place + 1].startswith("-"), "the run folder is first"
        assert config.parse_options(parser.parse_args(words[place + 2 :])).until == 1000
    else:
        place = words.index("--ranks")  # the command's own
        assert config.parse_options(parser.parse_args(words[place + 2 :])).strategy == "zero3"


def test_there_are_commands() -> None:
    assert len(COMMANDS) == 4


def test_what_the_preflight_says(monkeypatch: pytest.MonkeyPatch) -> None:
    """One node differs from the first one, and another does not answer."""
    (shown,) = (command for command in commands(PAGE) if command.printed)
    deepspeed, data = {"deepspeed": "0.19.8"}, {"data in /shared/corpus": "51b7d1a80c44"}
    first = {"same": data | deepspeed, "problems": []}
    others = {"data in /shared/corpus": "8c1f3c0d6e2a", "deepspeed": "0.18.1"}
    second = {"same": others, "problems": ["no space in /shared: No space left on device"]}
    with socket.create_server(("", 0)) as taken:
        port = taken.getsockname()[1]
    problems, heard = nodes.gather(["n1", "n3"], port, first, time.monotonic() + 0.1, 40)
    monkeypatch.setattr(nodes, "look", lambda *_: first)
    monkeypatch.setattr(nodes, "gather", lambda *_: (problems, heard | {"n2": second}))
    words = shown.words
    asked = words[words.index("preflight") + 1 :]
    done = ckpt("preflight", *asked, "--nodes", "n1,n2,n3", "--number", "0")
    assert done.code == 1
    different = differences(shown.printed or [], done.err.replace(f"port {port}", "port 24017"))
    assert not different, different
