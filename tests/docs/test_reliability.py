"""docs/reliability.md: which folders may be symbolic links."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tests.support.commands import ckpt

#: A fixture's folder to replace with a symbolic link, and the exit code of a conversion.
LINKED = {
    "the folder of a step, Trainer's": ("trl-fsdp2/outputs/llama-sft", "checkpoint-2", 0),
    "the folder of a step, DCP's": ("dcp-fsdp2", "step-2", 0),
    "the folder of a step, Megatron's": ("megatron-dist-flattened", "iter_0000002", 0),
    "a folder of DeepSpeed's": ("toy-zero3", "global_step2", 5),
    "a folder within a step": ("trl-zero3/outputs/qwen3-sft", "checkpoint-2/global_step2", 5),
    "a folder of Accelerate's": ("trl-fsdp2/outputs/llama-sft", "checkpoint-2/pytorch_model_fsdp_0", 5),
}


@pytest.mark.parametrize("case", LINKED)
def test_a_folder_that_is_a_link(case: str, fixtures: Path, tmp_path: Path) -> None:
    source, inner, code = LINKED[case]
    folder = tmp_path / "run" / inner
    shutil.copytree(fixtures / source, tmp_path / "run", ignore=shutil.ignore_patterns("truth"))
    folder.rename(tmp_path / "elsewhere")
    folder.symlink_to(tmp_path / "elsewhere")
    assert ckpt("convert", "auto", "dcp", tmp_path / "run", "-o", tmp_path / "out").code == code
    assert (tmp_path / "out").exists() == (code == 0)
    assert (ckpt("check", tmp_path / "run").code == 0) == (code == 0)
