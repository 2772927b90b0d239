"""`ckpt/__init__.py`: a user's script type-checks and runs, and mypy finds its mistakes."""

from __future__ import annotations

import json
import os
import runpy
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


def test_a_script_that_uses_all_of_it_is_typed_and_mistakes_are_seen(tmp_path: Path) -> None:
    """`mypy --strict` reuses the cache of `make lint` for ckpt itself."""
    script = tmp_path / "mistakes.py"
    script.write_text(MISTAKES)
    env = os.environ | {"PYTHONPATH": str(REPOSITORY), "MYPYPATH": str(REPOSITORY)}
    places = (f"--config-file={REPOSITORY / 'pyproject.toml'}", f"--cache-dir={REPOSITORY / '.mypy_cache'}")
    words = [sys.executable, "-m", "mypy", *places, SCRIPT, script]
    done = subprocess.run(words, cwd=tmp_path, env=env, capture_output=True, text=True, check=False)
    found = [line.split(":")[:2] for line in done.stdout.splitlines() if ": error: " in line]
    assert found == [["mistakes.py", str(line)] for line in range(3, 10)], done.stdout
    assert done.stdout.splitlines()[-1].endswith("in 1 file (checked 2 source files)"), done.stdout


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


def test_the_script_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    shutil.copytree(FIXTURES / "trl-zero3/outputs/qwen3-sft", tmp_path / "run")
    shutil.copytree(FIXTURES / "trl-lora-zero3/outputs/qwen3-lora", tmp_path / "lora")
    shutil.copytree(FIXTURES / "trl-lora-zero3/Qwen", tmp_path / "Qwen")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", [str(SCRIPT), "run", "lora", "out"])
    runpy.run_path(str(SCRIPT), run_name="__main__")
    assert "to which repository?" in capsys.readouterr().out
