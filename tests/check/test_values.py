"""`ckpt/move/values.py`, `ckpt/commands/check/findings.py`, `finding.py`: `ckpt check --values`."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

import ckpt as toolkit
from ckpt.base.errors import CorruptError
from ckpt.move import values as scanning
from tests.support.commands import ckpt
from tests.support.model_files import save_model
from tests.support.places import REPOSITORY

FIXTURES = REPOSITORY / "fixtures"
#: Dtypes with NaN: its bits, and the bits for infinity if there is one.
DTYPES = {
    "float64": ("u8", 0x7FF8 << 48, 0xFFF0 << 48),
    "float32": ("u4", 0xFFC00000, 0x7F800000),
    "float16": ("u2", 0x7E00, 0xFC00),
    "bfloat16": ("u2", 0xFFC1, 0x7F80),
    "float8_e4m3fn": ("u1", 0xFF, None),
    "float8_e5m2": ("u1", 0x7D, 0xFC),
    "float8_e4m3fnuz": ("u1", 0x80, None),
    "float8_e5m2fnuz": ("u1", 0x80, None),
    "float8_e8m0fnu": ("u1", 0xFF, None),
}


def found(path: Path) -> list[dict[str, Any]]:
    (one,) = toolkit.check(path, values=True).to_json()["checkpoints"]
    values: list[dict[str, Any]] = one["values"]
    return values


def plain(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("name", DTYPES)
def test_every_bit_pattern_is_judged_as_torch_judges_it(name: str) -> None:
    """All bits of the 8-bit and 16-bit dtypes, and sample bits for wider ones."""
    unsigned = DTYPES[name][0]
    size = np.dtype(unsigned).itemsize
    bits = np.arange(1 << 16, dtype=np.uint64) << np.uint64(8 * size - 16 if size > 2 else 0)
    bits = bits[: 1 << 8 * size].astype(unsigned) if size < 2 else bits.astype(unsigned)
    dtype = getattr(torch, name)
    tensor = torch.from_numpy(bits.view(np.uint8).copy()).view(dtype)
    as_double = tensor.double() if name != "float8_e8m0fnu" else tensor.float()
    values = scanning.Values(scanning.BY_NAME[name], (len(bits),))
    for start in range(0, len(bits), 256):
        values.scan(bits[start : start + 256], start)
    nans, infinities = torch.isnan(as_double), torch.isinf(as_double)
    assert (values.nans, values.infinities) == (int(nans.sum()), int(infinities.sum()))
    assert values.first_nan == (int(nans.nonzero()[0]) if nans.any() else None)
    assert values.first_infinity == (int(infinities.nonzero()[0]) if infinities.any() else None)


@pytest.mark.parametrize("name", DTYPES)
def test_nan_and_infinities_are_damage_with_count_and_first_index(name: str, tmp_path: Path) -> None:
    unsigned, nan, infinity = DTYPES[name]
    bits = np.ones((40, 50), unsigned)
    dtype = getattr(torch, name)
    clean = torch.from_numpy(bits.view(np.uint8).copy()).view(dtype)
    good = save_model(tmp_path / "good", {"x": clean})
    assert ckpt("check", good, "--values").code == 0
    bits[3, 7] = bits[39, 49] = nan
    if infinity is not None:
        bits[5, 0] = infinity
    bad = save_model(tmp_path / "bad", {"x": torch.from_numpy(bits.view(np.uint8).copy()).view(dtype)})
    assert ckpt("check", bad, "--bytes").code == 0
    result = ckpt("check", bad, "--values")
    assert result.code == CorruptError.exit_code
    assert "x: 2 of 2000 values are NaN, the first at [3, 7]" in result.out
    assert ("1 of 2000 values are infinite, the first at [5, 0]" in result.out) == (infinity is not None)
    assert "whole" not in result.out.replace(str(tmp_path), "") and "every value was read" not in result.out
    (one,) = found(bad)
    assert one["count"] == 2 + (infinity is not None) and one["first"] == [3, 7] and one["damage"]


def test_packed_fp4_and_integers_have_no_nan(tmp_path: Path) -> None:
    every = torch.arange(256, dtype=torch.uint8)
    tensors = {"a": every, "b": every.to(torch.int8), "c": every.view(torch.int32).clone(), "d": every > 7}
    assert ckpt("check", save_model(tmp_path / "x", tensors), "--values").code == 0


def test_remarkable_values_are_notes(tmp_path: Path) -> None:
    tensors = {
        "dead.weight": torch.zeros(8, 8),
        "minus.weight": torch.tensor([0.0, -0.0, 0.0]),
        "norm.weight": torch.ones(16, dtype=torch.bfloat16),
        "a.weight": plain(8, 8),
        "layers.0.mlp.experts.0.up.weight": plain(8, 8, seed=1),
        "layers.0.mlp.experts.1.up.weight": plain(8, 8, seed=2),
        "layers.0.mlp.experts.2.up.weight": plain(8, 8, seed=1),
        "layers.1.mlp.experts.gate_up_proj": torch.stack([plain(8, 8, seed=n % 3) for n in range(5)]),
        "q.lora_A.weight": plain(4, 8),
        "q.lora_B.weight": torch.zeros(8, 4),
        "attn_mask": torch.full((4, 4), float("-inf")).triu(1),
    }
    source = save_model(tmp_path / "x", tensors)
    result = ckpt("check", source, "--values")
    assert result.code == 0, result.out
    assert "every value was read" in result.out
    kinds = {(one["kind"], one["tensor"]): one for one in found(source)}
    assert kinds.keys() == {
        ("all zero", "dead.weight"),
        ("all zero", "minus.weight"),
        ("constant", "norm.weight"),
        ("equal experts", "layers.0.mlp.experts.0.up.weight"),
        ("equal experts", "layers.1.mlp.experts.gate_up_proj"),
        ("untrained adapter", "q.lora_B.weight"),
        ("not finite", "attn_mask"),
    }
    assert kinds["constant", "norm.weight"]["what"] == "every value is 1"
    assert kinds["equal experts", "layers.0.mlp.experts.0.up.weight"]["what"] == "experts 0, 2"
    assert not any(one["damage"] for one in kinds.values())
    assert "2 tensors all zero: dead.weight, minus.weight" in result.out


@pytest.mark.parametrize("name", ["toy-zero2", "toy-zero3", "dcp-fsdp2", "local-flat", "verl-fsdp2", "megatron-lm"])
def test_every_shard_and_optimizer_state_is_read(name: str, tmp_path: Path) -> None:
    """One NaN is in the last part of the largest state, wherever its bytes are."""
    run = tmp_path / "run"
    shutil.copytree(FIXTURES / name, run, ignore=shutil.ignore_patterns("truth"))
    checkpoint = toolkit.open(run)
    states = [one for one in checkpoint.tensors.values() if one.role not in ("weight", "buffer")]
    tensor = max(states, key=lambda one: one.numel)
    assert ckpt("check", run, "--values").code == 0
    start, _, extent, at, _ = (tensor.runs() or ())[-1]
    data = np.memmap(extent.path, np.uint8, "r+", offset=0)
    size, offset = tensor.dtype.itemsize, extent.offset + at * extent.dtype.itemsize
    data[offset : offset + size] = np.frombuffer(np.float32("nan").tobytes()[-size:], np.uint8)
    data.flush()
    result = ckpt("check", run, "--values")
    assert result.code == CorruptError.exit_code
    index = [int(i) for i in np.unravel_index(start, tensor.shape)]
    assert f"{tensor.fqn} ({tensor.role}): 1 of {tensor.numel} values are NaN, the first at {index}" in result.out


def test_a_tensor_that_does_not_change_is_noted(tmp_path: Path) -> None:
    from peft import LoraConfig, get_peft_model
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "vocab_size": 16}
    model = LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=2, num_key_value_heads=2))
    adapted = get_peft_model(model, LoraConfig(target_modules=["q_proj", "v_proj"], r=2, init_lora_weights=False))
    for step in (1, 2):
        place = tmp_path / f"checkpoint-{step}"
        adapted.save_pretrained(place)
        (place / "trainer_state.json").write_text(json.dumps({"global_step": step}))
        stored = load_file(place / "adapter_model.safetensors")
        for name in stored:
            if "q_proj" not in name:
                stored[name] = stored[name] + step
        save_file(stored, place / "adapter_model.safetensors", metadata={"format": "pt"})
    for path in (tmp_path, tmp_path / "checkpoint-2"):
        report = toolkit.check(path, values=True).to_json()["checkpoints"][0]["values"]
        unchanged = [one["tensor"] for one in report if one["kind"] == "unchanged"]
        assert len(unchanged) == 2 and all("q_proj" in name for name in unchanged)


def test_parts_of_quantized_weights_are_judged_by_their_meaning(tmp_path: Path) -> None:
    blocks, scales = torch.zeros(2, 8, 2, 16, dtype=torch.uint8), torch.full((2, 8, 2), 120, dtype=torch.uint8)
    blocks += 1
    config = {"quantization_config": {"quant_method": "mxfp4"}}
    tensors = {"x.experts.w_blocks": blocks, "x.experts.w_scales": scales}
    assert ckpt("check", save_model(tmp_path / "good", tensors, config), "--values").code == 0
    scales[1, 2, 1] = 255
    result = ckpt("check", save_model(tmp_path / "nan", tensors, config), "--values")
    assert result.code == CorruptError.exit_code
    assert "x.experts.w_scales: 1 of 32 values are NaN, the first at [1, 2, 1]" in result.out
    gptq = {"quantization_config": {"quant_method": "gptq", "bits": 4, "group_size": 64}}
    parts = {
        "a.qweight": torch.ones(16, 8, dtype=torch.int32),
        "a.qzeros": torch.ones(2, 1, dtype=torch.int32),
        "a.scales": torch.ones(2, 8, dtype=torch.float16) / 3,
        "a.g_idx": torch.arange(128, dtype=torch.int32) // 64,
    }
    assert ckpt("check", save_model(tmp_path / "gptq", parts, gptq), "--values").code == 0
    parts["a.g_idx"][100] = 2
    result = ckpt("check", save_model(tmp_path / "gidx", parts, gptq), "--values")
    assert result.code == CorruptError.exit_code and "not in 0 to 1, the first at [100]" in result.out
    fp8 = {"quantization_config": {"quant_method": "fp8", "weight_block_size": [4, 4]}}
    tensors = {"a.weight": plain(8, 8).to(torch.float8_e4m3fn), "a.weight_scale_inv": plain(2, 2).abs()}
    tensors["a.weight_scale_inv"][1, 0] = -1
    (one,) = found(save_model(tmp_path / "fp8", tensors, fp8))
    assert one["kind"] == "scale out of range" and one["first"] == [1, 0]


def test_empty_tensors_and_scalars(tmp_path: Path) -> None:
    assert (
        ckpt("check", save_model(tmp_path / "empty", {"x": torch.zeros(0, 3), "y": torch.tensor(1.5)}), "--values").code
        == 0
    )
    assert found(tmp_path / "empty") == []
