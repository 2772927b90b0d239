"""`ckpt/__init__.py`: a user's script type-checks and runs, and mypy finds its mistakes."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.places import FIXTURES, REPOSITORY

SCRIPT = REPOSITORY / "tests/support/typed_script.py"
MISTAKES = """
import ckpt
ckpt.plan("run", "hf", dtype="bf17")
ckpt.convert("run", "hf", "out", world_size="two")
ckpt.verify("a").equal
ckpt.estimate("model", gpu=8)
ckpt.hash("run").hole
ckpt.convert("run", "megatron", "out", tp="two")
ckpt.merge_lora("adapter", "out", dtyp="bf16")
"""


def python(*words: str | Path, cwd: Path) -> subprocess.CompletedProcess[str]:
    env = os.environ | {"PYTHONPATH": str(REPOSITORY), "MYPYPATH": str(REPOSITORY)}
    return subprocess.run([sys.executable, *words], cwd=cwd, env=env, capture_output=True, text=True, check=False)


def mypy(script: Path) -> list[str]:
    """Return `mypy --strict`'s errors in a script. For ckpt itself it reuses the cache of `make lint`."""
    places = (f"--config-file={REPOSITORY / 'pyproject.toml'}", f"--cache-dir={REPOSITORY / '.mypy_cache'}")
    done = python("-m", "mypy", *places, script, cwd=script.parent)
    return done.stdout.splitlines()


def test_a_script_that_uses_all_of_it_is_typed() -> None:
    assert mypy(SCRIPT)[-1].startswith("Success")


def test_mistakes_are_seen_before_it_runs(tmp_path: Path) -> None:
    script = tmp_path / "mistakes.py"
    script.write_text(MISTAKES)
    lines = [line.split(":")[1] for line in mypy(script) if ": error: " in line]
    assert lines == ["3", "4", "5", "6", "7", "8", "9"]


def test_pyright_agrees(tmp_path: Path) -> None:
    program = shutil.which("pyright")
    if program is None:
        pytest.skip("pyright is not installed")
    shutil.copy(SCRIPT, tmp_path)
    (tmp_path / "mistakes.py").write_text(MISTAKES)
    config = {"extraPaths": [str(REPOSITORY)], "pythonVersion": "3.11", "typeCheckingMode": "strict"}
    (tmp_path / "pyrightconfig.json").write_text(json.dumps(config))
    command = [program, "--outputjson", "--pythonpath", sys.executable]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    found = [
        (Path(one["file"]).name, one["range"]["start"]["line"] + 1)
        for one in json.loads(done.stdout)["generalDiagnostics"]
    ]
    assert set(found) == {("mistakes.py", line) for line in range(3, 10)}


def test_the_script_runs(tmp_path: Path) -> None:
    shutil.copytree(FIXTURES / "trl-zero3/outputs/qwen3-sft", tmp_path / "run")
    shutil.copytree(FIXTURES / "trl-lora-zero3/outputs/qwen3-lora", tmp_path / "lora")
    shutil.copytree(FIXTURES / "trl-lora-zero3/Qwen", tmp_path / "Qwen")
    done = python(SCRIPT, "run", "lora", "out", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "to which repository?" in done.stdout
