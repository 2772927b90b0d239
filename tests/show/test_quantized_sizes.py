"""`ckpt/commands/inspect/overview.py`: bits per parameter and bytes of quantized weights."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.quantized.test_rounding import CASES, NAME, plain_weight, save
from tests.support.commands import ckpt

NUMBERS = {"fp8": 8 + 32 * 8 / 8192, "modelopt nvfp4": 4 + 8 / 16 + 32 / 8192, "compressed int8": 8 + 16 / 128}


@pytest.mark.parametrize("name", NUMBERS)
def test_inspect_shows_bits_per_parameter(name: str, tmp_path: Path) -> None:
    case = CASES[name]
    folder = save(tmp_path / "model", case.quantize(plain_weight()), case.config)
    found = json.loads(ckpt("inspect", folder, "--json").out)["quantized"]
    quantized, plain = found["kinds"]
    tensors = load_file(folder / "model.safetensors")
    sizes = {tensor: one.numel() * one.element_size() for tensor, one in tensors.items()}
    assert quantized["weights"] == 1 and quantized["parameters"] == 64 * 128
    assert quantized["bytes"] == sum(size for tensor, size in sizes.items() if NAME in tensor)
    assert quantized["bits_per_parameter"] == NUMBERS[name]
    assert (plain["kind"], plain["bytes"], plain["bits_per_parameter"]) == ("bfloat16", 256, 16)
    assert found["bits_per_parameter"] == 8 * sum(sizes.values()) / (64 * 128 + 128)
    lines = ckpt("inspect", folder).out
    assert f"bits        {found['bits_per_parameter']:.4g} per parameter\n" in lines
    assert f"in 1 weight, 8,192 parameters with {NUMBERS[name]:.4g} bits\n" in lines


def test_inspect_counts_four_bit_weights_without_reading_them(tmp_path: Path) -> None:
    case = CASES["nf4"]
    folder = save(tmp_path / "model", case.quantize(plain_weight()), case.config)
    quantized, _ = json.loads(ckpt("inspect", folder, "--json").out)["quantized"]["kinds"]
    assert quantized["parameters"] == 64 * 128


def test_inspect_of_a_plain_model_shows_no_bits(tmp_path: Path) -> None:
    folder = save(tmp_path / "model", {NAME: torch.ones(4, 4)}, None)
    assert json.loads(ckpt("inspect", folder, "--json").out)["quantized"] is None
    assert "bits " not in ckpt("inspect", folder).out
