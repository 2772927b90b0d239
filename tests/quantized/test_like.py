"""`converters/quantized/original.py`, `converters/quantized/methods/mxfp4.py`: `--like`.

A fine-tune is quantized as the original was.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.quantized.test_quantize import METHODS, SIZES, dequantized, quantize, saved
from tests.support.adapters import same, weights
from tests.support.commands import ckpt

TRAINED = {
    "llama": "model.layers.1.mlp.up_proj.weight",
    "gpt_oss": "model.layers.1.mlp.experts.down_proj",
}
CASES = [*(("llama", method) for method in METHODS), ("gpt_oss", "mxfp4")]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    from transformers import GptOssConfig, GptOssForCausalLM, LlamaConfig, LlamaForCausalLM

    torch.manual_seed(5)
    folder = tmp_path_factory.mktemp("like")
    experts = {**SIZES, "hidden_size": 96, "intermediate_size": 64, "num_local_experts": 3, "num_experts_per_tok": 2}
    return {
        "llama": saved(LlamaForCausalLM(LlamaConfig(**SIZES)), folder / "llama"),
        "gpt_oss": saved(GptOssForCausalLM(GptOssConfig(**experts)), folder / "gpt_oss"),
    }


def original(model: Path, method: str, folder: Path) -> Path:
    """Return a quantized model whose config differs from ckpt's own, as a release's does."""
    out = quantize(model, folder / "original", method)
    config = json.loads((out / "config.json").read_text())
    config["quantization_config"]["producer"] = {"name": "someone"}
    (out / "config.json").write_text(json.dumps(config))
    return out


def trained(folder: Path, name: str, row: int = 5) -> dict[str, torch.Tensor]:
    """Change one row of one tensor in a folder, and return all tensors."""
    tensors = weights(folder)
    tensors[name].view(-1, tensors[name].shape[-1])[row] *= 1.5
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return tensors


@pytest.mark.parametrize(("model", "method"), CASES)
def test_unchanged_model_has_the_bytes_of_the_original(
    model: str, method: str, models: dict[str, Path], tmp_path: Path
) -> None:
    first = original(models[model], method, tmp_path)
    dequantized(first)
    again = quantize(tmp_path / "original-plain", tmp_path / "again", method, "--like", str(first))
    for name in ("model.safetensors",):
        assert (first / name).read_bytes() == (again / name).read_bytes()
    assert json.loads((first / "config.json").read_text()) == json.loads((again / "config.json").read_text())


@pytest.mark.parametrize(("model", "method"), CASES)
def test_only_trained_tensors_have_other_bytes(
    model: str, method: str, models: dict[str, Path], tmp_path: Path
) -> None:
    first = original(models[model], method, tmp_path)
    plain, name = dequantized(first), TRAINED[model]
    after = trained(tmp_path / "original-plain", name)
    again = quantize(tmp_path / "original-plain", tmp_path / "again", method, "--like", str(first), "--verify")
    before, now = weights(first), weights(again)
    assert before.keys() == now.keys()
    changed = {one for one in before if not same(before[one], now[one])}
    assert changed and all(one.startswith(name.removesuffix(".weight")) for one in changed)
    assert ckpt("check", "--bytes", again).code == 0
    values = dequantized(again)
    off = (values[name].float() - after[name].float()).abs().max() / after[name].float().abs().max()
    assert 0 < off < 0.2 and not torch.equal(values[name], plain[name])


def test_rows_of_a_matrix_without_training_are_kept(models: dict[str, Path], tmp_path: Path) -> None:
    first = original(models["llama"], "int8", tmp_path)
    dequantized(first)
    trained(tmp_path / "original-plain", TRAINED["llama"], row=7)
    again = quantize(tmp_path / "original-plain", tmp_path / "again", "int8", "--like", str(first))
    before, after = (weights(folder)[TRAINED["llama"]] for folder in (first, again))
    assert [row for row in range(len(before)) if not torch.equal(before[row], after[row])] == [7]


def test_workers_do_not_change_the_bytes(models: dict[str, Path], tmp_path: Path) -> None:
    first = original(models["gpt_oss"], "mxfp4", tmp_path)
    dequantized(first)
    trained(tmp_path / "original-plain", TRAINED["gpt_oss"])
    found = {
        quantize(tmp_path / "original-plain", tmp_path / number, "mxfp4", "--like", str(first), "--workers", number)
        .joinpath("model.safetensors")
        .read_bytes()
        for number in ("1", "3")
    }
    assert len(found) == 1


def cached(model: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """Copy a model into a Hugging Face cache, and return its id."""
    folder = model.parent / "hub/models--ORG--NAME"
    for name in ("blobs", "refs", f"snapshots/{'0' * 40}"):
        (folder / name).mkdir(parents=True)
    (folder / "refs/main").write_text("0" * 40)
    for file in model.iterdir():
        shutil.copy(file, folder / "blobs" / file.name)
        (folder / f"snapshots/{'0' * 40}" / file.name).symlink_to(f"../../blobs/{file.name}")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(folder.parent))
    return "ORG/NAME"


def test_original_may_be_a_cached_hub_model(
    models: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = original(models["llama"], "int8", tmp_path)
    dequantized(first)
    name = cached(first, monkeypatch)
    again = quantize(tmp_path / "original-plain", tmp_path / "again", "int8", "--like", name)
    assert "like" in json.loads((again / "ckpt-manifest.json").read_text())["quantization"]
    assert (first / "model.safetensors").read_bytes() == (again / "model.safetensors").read_bytes()


def test_manifest_records_the_rounding_rule(models: dict[str, Path], tmp_path: Path) -> None:
    out = quantize(models["gpt_oss"], tmp_path / "out", "mxfp4")
    recorded = json.loads((out / "ckpt-manifest.json").read_text())["quantization"]
    assert recorded["method"] == "mxfp4"
    assert "triton_kernels" in recorded["rule"]
    assert ckpt("verify", out).code == 0


def test_partial_blocks_of_an_original_are_kept(tmp_path: Path) -> None:
    """DeepSeek-V3 has such a matrix: `kv_a_proj_with_mqa`."""
    first, name = tmp_path / "first", "model.layers.0.self_attn.kv_a_proj_with_mqa.weight"
    torch.manual_seed(9)
    plain = torch.randn(200, 192).to(torch.bfloat16)
    codes = torch.nn.functional.pad(plain.float(), (0, 64, 0, 56)).view(2, 128, 2, 128)
    scale = codes.abs().amax(dim=(1, 3)) / 440  # not Fp8Quantize's
    codes = (codes / scale[:, None, :, None]).view(256, 256)[:200, :192].to(torch.float8_e4m3fn)
    first.mkdir()
    tensors = {name: codes.contiguous(), f"{name}_scale_inv": scale, "model.norm.weight": torch.ones(192)}
    save_file(tensors, first / "model.safetensors", metadata={"format": "pt"})
    entry = {"quant_method": "fp8", "weight_block_size": [128, 128], "activation_scheme": "dynamic", "fmt": "e4m3"}
    config = {"model_type": "toy", "num_hidden_layers": 1, "dtype": "bfloat16", "quantization_config": entry}
    (first / "config.json").write_text(json.dumps(config))
    values = dequantized(first)
    again = quantize(tmp_path / "first-plain", tmp_path / "again", "fp8-block", "--like", str(first))
    assert (first / "model.safetensors").read_bytes() == (again / "model.safetensors").read_bytes()
    tuned = {**values, name: values[name].clone()}
    tuned[name][199, 191] = 9.0
    save_file(tuned, tmp_path / "first-plain/model.safetensors", metadata={"format": "pt"})
    changed = dequantized(quantize(tmp_path / "first-plain", tmp_path / "tuned", "fp8-block", "--like", str(first)))
    assert (changed[name].float() - tuned[name].float()).abs().max() <= 9.0 * 16 / 448 + 0.05
    assert changed[name][199, 191] == 9.0


# -- refusals ------------------------------------------------------------------------------------------------


def refusal(source: Path, out: Path, *words: str) -> Any:
    result = ckpt("convert", "auto", "hf", source, "-o", out, *words)
    assert not out.exists()
    return result


def test_another_model_is_refused(models: dict[str, Path], tmp_path: Path) -> None:
    first, out = original(models["llama"], "int8", tmp_path), tmp_path / "out"
    other = refusal(models["gpt_oss"], out, "--quantize", "mxfp4", "--like", str(first))
    assert (other.code, "--like names another model" in other.err) == (2, True), other.err
    tensors, name = weights(models["llama"]), "model.layers.0.mlp.down_proj.weight"
    small = tmp_path / "small"
    shutil.copytree(models["llama"], small)
    save_file({**tensors, name: tensors[name][:, :128].clone()}, small / "model.safetensors", metadata={"format": "pt"})
    shape = refusal(small, out, "--quantize", "int8", "--like", str(first))
    assert (shape.code, "the model given with --like has other tensors" in shape.err) == (6, True), shape.err
    assert name in shape.err
    del tensors[name]
    save_file(tensors, small / "model.safetensors", metadata={"format": "pt"})
    missing = refusal(small, out, "--quantize", "int8", "--like", str(first))
    assert (missing.code, "expected: no such tensor" in missing.err) == (6, True), missing.err


def test_original_that_cannot_be_imitated_is_refused(models: dict[str, Path], tmp_path: Path) -> None:
    first, out, plain = original(models["llama"], "int8", tmp_path), tmp_path / "out", models["llama"]
    method = refusal(plain, out, "--quantize", "fp8-dynamic", "--like", str(first))
    assert (method.code, "writes other parts than the model given with --like" in method.err) == (2, True)
    not_quantized = refusal(plain, out, "--quantize", "int8", "--like", str(plain))
    assert (not_quantized.code, "has no quantized weights" in not_quantized.err) == (2, True)
    alone = refusal(plain, out, "--like", str(first))
    assert (alone.code, "--like needs --quantize METHOD" in alone.err) == (2, True)
    tensors = load_file(first / "model.safetensors")
    del tensors["model.layers.0.self_attn.q_proj.weight_scale"]
    save_file(tensors, first / "model.safetensors", metadata={"format": "pt"})
    damaged = refusal(plain, out, "--quantize", "int8", "--like", str(first))
    assert (damaged.code, "quantized weights are not complete" in damaged.err) == (4, True)


def test_scales_for_attention_are_copied(models: dict[str, Path], tmp_path: Path) -> None:
    """The config that is copied promises them."""
    first, out = original(models["llama"], "fp8-dynamic", tmp_path), tmp_path / "out"
    scale = "model.layers.1.self_attn.k_scale"
    stored = {**weights(first), scale: torch.tensor([0.02])}
    save_file(stored, first / "model.safetensors", metadata={"format": "pt"})
    words = ("--quantize", "fp8-dynamic", "--like", str(first))
    result = ckpt("convert", "hf", "hf", models["llama"], "-o", out, *words, "-v")
    assert result.code == 0 and f"1 scale for attention copied from {first}, for example {scale}" in result.err
    assert "plain tensor" not in result.err, "quantized weights are no plain tensors"
    assert weights(out).keys() == stored.keys()
    assert all(same(one, stored[name]) for name, one in weights(out).items())
