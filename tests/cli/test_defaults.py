"""`ckpt/cli/values.py`: option defaults from the environment and from pyproject.toml."""

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
    """Make a project with a table of defaults. The working directory is a subfolder with a run."""
    shutil.copytree(fixtures / "toy-zero3", tmp_path / "deep" / "outputs")
    (tmp_path / "pyproject.toml").write_text(TABLE)
    monkeypatch.chdir(tmp_path / "deep")
    return tmp_path


def planned(*words: str) -> int:
    """Return the planned number of ranks for `ckpt convert auto zero3`."""
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
    (project / "deep" / "pyproject.toml").write_text("")  # the nearest file, without settings
    monkeypatch.setenv("CKPT_CONVERT_DRY_RUN", "1")
    assert planned() == 4
    assert sorted(path.name for path in (project / "deep").iterdir()) == ["outputs", "pyproject.toml"]


def test_help_shows_them_and_lists_are_lists(project: Path) -> None:
    (project / "pyproject.toml").write_text(TABLE + "[tool.ckpt.check]\nno-manifest = true\n")
    assert "did you mean" not in run_ckpt("check", "outputs").err and run_ckpt("check", "outputs").code == 2
    assert "[default: fp16]" in run_ckpt("convert", "--help").out
    assert "rank 0, elements 0:605" in run_ckpt("inspect", "outputs").out


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
