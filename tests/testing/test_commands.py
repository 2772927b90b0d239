"""`ckpt/testing/commands.py`, `ckpt/options/command.py`, `ckpt/commands/__init__.py`: the suite on our commands."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

import ckpt
from ckpt import commands
from ckpt.errors import UsageError
from ckpt.testing import CommandConformance


class TestOwnCommands(CommandConformance):
    commands = commands.all_commands()


@pytest.mark.parametrize(
    ("test", "change"),
    [
        ("test_it_is_declared_in_plain_words", {"examples": ()}),
        ("test_it_is_declared_in_plain_words", {"name": "Check"}),
        ("test_only_parameters_take_urls", {"urls": ("nothing",)}),
        ("test_its_help_fits_and_explains_every_option", {"examples": (("ckpt check a", "b"), ("ckpt check c", "d"))}),
        ("test_it_is_listed_in_its_section", {"section": "Convert and go on"}),
    ],
)
def test_a_wrong_declaration_fails(test: str, change: dict[str, object]) -> None:
    wrong = replace(commands.command("check"), **change)  # type: ignore[arg-type]
    with pytest.raises(AssertionError):
        getattr(CommandConformance(), test)(wrong)


def test_another_package_cannot_take_the_name_of_a_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(commands, "entries", lambda group: {"check": "other:COMMAND"})
    with pytest.raises(UsageError, match="registers the built-in command 'check'"):
        commands.places.__wrapped__()


def test_what_is_registered_must_be_a_declaration(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(commands, "places", lambda: {"other": "ckpt.options.command:SECTIONS"})
    with pytest.raises(UsageError, match="the command 'other' is not declared"):
        commands.command.__wrapped__("other")


def test_a_new_folder_is_a_command_and_a_function(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "hello").mkdir()
    (tmp_path / "hello/__init__.py").touch()
    (tmp_path / "hello/command.py").write_text(
        "from ckpt.options.command import LOOK, Command\n"
        "def hello() -> str:\n    return 'hello'\n"
        "COMMAND = Command('hello', LOOK, hello, (), python='ckpt.commands.hello.command:hello')\n"
    )
    monkeypatch.setattr(commands, "__path__", [*commands.__path__, str(tmp_path)])
    commands.own_places.cache_clear()
    try:
        assert ckpt.hello() == "hello" and "hello" in dir(ckpt)  # type: ignore[attr-defined]
        assert "hello" in commands.places.__wrapped__()
    finally:
        commands.own_places.cache_clear()
