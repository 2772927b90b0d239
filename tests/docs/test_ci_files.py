"""`action.yml`, the pre-commit hook and the workflow: run each script, except the download of ckpt."""

from __future__ import annotations

import functools
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

import ckpt
from tests.support.places import REPOSITORY

ACTION: dict[str, Any] = yaml.safe_load((REPOSITORY / "action.yml").read_text())
HOOKS: list[dict[str, Any]] = yaml.safe_load((REPOSITORY / ".pre-commit-hooks.yaml").read_text())
#: An installed `ckpt` command for both to find.
COMMAND = f'#!/bin/sh\nexec "{sys.executable}" -m ckpt "$@"\n'


@pytest.fixture
def here(tmp_path: Path) -> Path:
    """Create a run, a model converted from it, and `bin/ckpt`."""
    shutil.copytree(REPOSITORY / "fixtures/trl-zero3/outputs/qwen3-sft", tmp_path / "a run")
    ckpt.plan(ckpt.open(tmp_path / "a run"), "hf").run(tmp_path / "model")
    (tmp_path / "temp/ckpt/bin").mkdir(parents=True)
    for place in ("temp/ckpt/bin/ckpt", "temp/ckpt/bin/python"):
        (tmp_path / place).write_text(COMMAND)
        (tmp_path / place).chmod(0o755)
    return tmp_path


def shell(script: str, folder: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    path = os.pathsep.join([str(folder / "temp/ckpt/bin"), os.environ["PATH"]])
    env = os.environ | {"PYTHONPATH": str(REPOSITORY), "PATH": path, "RUNNER_TEMP": str(folder / "temp"), **variables}
    command = ["bash", "--noprofile", "--norc", "-eo", "pipefail", "-c", script]  # GitHub's command for `shell: bash`
    return subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, timeout=120)


def flip_a_bit(file: Path) -> None:
    content = file.read_bytes()
    file.write_bytes(content[:-9] + bytes([content[-9] ^ 1]) + content[-8:])


def step(name: str, **inputs: str) -> tuple[str, dict[str, str]]:
    """Return a step's script and its environment variables for `inputs`."""
    given = {key: str(one.get("default", "")) for key, one in ACTION["inputs"].items()} | inputs
    found = next(one for one in ACTION["runs"]["steps"] if one["name"] == name)
    env = {
        key: re.sub(r"\$\{\{ inputs\.(\w+) \}\}", lambda match: given[match[1]], value)
        for key, value in found.get("env", {}).items()
    }
    assert "${{" not in found["run"] + "".join(env.values())  # an input pasted into a script could run code
    assert found["shell"] == "bash"
    return found["run"], env


def test_the_action_verifies(here: Path) -> None:
    script, env = step("Verify", path="model")
    done = shell(script, here, **env)
    assert (done.returncode, done.stdout) == (0, "as the manifest says: 6 files, 17942 bytes, every bit of them\n")
    script, env = step("Verify", path="model", against="a run", arguments="--only weights -q")
    assert shell(script, here, **env).returncode == 0
    flip_a_bit(here / "model/model.safetensors")
    assert shell(script, here, **env).returncode == 1
    script, env = step("Verify", path="nothing; touch harm")
    assert shell(script, here, **env).returncode == 3 and not (here / "harm").exists()


@pytest.mark.parametrize("variable", ["OMP_NUM_THREADS", "OMP_THREAD_LIMIT"])
def test_a_limit_on_threads_is_no_limit_on_test_workers(variable: str) -> None:
    """Both variables limit nproc."""
    env = {key: value for key, value in os.environ.items() if not key.startswith(("OMP_", "WORKERS", "MAKE"))}
    run = functools.partial(subprocess.run, cwd=REPOSITORY, capture_output=True, text=True)
    cores = int(run(["sh", "-c", "nproc || echo 2"], env=env).stdout)
    assert f" -n {cores + 1} " in run(["make", "-n", "test"], env=env | {variable: "1"}).stdout


def test_the_workflow_runs_what_the_makefile_has() -> None:
    workflow = yaml.safe_load((REPOSITORY / ".github/workflows/test.yml").read_text())
    commands = [step["run"].split() for job in workflow["jobs"].values() for step in job["steps"] if "run" in step]
    targets = set(re.findall(r"^([a-z-]+):", (REPOSITORY / "Makefile").read_text(), re.MULTILINE))
    for make, *words in commands:
        assert make == "make" and {word for word in words if word not in ("COLD=1", "ALL=1")} <= targets
    assert {"test", "test-fast", "wheel", "faults", "COLD=1", "ALL=1"} <= {word for words in commands for word in words}


def test_the_hook_verifies_every_folder_with_a_manifest(here: Path) -> None:
    (hook,) = HOOKS
    assert {"id", "name", "entry", "language", "files"} <= hook.keys()
    assert re.search(hook["files"], "model/model.safetensors") and not re.search(hook["files"], "main.py")
    shutil.copytree(here / "model", here / "other model")
    git = ["git", "-c", "init.defaultBranch=main"]
    subprocess.run([*git, "init", "-q"], cwd=here, check=True)
    entry = shlex.split(hook["entry"])  # pre-commit splits the entry like this and starts no shell
    assert shell(shlex.join(entry), here).stdout == ""  # the index is still empty
    subprocess.run([*git, "add", "model", "other model"], cwd=here, check=True)
    done = shell(shlex.join(entry), here)
    assert (done.returncode, done.stdout.count("as the manifest says: 6 files")) == (0, 2), done.stderr
    flip_a_bit(here / "model/model.safetensors")
    done = shell(shlex.join(entry), here)
    assert done.returncode == 1 and "has changed" in done.stdout and "as the manifest says: 6 files" in done.stdout
