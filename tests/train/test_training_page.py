"""The commands of docs/training.md are ones that the trainer, the preflight and the batch script take."""

from __future__ import annotations

import re
import shlex

import pytest

from tests.support.engines import REPOSITORY
from train import config, preflight

PAGE = (REPOSITORY / "docs" / "training.md").read_text()
COMMANDS = re.findall(r"^    ((?:python|sbatch|srun) .*)$", PAGE, re.MULTILINE)


@pytest.mark.parametrize("line", COMMANDS)
def test_a_command_is_understood(line: str) -> None:
    words = shlex.split(line)
    if "train.preflight" in words:
        parsed = preflight._parser().parse_args(words[words.index("train.preflight") + 1 :])
        assert parsed.need_gb == 500
        return
    parser = config.Parser()
    config.add_options(parser)
    if words[0] == "sbatch":
        place = words.index("train/slurm/multinode.sbatch")
        assert words[1:place] == ["--nodes", "2-4"] and not words[place + 1].startswith("-"), "the run folder is first"
        assert config.parse_options(parser.parse_args(words[place + 2 :])).until == 1000
    else:
        assert config.parse_options(parser.parse_args(words[words.index("train") + 1 :])).strategy == "zero3"


def test_there_are_commands() -> None:
    assert len(COMMANDS) == 3
