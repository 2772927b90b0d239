"""docs/operations.md: the bundled trainer accepts its commands and options."""

from __future__ import annotations

import re
import shlex
from dataclasses import fields

from tests.support.places import REPOSITORY
from train import config

PAGE = (REPOSITORY / "docs" / "operations.md").read_text()


def test_the_trainer_takes_its_commands() -> None:
    lines = re.findall(r"^    \$ python -m train --ranks 2 (--.*)$", PAGE, re.MULTILINE)
    assert len(lines) == 2
    for line in lines:
        parser = config.Parser()
        config.add_options(parser)
        config.parse_options(parser.parse_args(shlex.split(line)))
    options = {f"--{field.name.replace('_', '-')}" for field in fields(config.Config)}
    named = set(re.findall(r"`(--[a-z-]+)", PAGE)) - {"--every", "--silent", "--stuck", "--webhook", "--run"}
    assert named <= options, named - options
