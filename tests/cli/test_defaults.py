"""`ckpt/cli/defaults.py`: defaults of options from the environment and from pyproject.toml."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pytest

import ckpt
from tests.support.commands import ckpt as run_ckpt
from tests.support.commands import process

TABLE = """
[tool.ckpt.convert]
dtype = "fp16"
world-size = 2
dry-run = true
[tool.ckpt.inspect]
tensor = ["embed.weight"]
"""


@pytest.fixture
def project(fixtures: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A project with a table of defaults, and a run in a folder of it, which is the working directory."""
    shutil.copytree(fixtures / "toy-zero3", tmp_path / "deep" / "outputs")
    (tmp_path / "pyproject.toml").write_text(TABLE)
    monkeypatch.chdir(tmp_path / "deep")
    return tmp_path


def planned(*words: str) -> int:
    """The number of ranks for which `ckpt convert auto zero3` plans files."""
    found = run_ckpt("convert", "auto", "zero3", "outputs", "--json", *words)
    assert found.code == 0, found.err
    return len([file for file in json.loads(found.out)["files"] if "optim_states" in file["name"]])


def test_the_command_line_goes_before_the_environment_and_that_before_the_table(
    project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert planned() == 2
    monkeypatch.setenv("CKPT_CONVERT_WORLD_SIZE", "4")
    assert planned() == 4
    assert planned("--world-size", "1") == 1
    (project / "deep" / "pyproject.toml").write_text("")  # the nearest one, which sets nothing
    monkeypatch.setenv("CKPT_CONVERT_DRY_RUN", "1")
    assert planned() == 4
    assert sorted(path.name for path in (project / "deep").iterdir()) == ["outputs", "pyproject.toml"]


def test_help_shows_them_and_lists_are_lists(project: Path) -> None:
    (project / "pyproject.toml").write_text(TABLE + "[tool.ckpt.check]\nno-manifest = true\n")
    assert "did you mean" not in run_ckpt("check", "outputs").err and run_ckpt("check", "outputs").code == 2
    assert "[default: fp16]" in run_ckpt("convert", "--help").out
    assert "rank 0, elements 0:605" in run_ckpt("inspect", "outputs").out


@pytest.mark.parametrize(
    ("table", "words"),
    [
        ("[tool.ckpt.convert]\nworldsize = 2", ("worldsize, [tool.ckpt.convert] in ", "did you mean world-size?")),
        ("[tool.ckpt.convret]\nworld-size = 2", ("has no 'convret'", "did you mean convert?")),
        ("[tool.ckpt]\nworld-size = 2", ("has no 'world-size'", "[tool.ckpt.convert]")),
        ("[tool.ckpt]\nconvert = 2", ("has no 'convert'", "options stand in a table of their command")),
        ("[[tool.ckpt]]\nworld-size = 2", ("[[tool.ckpt]] is no table", "[tool.ckpt.convert]")),
        ("[tool.ckpt.convert]\nworld-size", ("this is not TOML", "pyproject.toml")),
        ("[tool.ckpt.convert]\nworld-size = 'two'", ("--world-size", "a valid integer")),
        ("[tool.ckpt.convert]\ndtype = 'half'", ("--dtype", "one of keep, fp32, bf16, fp16")),
    ],
)
def test_what_is_not_known_is_an_error(project: Path, table: str, words: tuple[str, ...]) -> None:
    (project / "pyproject.toml").write_text(table)
    found = run_ckpt("convert", "auto", "hf", "outputs")
    assert (found.code, found.out) == (2, "") and all(word in found.err for word in words), found.err


@pytest.mark.parametrize(
    ("command", "option"), [("convert", 'output = "x"'), ("convert", "overwrite = true"), ("merge-lora", "push = true")]
)
def test_a_file_sets_nothing_that_is_replaced_or_leaves_the_machine(project: Path, command: str, option: str) -> None:
    (project / "pyproject.toml").write_text(f"[tool.ckpt.{command}]\n{option}\n")
    refused = run_ckpt(*(("convert", "zero3", "hf", "run") if command == "convert" else ("merge-lora", "run")))
    assert refused.code == 2
    assert f"a file does not set --{option.split()[0]}" in refused.err


def test_a_variable_that_no_option_has_is_an_error(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CKPT_CONVERT_WORLDSIZE", "2")
    found = run_ckpt("convert", "auto", "zero3", "outputs")
    assert found.code == 2 and "CKPT_CONVERT_WORLDSIZE" in found.err and "did you mean world-size?" in found.err
    assert run_ckpt("inspect", "outputs").code == 0  # it is none of that command's


@pytest.mark.parametrize("text", ["[tool.ckpt-tools]\nx = 1", 'x = """\n[tool.ckpt]\n"""\n[tool.ruff]'])
def test_another_tools_table_is_not_read(project: Path, text: str) -> None:
    (project / "pyproject.toml").write_text(text)
    found = run_ckpt("inspect", "outputs")
    assert found.code == 0, found.err


def test_a_folder_that_was_removed_sets_nothing(project: Path, fixtures: Path) -> None:
    (project / "gone").mkdir()
    os.chdir(project / "gone")
    (project / "gone").rmdir()
    assert run_ckpt("inspect", fixtures / "toy-zero3").code == 0


def test_python_does_not_read_them(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CKPT_CONVERT_WORLD_SIZE", "5")
    assert len([name for name in ckpt.plan("outputs", "zero3").files if "optim_states" in name]) == 3


@pytest.mark.parametrize(("value", "is_json"), [("1", True), ("true", True), ("0", False)])
def test_errors_are_objects_where_a_default_sets_json(
    project: Path, monkeypatch: pytest.MonkeyPatch, value: str, is_json: bool
) -> None:
    monkeypatch.setenv("CKPT_CHECK_JSON", value)
    (project / "pyproject.toml").write_text("[tool.ckpt.inspect]\njson = true\n")
    by_file = process("inspect", "nowhere", cwd=project / "deep")
    by_environment = process("check", "nowhere", cwd=project / "deep")
    assert json.loads(by_file.err)["code"] == "not-found" and by_file.code == 3
    assert by_environment.code == 3 and by_environment.err.startswith("{" if is_json else "error: ")
