"""Conformance suite for commands in the entry-point group `ckpt.commands`."""

from __future__ import annotations

import inspect
import re
import subprocess
import sys
from collections.abc import Sequence
from typing import ClassVar

import pytest

from ckpt.options.command import Command, split_groups

_WIDTH = 80  # columns if the terminal has no size


class CommandConformance:
    """Conformance suite for commands. Subclass it in a test module and set `commands`; each must be registered."""

    commands: ClassVar[Sequence[Command]]

    def pytest_generate_tests(self, metafunc: pytest.Metafunc) -> None:
        if "command" in metafunc.fixturenames:
            metafunc.parametrize("command", self.commands, ids=[command.name for command in self.commands])

    def test_it_is_declared_in_plain_words(self, command: Command) -> None:
        assert re.fullmatch("[a-z][a-z0-9-]*", command.name)
        assert (inspect.getdoc(command.function) or "").split("\n")[0].endswith((".", "?"))
        assert len(command.examples) == 2
        for line, meaning in command.examples:
            assert line.startswith(f"ckpt {command.name}") and meaning
        assert command.guide.endswith(".md")

    def test_only_parameters_take_urls(self, command: Command) -> None:
        assert set(command.urls) <= split_groups(command.function)[0].keys()

    def test_its_help_fits_and_explains_every_option(self, command: Command) -> None:
        done = run(command.name, "--help")
        assert done.returncode == 0, done.stderr
        usage, _, rest = done.stdout.partition("\n\n")
        assert usage.startswith(f"Usage: ckpt {command.name}")
        assert max(map(len, rest.splitlines())) <= _WIDTH
        options, examples = rest.split("\nExamples:\n")
        assert re.findall("^  (ckpt .*)$", examples, re.MULTILINE) == [line for line, _ in command.examples]
        sections = "".join(re.split(r"^\S.*:\n", options, flags=re.MULTILINE)[1:])
        for line in re.findall(r"^  (-.*)\n(?!  {4})", f"{sections}\n", re.MULTILINE):
            assert re.search(r"  \S", line) or line.endswith(", ..."), f"an option without a help text: {line}"

    def test_a_mistake_is_one_error_with_a_hint(self, command: Command) -> None:
        done = run(command.name, "--no-such-option")
        assert done.returncode == 2 and done.stdout == ""
        assert done.stderr.startswith("error: unknown option --no-such-option") and "hint: " in done.stderr
        assert "Traceback" not in done.stderr

    def test_it_is_listed_in_its_section(self, command: Command) -> None:
        section = run("--help").stdout.split(f"\n{command.section}:\n")[1].split("\n\n")[0]
        assert re.search(rf"^  {re.escape(command.name)}  ", section, re.MULTILINE)


def run(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-m", "ckpt", *words], capture_output=True, text=True, check=False)
