"""A path relative to the working directory means the same checkpoint as the full path."""

from __future__ import annotations

from pathlib import Path

import pytest

import ckpt

PLACES = (
    "lerobot/checkpoints/000002",
    "lightning/checkpoints/last.ckpt",
    "nemo/model/weights",
    "nemo-lora/lora-tp2/weights",
    "ms-swift/dense-tp2-pp2/checkpoint-2/iter_0000002",
    "neox-zero1/global_step2",
    "torchtitan-llama3/step-2",
    "trainer-zero2/checkpoint-2/global_step2",
    "trl-fsdp2/outputs/llama-sft/checkpoint-2/pytorch_model_fsdp_0",
    "verl-fsdp2/global_step_3/actor",
)


@pytest.mark.parametrize("place", PLACES)
def test_a_relative_path_means_the_same_checkpoint(fixtures: Path, monkeypatch: pytest.MonkeyPatch, place: str) -> None:
    """Readers look for the config, the step and the run's record in the folders around a checkpoint."""
    folder = fixtures / place
    whole, checked = ckpt.open(folder), ckpt.check(folder)
    inner = next((entry.name for entry in folder.iterdir() if entry.is_dir()), None)
    for here, path in (
        (folder, "."),
        (folder.parent, folder.name),
        (folder.parent, f"../{folder.parent.name}/{folder.name}"),
    ):
        monkeypatch.chdir(here)
        found = ckpt.open(path)
        assert (found.format, found.state.step, found.config) == (whole.format, whole.state.step, whole.config)
        assert found.tensors.keys() == whole.tensors.keys()
        assert [one.problems for one in ckpt.check(path).checkpoints] == [one.problems for one in checked.checkpoints]
    if inner is not None:
        monkeypatch.chdir(folder / inner)
        assert ckpt.open("..").tensors.keys() == whole.tensors.keys()
        assert ckpt.check("..").exit_code == checked.exit_code
