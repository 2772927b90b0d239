"""`ckpt/runs/foreign.py`: another program's checkpoint is named, with a way out."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from ckpt.errors import IncompleteError, NotFoundError, UsageError
from tests.support.commands import ckpt

FIXTURES = Path("fixtures")
PLACES = {
    "GGUF": ("model.gguf", b"GGUF\x03\0\0\0"),
    "Orbax": ("5/default/manifest.ocdbt", b""),
    "torch_checkpointing": ("step-5/metadata.pkl", b"\x80\x04N."),
}


@pytest.mark.parametrize("program", PLACES)
def test_another_programs_checkpoint_is_named(program: str, tmp_path: Path) -> None:
    name, content = PLACES[program]
    place = tmp_path / "run"
    file = place / name
    file.parent.mkdir(parents=True)
    file.write_bytes(content)
    if program == "torch_checkpointing":
        for rank in (0, 1):
            (file.parent / f"checkpoint_{rank}.safetensors").write_bytes(b"")
    for command in (("inspect", place), ("convert", "auto", "hf", place, "-o", tmp_path / "out")):
        done = ckpt(*command)
        assert done.code == NotFoundError.exit_code, done.err
        assert f"checkpoint of {program}" in done.err and "hint:" in done.err


def test_a_gguf_file_next_to_a_model_is_no_reason_to_refuse(tmp_path: Path) -> None:
    step = shutil.copytree(FIXTURES / "trainer-plain" / "checkpoint-2", tmp_path / "checkpoint-2")
    (step / "model.gguf").write_bytes(b"GGUF\x03\0\0\0")
    assert ckpt("inspect", step).code == 0


def test_a_file_called_gguf_of_another_kind_is_not_named_so(tmp_path: Path) -> None:
    (tmp_path / "model.gguf").write_bytes(b"something else")
    assert "llama.cpp" not in ckpt("inspect", tmp_path).err


def test_an_empty_folder_is_called_so(tmp_path: Path) -> None:
    assert "an empty folder" in ckpt("inspect", tmp_path).err


def test_buckets_of_the_hub_are_named() -> None:
    done = ckpt("inspect", "hf://buckets/org/name/step")
    assert done.code == UsageError.exit_code
    assert "`hf sync hf://buckets/org/name FOLDER`" in done.err


def test_a_config_folder_without_config(tmp_path: Path) -> None:
    (tmp_path / "run" / "huggingface").mkdir(parents=True)
    (tmp_path / "run" / "huggingface" / "config.json").write_text("{}")
    (tmp_path / "empty").mkdir()
    step = FIXTURES / "dcp-fsdp2" / "step-2"
    done = ckpt("inspect", step, "--config", tmp_path / "empty")
    assert done.code == NotFoundError.exit_code and "this folder has no config.json" in done.err
    done = ckpt("inspect", step, "--config", tmp_path / "run")
    assert f"use --config {tmp_path / 'run' / 'huggingface'}" in done.err
    assert ckpt("inspect", step, "--config", tmp_path / "run" / "huggingface").code == 0


def test_missing_metadata_of_dcp_is_a_hidden_file(tmp_path: Path) -> None:
    step = shutil.copytree(FIXTURES / "dcp-fsdp2" / "step-2", tmp_path / "step-2")
    (step / ".metadata").unlink()
    for command in (("inspect", step), ("check", step), ("resume", step)):
        done = ckpt(*command)
        assert done.code == IncompleteError.exit_code
        assert "`.metadata` is a hidden file that `cp *` skips" in done.out + done.err
    assert "hidden file" not in ckpt("check", FIXTURES / "dcp-fsdp2" / "step-2").out
