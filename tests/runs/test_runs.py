"""`ckpt/runs/search.py`: `outputs/RUN/checkpoint-N`: the only run is used and named."""

from __future__ import annotations

import os
import shlex
import shutil
import sys
from pathlib import Path

import pytest

import ckpt
from ckpt.errors import CorruptError, NotFoundError, SeveralRunsError
from ckpt.runs.search import MANIFEST
from tests.support.commands import ckpt as run_ckpt


def make_run(fixtures: Path, outputs: Path, name: str, step: int) -> Path:
    """Make a run like HF Trainer under ZeRO-3, and return its step."""
    return Path(shutil.copytree(fixtures / "lora-zero3", outputs / name / f"checkpoint-{step}"))


def test_an_adapter_is_found_in_its_run(fixtures: Path, tmp_path: Path) -> None:
    """HF Trainer saves a PEFT folder without any sharded checkpoint, here two levels down."""
    ckpt.plan(ckpt.open(fixtures / "lora-zero3"), "peft").run(tmp_path / "outputs/project/run/checkpoint-7")
    base = tmp_path / "base"
    ckpt.plan(ckpt.open(fixtures / "lora-zero3"), "peft").run(tmp_path / "elsewhere")
    report = run_ckpt("merge-lora", fixtures / "lora-zero3", "-o", base)
    assert report.code == 0, report.err
    report = run_ckpt("merge-lora", tmp_path / "outputs", "--base", base, "-o", tmp_path / "merged", "-v")
    assert report.code == 0 and "taking the run project/run" in report.err, report.err


def test_several_are_listed_by_name_with_the_command_for_each(
    fixtures: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    outputs = tmp_path / "outputs"
    for name in ("old", "new run", "middle"):
        make_run(fixtures, outputs, name, 2)
    names = ["middle", "new run", "old"]
    for words in (["convert", "zero3", "peft", "./outputs", "--dry-run"], ["merge-lora", "./outputs"], ["merge-lora"]):
        monkeypatch.chdir(tmp_path if len(words) > 1 else outputs)
        monkeypatch.setattr(sys, "argv", ["ckpt", *words])  # the commands repeat it
        report = run_ckpt(*words)
        assert report.code == 2 and "the folder has several runs" in report.err and "Traceback" not in report.err, (
            report.err
        )
        lines = [line.strip() for line in report.err.splitlines() if line.startswith("  ckpt ")]
        named = [Path(word).name for line in lines for word in shlex.split(line)]
        assert [name for name in named if name in names] == names
    monkeypatch.chdir(tmp_path)
    first = run_ckpt("convert", "zero3", "peft", "outputs/new run", "--dry-run")
    assert first.code == 0, first.err
    with pytest.raises(SeveralRunsError) as error:
        ckpt.open(outputs)
    assert [Path(run).name for run in error.value.runs] == names


def test_runs_of_other_formats_are_not_in_the_way(fixtures: Path, tmp_path: Path) -> None:
    outputs = tmp_path / "outputs"
    make_run(fixtures, outputs, "run", 2)
    ckpt.plan(ckpt.open(outputs / "run"), "peft").run(outputs / "exported")
    assert ckpt.open(outputs, "zero3").path.endswith("checkpoint-2/global_step2")
    assert ckpt.open(outputs, "peft").path.endswith("exported")
    assert "run/checkpoint-2" in ckpt.open(outputs).path, "the other one was made of it"
    (outputs / "exported" / MANIFEST).unlink()
    with pytest.raises(SeveralRunsError):
        ckpt.open(outputs)


def test_runs_at_two_depths_are_several(fixtures: Path, tmp_path: Path) -> None:
    outputs = tmp_path / "outputs"
    make_run(fixtures, outputs / "project", "run", 2)
    shutil.copytree(
        fixtures / "axolotl-fsdp2/outputs/gpt-oss-out", outputs / "final", ignore=lambda *_: {"checkpoint-2"}
    )
    with pytest.raises(SeveralRunsError) as error:
        ckpt.open(outputs)
    assert {os.path.relpath(run, outputs) for run in error.value.runs} == {"final", "project/run"}
    said: list[str] = []
    ckpt.resume(outputs, world_size=3, say=said.append)
    assert "note: taking the run project/run" in said, "a model alone is no run to go on from"


def test_what_ckpt_made_is_taken_where_there_is_nothing_else(fixtures: Path, tmp_path: Path) -> None:
    outputs = Path(shutil.copytree(fixtures / "trl-lora-zero3/outputs", tmp_path / "outputs"))
    run = outputs / "qwen3-lora"
    for format in ("peft", "dcp"):
        ckpt.plan(ckpt.open(run), format).run(outputs / f"qwen3-lora-{format}")
    assert ckpt.open(outputs).path == str(run / "checkpoint-2/global_step2")
    base = fixtures / "trl-lora-zero3/Qwen/Qwen3-30B-A3B"
    report = run_ckpt("merge-lora", outputs, "--base", base, "-o", tmp_path / "merged", "-v")
    assert report.code == 0 and "taking the run qwen3-lora\n" in report.err, report.err
    shutil.rmtree(run)
    with pytest.raises(SeveralRunsError):
        ckpt.open(outputs)
    assert ckpt.open(outputs, "peft").path == str(outputs / "qwen3-lora-peft")


def test_nothing_inside_a_run_is_taken_in_its_place(fixtures: Path, tmp_path: Path) -> None:
    """The run has steps in an unknown format, and contains an export."""
    run = tmp_path / "run"
    ckpt.plan(ckpt.open(fixtures / "toy-zero1"), "hf").run(run / "exported")
    assert ckpt.open(run).path == str(run / "exported")
    (run / "latest").write_text("global_step9")
    with pytest.raises(CorruptError, match="names a missing step folder"):
        ckpt.open(run)
    (run / "latest").unlink()
    (run / "checkpoint-3").mkdir()
    with pytest.raises(NotFoundError):
        ckpt.open(run)


def test_nothing_is_still_nothing(tmp_path: Path) -> None:
    (tmp_path / "a" / "b" / "c").mkdir(parents=True)
    (tmp_path / "a" / "model.txt").write_text("x")
    with pytest.raises(NotFoundError, match="no checkpoint of a known format here"):
        ckpt.open(tmp_path)
