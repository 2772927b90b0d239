"""`ckpt/runs/source_checks.py`: empty ZeRO-3 placeholders saved as weights, in every kind of file."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file

from tests.support.building import groups_of, write_stage3
from tests.support.commands import ckpt

Weights = dict[str, torch.Tensor]
GATHERED = {"a.weight": torch.ones(3, 4), "a.bias": torch.ones(3), "b.weight": torch.ones(2, 3)}
EMPTY = {"a.weight": torch.empty(0), "a.bias": torch.ones(3), "b.weight": torch.empty(0)}
SENTENCE = "tensors are empty: placeholders"


def torch_file(folder: Path, weights: Weights) -> Path:
    torch.save(weights, folder / "model.pt")
    return folder / "model.pt"


def nested_file(folder: Path, weights: Weights) -> Path:
    torch.save({"model": weights, "step": 2}, folder / "model.pt")
    return folder


def bin_file(folder: Path, weights: Weights) -> Path:
    torch.save(weights, folder / "pytorch_model.bin")
    return folder


def safetensors_file(folder: Path, weights: Weights) -> Path:
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def dcp_folder(folder: Path, weights: Weights) -> Path:
    dcp.save({"model": weights}, checkpoint_id=folder / "step-2", no_dist=True)
    return folder / "step-2"


def adapter(folder: Path, weights: Weights) -> Path:
    factors = {"lora_A": weights["a.weight"], "lora_B": weights["b.weight"]}
    named = {f"base_model.model.q.{name}.weight": tensor for name, tensor in factors.items()}
    save_file(named, folder / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": 3, "lora_alpha": 3, "target_modules": ["q"]}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return folder


EVERY = pytest.mark.parametrize("write", [torch_file, nested_file, bin_file, safetensors_file, dcp_folder, adapter])


@EVERY
def test_placeholders_are_no_weights(tmp_path: Path, write: Callable[[Path, Weights], Path]) -> None:
    (tmp_path / "run").mkdir()
    path = write(tmp_path / "run", EMPTY)
    for command in (
        ("check", path),
        ("verify", path, path),
        ("convert", "auto", "full", path, "-o", tmp_path / "out"),
        ("convert", "auto", "hf", path, "-o", tmp_path / "out", "--names", "own"),
    ):
        report = ckpt(*command)
        assert report.code == 4, report
        assert SENTENCE in report.out + report.err, report
        assert "does the config belong" not in report.err and "--names own" not in report.err
    assert not (tmp_path / "out").exists()


@EVERY
def test_gathered_weights_are_whole(tmp_path: Path, write: Callable[[Path, Weights], Path]) -> None:
    (tmp_path / "run").mkdir()
    report = ckpt("check", write(tmp_path / "run", GATHERED))
    assert report.code == 0 and "empty" not in report.out, report


@pytest.mark.parametrize(
    "own",
    [
        {"device_tracker": torch.empty(0)},
        {"none.weight": torch.empty(0, 4), "none.bias": torch.empty(0)},
        {"other.weight": torch.empty(4, 0)},
    ],
    ids=["a buffer", "a layer without outputs", "a layer without inputs"],
)
def test_a_model_with_an_empty_tensor_of_its_own_is_whole(tmp_path: Path, own: Weights) -> None:
    report = ckpt("check", torch_file(tmp_path, GATHERED | own))
    assert report.code == 0, report


@pytest.mark.parametrize("place", ["run", "run/final", "run/checkpoint-2"])
def test_the_place_of_the_weights_is_named(tmp_path: Path, place: str) -> None:
    """The hint works when typed; a DeepSpeed step from another model is not named."""
    groups = groups_of({"model.a.weight": (3, 4), "model.a.bias": (3,), "model.b.weight": (2, 3)})
    write_stage3(tmp_path / "run" / "checkpoint-2", groups, 2)
    (tmp_path / place).mkdir(exist_ok=True)
    model = safetensors_file(tmp_path / place, EMPTY) / "model.safetensors"
    step = tmp_path / "run" / "checkpoint-2" / "global_step2"
    report = ckpt("check", model)
    assert report.code == 4 and f"ZeRO-3 placeholders; the weights are in {step}" in report.out, report
    refused = ckpt("convert", "auto", "full", model, "-o", tmp_path / "out")
    assert refused.code == 4 and f"hint: give {step}" in refused.err, refused
    assert ckpt("convert", "auto", "full", step, "-o", tmp_path / "out").code == 0
    shutil.rmtree(tmp_path / "run" / "checkpoint-2" / "global_step2")
    write_stage3(tmp_path / "run" / "checkpoint-2", groups_of({"other.weight": (3, 4)}), 2, tag="global_step4")
    assert "the weights are in" not in ckpt("check", model).out
