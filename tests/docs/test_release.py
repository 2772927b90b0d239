"""`CHANGELOG.md`, `docs/versions.md`, `Dockerfile`, `pyproject.toml`: facts about a release agree."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from tests.support.commands import ckpt
from tests.support.places import REPOSITORY

TABLE = dict(
    re.findall(r"^\| ([\w -]+?) \| ([\d., ]+?) \|", (REPOSITORY / "docs/versions.md").read_text(), re.MULTILINE)
)
PROJECT = (REPOSITORY / "pyproject.toml").read_text()


def test_each_release_is_dated_and_short() -> None:
    _, *sections = re.split(r"^## ", (REPOSITORY / "CHANGELOG.md").read_text(), flags=re.MULTILINE)
    for section in sections:
        title, *lines = section.strip().splitlines()
        assert re.fullmatch(r"\d+\.\d+\.\d+ \(\d{4}-\d\d-\d\d\)|Unreleased", title)
        assert len(lines) <= 20 or title == "Unreleased", title


def test_supported_versions_are_those_that_lanes_try() -> None:
    lanes = yaml.safe_load((REPOSITORY / ".github/workflows/test.yml").read_text())["jobs"]
    setup = next(step for step in lanes["python"]["steps"] if "setup-python" in step.get("uses", ""))
    pythons = sorted(setup["with"]["python-version"].split(), key=lambda one: int(one.partition(".")[2]))
    assert TABLE.pop("Python").split(", ") == pythons == re.findall(r"Python :: (3\.\d+)", PROJECT)
    assert f'requires-python = ">={pythons[0]}"' in PROJECT
    pinned = dict(re.findall(r"^([\w-]+)==(.+)$", (REPOSITORY / "constraints.txt").read_text(), re.MULTILINE))
    assert len(TABLE) == 6
    assert {name: pinned[name.lower()] for name in TABLE} == TABLE
    newer = " and ".join(lanes["frameworks"]["strategy"]["matrix"]["mcore"])
    assert f"the lane `frameworks` tries {newer} as well" in (REPOSITORY / "docs/versions.md").read_text()
    lane = lanes["whole"]["steps"][-2]["run"]
    assert lane == "make wheel test" and "-c constraints.txt" in (REPOSITORY / "Makefile").read_text()


def test_a_tag_is_the_version(tmp_path: Path) -> None:
    pytest.importorskip("setuptools_scm", reason="setuptools-scm is not installed")
    if not (REPOSITORY / ".git").exists():
        pytest.skip("this is no clone")
    clone, git = tmp_path / "clone", ["git", "-c", "user.name=t", "-c", "user.email=t@example.org"]
    subprocess.run([*git, "clone", "--quiet", "--no-tags", REPOSITORY, clone], check=True)
    subprocess.run([*git, "-C", clone, "tag", "v0.1.0"], check=True)
    done = subprocess.run(
        [sys.executable, "-m", "setuptools_scm"], cwd=clone, capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "0.1.0"


def test_the_image_runs_the_command() -> None:
    lines = (REPOSITORY / "Dockerfile").read_text()
    assert 'ENTRYPOINT ["ckpt"]\nCMD ["help"]\n' in lines and ckpt("help").code == 0
    assert (
        f"torch=={re.search(r'^torch==(.+)$', (REPOSITORY / 'constraints.txt').read_text(), re.MULTILINE)[1]}" in lines
    )  # type: ignore[index]
    assert "'.[all]'" in lines and "fuse3" in lines
    docs = (REPOSITORY / "docs/versions.md").read_text()
    commands = [shlex.split(line) for line in re.findall(r"^(docker .*)$", docs, re.MULTILINE)]
    assert [words[1] for words in commands] == ["build", "run"]
    assert commands[0][-2:] == ["ckpt", "."] and commands[1][commands[1].index("ckpt") + 1] == "convert"
