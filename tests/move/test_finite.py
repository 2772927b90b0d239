"""`ckpt/move/finite.py`: numbers that a cast would make infinite."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import ckpt
from ckpt.errors import LossError
from ckpt.move import finite
from tests.support.commands import ckpt as command
from tests.support.model_files import save_model

INFINITY = float("inf")
TOY = {"model_type": "toy", "architectures": ["Toy"]}


@pytest.mark.parametrize("target", ["hf", "dcp"])
def test_numbers_that_would_become_infinite_are_refused(
    target: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(finite, "_STEP", 7)
    weight = torch.ones(3, 5)
    weight[1, 4], weight[2, 3] = -65520.0, 65520.0
    source = save_model(tmp_path / "model", {"a.weight": torch.full((4,), INFINITY), "b.weight": weight}, TOY)
    options = ("-o", tmp_path / "out", "--dtype", "fp16")
    for workers in ("1", "8"):
        result = command("convert", "hf", target, source, *options, "--workers", workers)
        assert result.code == 6
        assert "tensor: b.weight" in result.err and "hint: use --dtype bf16 or --dtype fp32" in result.err
        assert "2 of 15 float32 numbers would be infinite, the first at [1, 4]" in result.err
    assert [one.name for one in tmp_path.iterdir()] == ["model"]
    assert command("convert", "hf", target, source, "-o", tmp_path / "kept", "--dtype", "bf16").code == 0


def test_bf16_of_a_masks_numbers_is_torchs(tmp_path: Path) -> None:
    values = torch.tensor([torch.finfo(torch.float32).min, 3.4e38, 1e30])
    source = save_model(tmp_path / "model", {"a.weight": values}, TOY)
    ckpt.convert(source, "hf", tmp_path / "out", dtype="bf16")
    assert torch.equal(load_file(tmp_path / "out" / "model.safetensors")["a.weight"], values.bfloat16())


def test_views_raise_the_error_too(tmp_path: Path) -> None:
    source = save_model(tmp_path / "model", {"a.weight": torch.tensor([1.0, 1e30])}, TOY)
    with (
        ckpt.plan(source, "hf", dtype="fp16").open("model.safetensors") as view,
        pytest.raises(LossError, match="large"),
    ):
        view.read()


def test_infinities_of_the_source_are_kept(tmp_path: Path) -> None:
    values = torch.tensor([INFINITY, -INFINITY, float("nan"), 65519.0, 1e-30])
    source = save_model(tmp_path / "model", {"a.weight": values}, TOY)
    ckpt.convert(source, "hf", tmp_path / "out", dtype="fp16")
    found = load_file(tmp_path / "out" / "model.safetensors")["a.weight"]
    assert torch.equal(found.nan_to_num(7), values.half().nan_to_num(7))
