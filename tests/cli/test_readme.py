"""`ckpt/commands/convert/command.py`, `ckpt/commands/inspect/command.py`: the README shows what `ckpt` prints."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from ckpt.plan import registry
from tests.support.commands import ckpt_in_order
from tests.support.pages import commands, differences
from tests.support.places import REPOSITORY

DOCS = REPOSITORY / "docs"
README = (REPOSITORY / "README.md").read_text()


def test_the_table_of_formats_is_the_registry() -> None:
    lines = (DOCS / "formats.md").read_text().splitlines()
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in lines if line.startswith("| `")]
    rows = [row for row in rows if len(row) == 6]
    listed = [(name, row) for row in rows for name in re.findall(r"`([\w-]+)`", row[0].partition("(")[0])]
    assert {name for name, _ in listed} == set(registry.names())
    for name, row in listed:
        one = registry.get(name)
        assert re.findall(r"`([\w-]+)`", row[0].partition("(")[2]) == list(one.aliases), name
        assert row[2].startswith("yes" if one.reads else "no"), name
        assert row[3].startswith("yes" if one.writes else "no"), name


@pytest.mark.parametrize(
    "command",
    [
        "convert",
        "mount",
        "merge-lora",
        "push",
        "clean",
        "verify",
        "diff",
        "check",
        "hash",
        "inspect",
        "estimate",
        "formats",
        "doctor",
    ],
)
def test_every_option_that_is_mentioned_exists(command: str) -> None:
    words = [sys.executable, "-m", "ckpt", command, "--help"]
    known = subprocess.run(words, capture_output=True, text=True, check=True)
    options = set(re.findall(r"(--[a-z][a-z-]+)", known.stdout))
    text = "\n".join(path.read_text() for path in (REPOSITORY / "README.md", DOCS / "limits.md"))
    lines = re.findall(rf"(?:^    (?:\$ )?|`)(ckpt {command}\b[^`\n]*)", text, re.MULTILINE)
    used = {option for line in lines for option in re.findall(r"(--[a-z][a-z-]+)", line.split("#")[0])}
    assert used <= options


def test_it_is_short_and_shows_a_picture_first() -> None:
    assert len(README.splitlines()) <= 150
    pictures = re.findall(r"^!\[[^]]+\]\((.+)\)$", README, re.MULTILINE)
    assert pictures and (REPOSITORY / pictures[0]).is_file()
    assert README.index(pictures[0]) < README.index("\n## ")


def test_commands_on_a_fixture_print_what_is_shown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shutil.copytree(REPOSITORY / "fixtures/moe-zero3", tmp_path / "fixtures/moe-zero3")
    monkeypatch.chdir(tmp_path)
    shown = [one for one in commands(README) if one.heading == "See it in a second"]
    assert len(shown) == 3
    for command in shown:
        done = ckpt_in_order(*command.words[1:])
        assert done.code == 0
        assert not differences(command.printed or [], done.out + done.err)


def test_what_it_depends_on_is_what_is_required() -> None:
    required = re.search(
        r"^dependencies = \[\n(.*?)^\]", (REPOSITORY / "pyproject.toml").read_text(), re.MULTILINE | re.DOTALL
    )
    said = re.search(r"itself depends on\s(.*?)\.", (DOCS / "index.md").read_text(), re.DOTALL)
    assert required is not None and said is not None
    assert re.findall(r'"([\w-]+)', required[1]) == re.findall(r"[\w-]+", said[1].replace(" and ", ", "))
