"""The README says what is so: its format table, its commands and its options."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from ckpt import registry

REPOSITORY = Path(__file__).parents[2]
README = (REPOSITORY / "README.md").read_text()


def test_the_table_of_formats_is_the_registry() -> None:
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in README.splitlines() if line.startswith("| `")]
    listed = {name: row for row in rows for name in re.findall(r"`([\w-]+)`", row[0])}
    assert set(listed) == {*registry.names(), *registry.ALIASES}
    for name, row in listed.items():
        one = registry.get(name)
        assert row[2].startswith("yes" if one.reads else "no"), name
        assert row[3].startswith("yes" if one.writes else "no"), name


@pytest.mark.parametrize(
    "command", ["convert", "mount", "merge-lora", "push", "verify", "check", "hash", "inspect", "estimate", "formats"]
)
def test_every_option_that_is_mentioned_exists(command: str) -> None:
    words = [sys.executable, "-m", "ckpt", command, "--help"]
    known = subprocess.run(words, capture_output=True, text=True, check=True)
    options = set(re.findall(r"(--[a-z][a-z-]+)", known.stdout))
    lines = [line for line in README.splitlines() if line.strip().startswith((f"ckpt {command}", f"$ ckpt {command}"))]
    used = {option for line in lines for option in re.findall(r"(--[a-z][a-z-]+)", line.split("#")[0])}
    assert used <= options


def test_what_it_depends_on_is_what_is_required() -> None:
    required = re.search(
        r"^dependencies = \[\n(.*?)^\]", (REPOSITORY / "pyproject.toml").read_text(), re.MULTILINE | re.DOTALL
    )
    said = re.search(r"It depends on\n(.*?)\.", README, re.DOTALL)
    assert required is not None and said is not None
    assert re.findall(r'"([\w-]+)', required[1]) == re.findall(r"[\w-]+", said[1].replace(" and ", ", "))
