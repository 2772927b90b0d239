"""`converters/quantized/_packed_weight.py`, `quantize.py`, `converters/quantized/methods/fp8.py`: quantizing.

The bits are equal to the owning library's: transformers' `Fp8Quantize` here, and the parts recorded by
`fixtures/make_quantized_weights.py`.
"""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, safe_open, save_file

from ckpt import api
from ckpt.compare.transformers_loads import Loading
from ckpt.plan import services
from ckpt.plan.dtypes import BFLOAT16
from ckpt.plan.precision import Choice
from converters.quantized._packed_weight import FusedWeights, PlainWeight
from converters.quantized.floats import e2m1_codes, e4m3_bytes
from converters.quantized.methods import quantizer_of
from converters.quantized.methods.compressed_tensors import _mxfp4_bits, _mxfp4_rows
from converters.quantized.methods.fp8 import _quantized_bits, _quantized_rows
from tests.support.adapters import differing, same, weights
from tests.support.commands import ckpt
from tests.support.model_files import save_model
from tests.support.places import REPOSITORY

BF16, F8 = torch.bfloat16, torch.float8_e4m3fn
CASES = sorted((REPOSITORY / "fixtures").glob("quantize-*/*.safetensors"))
METHODS = ("fp8-block", "fp8-dynamic", "int8", "mxfp4", "nvfp4a16")
SIZES: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "head_dim": 32,
    "dtype": BF16,
}


def saved(model: Any, folder: Path) -> Path:
    """Save a model with weights in many sizes, and ties between two numbers of each format."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(torch.logspace(-2, 1, parameter.shape[-1]))
    model.to(BF16).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(1)
    config = LlamaConfig(**SIZES, tie_word_embeddings=True)
    return saved(LlamaForCausalLM(config), tmp_path_factory.mktemp("quantize") / "llama")


@pytest.fixture(scope="module")
def moe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    torch.manual_seed(2)
    config = Qwen3MoeConfig(**SIZES, moe_intermediate_size=128, num_experts=3, num_experts_per_tok=2)
    return saved(Qwen3MoeForCausalLM(config), tmp_path_factory.mktemp("quantize") / "moe")


@pytest.fixture(scope="module")
def gpt_oss(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from transformers import GptOssConfig, GptOssForCausalLM

    torch.manual_seed(3)
    sizes = {**SIZES, "hidden_size": 96, "intermediate_size": 64}
    config = GptOssConfig(**sizes, num_local_experts=3, num_experts_per_tok=2)
    return saved(GptOssForCausalLM(config), tmp_path_factory.mktemp("quantize") / "gpt-oss")


def quantize(source: Path, out: Path, method: str, *more: str) -> Path:
    result = ckpt("convert", "auto", "hf", source, "-o", out, "--quantize", method, *more)
    assert result.code == 0, result.err
    return out


def dequantized(source: Path) -> dict[str, torch.Tensor]:
    out = source.parent / f"{source.name}-plain"
    result = ckpt("convert", "hf", "hf", source, "-o", out, "--dequantize", "--overwrite")
    assert result.code == 0, result.err
    return weights(out)


def plan_of(folder: Path, method: str) -> dict[str, Any]:
    """Return the config's entry for a quantized folder."""
    return dict(json.loads((folder / "config.json").read_text())["quantization_config"])


def plain_weight(fqn: str, folder: Path) -> PlainWeight:
    checkpoint = api.open(folder)
    tensor = checkpoint.tensors[fqn, "weight"]
    return PlainWeight(fqn, Choice(tensor, tensor.dtype), checkpoint.computed, checkpoint.path)


# -- bits ----------------------------------------------------------------------------------------------------


def test_every_small_float_and_tie_is_rounded_like_torch() -> None:
    finite = torch.arange(127, dtype=torch.uint8).view(F8).float()
    ties = (finite[1:] + finite[:-1]) / 2
    near = [ties, ties.nextafter(torch.tensor(0.0)), ties.nextafter(torch.tensor(1e9))]
    numbers = torch.cat([finite, *near, torch.tensor([1e-44, 0.0]), torch.randn(1000)])
    numbers = torch.cat([numbers, -numbers]).clamp(-448, 448)
    assert (e4m3_bytes(numbers.numpy()) == numbers.to(F8).view(torch.uint8).numpy()).all()


@pytest.mark.filterwarnings("error")
def test_every_bfloat16_number_below_every_maximum_has_the_code_of_its_fp32_value() -> None:
    weight: Any = SimpleNamespace(choice=SimpleNamespace(dtype=BFLOAT16))
    for mantissa in range(128):
        top = 24 + mantissa % 80 << 7 | mantissa
        blocks, groups = below(top, 128), below(top, 32)
        blocks = np.concatenate([blocks, np.zeros((-len(blocks) % 128, 128), np.uint16)])
        for bits, of_bits, of_rows in (
            (blocks, _quantized_bits, _quantized_rows),
            (groups, _mxfp4_bits, _mxfp4_rows),
        ):
            found = of_bits(bits)
            assert found is not None
            for ours, theirs in zip(found, of_rows(weight, as_fp32(bits)), strict=True):
                assert ours.tobytes() == theirs.tobytes()


@pytest.mark.parametrize(
    ("of_bits", "tops"),
    [
        (_quantized_bits, (0x7F80, 0x7FFF, 3)),  # infinity, NaN, and a number without reciprocal
        (_mxfp4_bits, (0x7F80, 129 << 7 | 96, 4 << 7)),  # a scale of 2 makes the smallest numbers zero
    ],
)
def test_bfloat16_numbers_outside_the_fast_range_are_left_to_fp32(of_bits: Any, tops: tuple[int, ...]) -> None:
    assert all(of_bits(np.full((128, 128), top, np.uint16)) is None for top in tops)


def below(top: int, columns: int) -> np.ndarray:
    """Return rows that begin with `top` and have all bfloat16 numbers up to its magnitude."""
    sizes = np.arange(top + 1, dtype=np.uint16)
    rows = np.full((-(-2 * len(sizes) // (columns - 1)), columns), top, np.uint16)
    rows[:, 1:].flat[: 2 * len(sizes)] = np.concatenate([sizes, sizes | 0x8000])
    return rows


def as_fp32(bits: np.ndarray) -> np.ndarray:
    return (bits.astype(np.uint32) << np.uint32(16)).view(np.float32)


def test_e2m1_rounds_ties_to_even_and_clips() -> None:
    numbers = np.array([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 6.0, 7.0, 1e9, 0.2501, 0.7499, 1e-30, 0.0], np.float32)
    codes = [0, 2, 2, 4, 4, 6, 6, 7, 7, 7, 1, 1, 0, 0]
    assert e2m1_codes(numbers).tolist() == codes
    assert e2m1_codes(-numbers).tolist() == [code + 8 for code in codes]


@pytest.mark.parametrize("path", CASES, ids=lambda path: f"{path.parent.name.removeprefix('quantize-')} {path.stem}")
def test_parts_are_the_librarys(path: Path, tmp_path: Path) -> None:
    with safe_open(path, "pt") as file:
        config = json.loads(file.metadata()["config"])
    recorded = load_file(path)
    plain, fused = recorded.pop("plain"), recorded.pop("fused", None)
    owner = "layer.experts" if plain.dim() == 3 else "layer.weight"
    tensors = {owner: plain} | ({} if fused is None else {"fused.weight": fused})
    save_file(tensors, tmp_path / "model.safetensors")
    weight = plain_weight(owner, tmp_path)
    if fused is not None:
        weight = replace(weight, fused=FusedWeights([weight, plain_weight("fused.weight", tmp_path)]))
    model_type = "gpt_oss" if plain.dim() == 3 else "llama"
    found = {}
    for parts in quantizer_of(config["quantize"], model_type).pack(weight):
        for block in parts.blocks:
            content = np.frombuffer(block.content(), np.uint8)
            for box, (template, (dtype, shape)) in zip(block.boxes, parts.parts.items(), strict=True):
                part = found.setdefault(template.format(w=owner), np.zeros((*shape, dtype.itemsize), np.uint8))
                place = tuple(slice(at, at + size) for at, size in zip(box.offsets, box.sizes, strict=True))
                size = box.numel * dtype.itemsize
                part[place], content = content[:size].reshape(*box.sizes, -1), content[size:]
            assert not content.size
    assert found.keys() == recorded.keys()
    for name, part in recorded.items():
        assert found[name].tobytes() == part.view(torch.uint8).numpy().tobytes(), name


@pytest.mark.parametrize("model", ["llama", "moe"])
def test_fp8_blocks_are_transformers(model: str, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    from transformers import FineGrainedFP8Config
    from transformers.integrations.finegrained_fp8 import Fp8Quantize

    class Quantizer:
        quantization_config = FineGrainedFP8Config()

    source = request.getfixturevalue(model)
    out = quantize(source, tmp_path / "out", "fp8-block")
    before, after = weights(source), weights(out)
    expected = {name: tensor for name, tensor in before.items() if "proj" not in name}
    for name in before.keys() - expected.keys():
        expected |= Fp8Quantize(Quantizer()).convert({name: before[name]})
    assert differing(after, expected) == []
    assert any(tensor.dtype == F8 for tensor in after.values())


# -- loading -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("model", "method"), [("llama", "fp8-block"), ("moe", "fp8-block"), ("gpt_oss", "mxfp4")])
def test_transformers_loads_the_values_of_dequantize(
    model: str, method: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    from transformers import AutoModelForCausalLM

    source = request.getfixturevalue(model)
    out = quantize(source, tmp_path / "out", method)
    plain = dequantized(out)
    loaded = AutoModelForCausalLM.from_pretrained(out, dtype=BF16)  # without a GPU, it dequantizes
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "out-plain", dtype=BF16)
    assert plain.keys() == weights(source).keys()
    found, expected = loaded.state_dict(), again.state_dict()
    assert differing(found, expected) == []


@pytest.mark.parametrize("method", METHODS)
def test_quantized_folder_is_whole_and_quantizes_to_itself(method: str, moe: Path, tmp_path: Path) -> None:
    out = quantize(moe, tmp_path / "out", method, "--verify")
    assert ckpt("check", "--bytes", out).code == 0
    dequantized(out)
    again = quantize(tmp_path / "out-plain", tmp_path / "again", method)
    values = dequantized(again)
    first = weights(tmp_path / "out-plain")
    if method not in ("int8", "nvfp4a16"):  # their scales divide the maximum by a number that they can't hold
        assert [name for name in first if not torch.equal(first[name], values[name])] == []


@pytest.mark.parametrize(("method", "says"), [("int8", "not checked: if from_pretrained"), ("fp8-dynamic", "from_pre")])
def test_transformers_joins_only_some_experts(method: str, says: str, moe: Path, tmp_path: Path) -> None:
    """Experts in fp8-dynamic load in transformers 5.23. Experts in int8 raise an error there."""
    said = ckpt("convert", "hf", "hf", moe, "--quantize", method, "-o", tmp_path / "out").err.splitlines()
    assert said[-1].startswith(says) and "can load this folder" in said[-1]
    assert said[-1].endswith("; it needs the Python package compressed-tensors") == ("fp8" in method)


@pytest.mark.parametrize("method", ["nvfp4a16", "fp8-dynamic"])
def test_loads_names_experts_that_transformers_may_not_join(
    method: str, moe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With compressed-tensors 0.20, transformers 5.23 loads NVFP4 experts without their global scales, unsaid."""
    loading = Loading(str(tmp_path), "Qwen3MoeForCausalLM", 41, (), ("weights",))
    monkeypatch.setattr("ckpt.compare.transformers_loads.check_loads", lambda _: loading)
    out = ckpt("verify", "--loads", quantize(moe, tmp_path / "out", method)).out
    assert ("may not join the parts of model.layers.0.mlp.experts.0" in out) == (method == "nvfp4a16")


def test_mxfp4_keeps_the_values_of_gpt_oss(gpt_oss: Path, tmp_path: Path) -> None:
    first = quantize(gpt_oss, tmp_path / "first", "mxfp4")
    values = dequantized(first)
    second = quantize(tmp_path / "first-plain", tmp_path / "second", "mxfp4")
    again = dequantized(second)
    assert [name for name in values if not torch.equal(values[name], again[name])] == []
    assert plan_of(second, "mxfp4")["quant_method"] == "mxfp4"


def test_scales_of_stacked_experts_are_not_said_to_load(tmp_path: Path) -> None:
    """On a CPU, transformers 5.23 does not apply them. On a GPU, it has no class for Llama 4's."""
    from transformers import Llama4ForCausalLM, Llama4TextConfig

    sizes = {**SIZES, "num_hidden_layers": 1, "interleave_moe_layer_step": 1, "num_local_experts": 2}
    source = saved(Llama4ForCausalLM(Llama4TextConfig(**sizes, intermediate_size_mlp=256)), tmp_path / "model")
    fqn, config = "model.layers.0.feed_forward.experts.down_proj", json.loads((source / "config.json").read_text())
    plain = weights(source)
    scales = torch.full((2, 2, 1), 0.5)
    entry = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}
    entry["modules_to_not_convert"] = [name.removesuffix(".weight") for name in plain if name != fqn]
    parts = {fqn: (plain[fqn] * 2).to(F8), f"{fqn}_scale_inv": scales}
    folder = save_model(tmp_path / "fp8", {**plain, **parts}, {**config, "quantization_config": entry})
    said = ckpt("convert", "hf", "hf", folder, "-o", tmp_path / "out").err.splitlines()[-1]
    assert said.startswith("not checked: if from_pretrained can load this folder")
    assert f"may not apply the scales of stacked weights, such as {fqn}" in said
    loaded = Llama4ForCausalLM.from_pretrained(folder, dtype=BF16).state_dict()[fqn]
    assert not torch.equal(loaded, dequantized(folder)[fqn])


def test_mxfp4_is_cast_to_nvfp4_with_unchanged_values(llama: Path, tmp_path: Path) -> None:
    first = quantize(llama, tmp_path / "first", "mxfp4")
    parts, name = weights(first), "model.layers.0.mlp.up_proj.weight"
    parts[f"{name}_packed"][3, :16] = 0x80  # zeros, with a scale that is out of range
    parts[f"{name}_scale"][3, 0] = 0
    save_file(parts, first / "model.safetensors", metadata={"format": "pt"})
    out = quantize(first, tmp_path / "out", "nvfp4a16")
    assert ckpt("check", out).code == 0
    expected, found, cast = dequantized(first), dequantized(out), weights(out)
    assert expected.keys() == found.keys()
    assert [one for one in found if not torch.equal(found[one], expected[one])] == []
    assert [one for one in parts if one.endswith("_packed") and not same(parts[one], cast[one])] == []
    assert "unchanged" in json.loads((out / "ckpt-manifest.json").read_text())["quantization"]["rule"]
    assert plan_of(out, "nvfp4a16")["format"] == "nvfp4-pack-quantized"


def test_block_beyond_nvfp4s_scales_is_refused(llama: Path, tmp_path: Path) -> None:
    first, name = quantize(llama, tmp_path / "first", "mxfp4"), "model.layers.0.mlp.up_proj.weight_scale"
    parts = weights(first)
    parts[name][3, 1] = 90
    save_file(parts, first / "model.safetensors", metadata={"format": "pt"})
    result = ckpt("convert", "hf", "hf", first, "-o", tmp_path / "out", "--quantize", "nvfp4a16")
    assert (result.code, (tmp_path / "out").exists()) == (6, False)
    assert "a block's scale is too small for NVFP4" in result.err
    assert f"tensor: {name}" in result.err and "found: 2^-37 at [3, 1]" in result.err
    quantize(first, tmp_path / "rounded", "nvfp4a16", "--dequantize")


# -- plain and fused weights ---------------------------------------------------------------------------------


def test_plain_modules_are_recorded_and_printed(moe: Path, tmp_path: Path) -> None:
    result = ckpt("convert", "hf", "hf", moe, "-o", tmp_path / "out", "--quantize", "fp8-block")
    assert "26 weights quantized to fp8-block from bfloat16" in result.err
    assert "matrices kept plain: lm_head, model.embed_tokens, model.layers.*.mlp.gate (2)" in result.err
    routers = [f"model.layers.{layer}.mlp.gate" for layer in (0, 1)]
    expected = ["lm_head", "model.embed_tokens", *routers]
    assert plan_of(tmp_path / "out", "fp8-block")["modules_to_not_convert"] == expected


@pytest.mark.parametrize("size", [128, 96])
def test_plain_experts_stay_plain_in_transformers(size: int, tmp_path: Path) -> None:
    """All experts of a layer are one module in transformers. It is replaced unless it is listed."""
    from transformers import FineGrainedFP8Config, Qwen3MoeConfig, Qwen3MoeForCausalLM
    from transformers.integrations.finegrained_fp8 import FP8Experts, replace_with_fp8_linear

    model = Qwen3MoeForCausalLM(Qwen3MoeConfig(**SIZES, moe_intermediate_size=size, num_experts=2))
    out = quantize(saved(model, tmp_path / "model"), tmp_path / "out", "fp8-block")
    names = plan_of(out, "fp8-block")["modules_to_not_convert"]
    replace_with_fp8_linear(model, names, FineGrainedFP8Config(), pre_quantized=True)
    assert isinstance(model.get_submodule("model.layers.0.mlp.experts"), FP8Experts) == (size == 128)


def test_tied_head_is_recorded_as_plain(llama: Path, tmp_path: Path) -> None:
    out = quantize(llama, tmp_path / "out", "fp8-dynamic")
    assert plan_of(out, "fp8-dynamic")["ignore"] == ["lm_head", "model.embed_tokens"]


def test_fused_weights_stay_plain_together(tmp_path: Path) -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(**{**SIZES, "num_key_value_heads": 1})
    source = saved(LlamaForCausalLM(config), tmp_path / "model")
    out = quantize(source, tmp_path / "out", "fp8-block")
    names = {name for name, tensor in weights(out).items() if tensor.dtype == F8}
    assert {name.rsplit(".", 2)[-2] for name in names} == {"o_proj", "gate_proj", "up_proj", "down_proj"}
    assert "model.layers.0.self_attn.q_proj" in plan_of(out, "fp8-block")["modules_to_not_convert"]


def test_only_known_linear_weights_of_decoder_layers_are_quantized(tmp_path: Path) -> None:
    attention = ("q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj", "indexer.wq_b")
    modules = [f"self_attn.{name}" for name in attention]
    modules += ["mlp.gate", "mlp.experts.0.gate_proj", "mlp.experts.0.up_proj", "mlp.shared_experts.down_proj"]
    names = [f"model.layers.{layer}.{module}.weight" for layer in (0, 1) for module in modules]
    names += ["model.embed_tokens.weight", "lm_head.weight", "mtp.layers.0.mlp.up_proj.weight"]
    names += ["model.layers.1.eh_proj.weight", "model.visual.layers.0.mlp.up_proj.weight"]
    tensors = {name: torch.randn(32, 32).to(BF16) for name in names}
    tensors |= {"model.norm.weight": torch.ones(32, dtype=BF16)}
    save_file(tensors, tmp_path / "model.safetensors")
    config = {"model_type": "deepseek_v3", "num_hidden_layers": 1, "num_nextn_predict_layers": 1}
    (tmp_path / "config.json").write_text(json.dumps(config))
    found = services.quantizing.quantized(api.open(tmp_path), "int8", None)
    quantized = {fqn for (fqn, _), tensor in found.tensors.items() if tensor.dtype.name == "int8"}
    wanted = ("q_b_proj", "kv_b_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
    assert quantized == {
        n for n in names if n.startswith("model.layers.0.") and n.endswith(tuple(f"{w}.weight" for w in wanted))
    }
    assert found.config is not None
    ignored = found.config["quantization_config"]["ignore"]
    assert sorted(ignored) == sorted(name.removesuffix(".weight") for name in set(names) - quantized)


def test_global_scale_is_shared_across_shards(llama: Path, tmp_path: Path) -> None:
    out = quantize(llama, tmp_path / "out", "nvfp4a16", "--max-shard-size", "20KB")
    assert len(list(out.glob("*.safetensors"))) > 2
    found = {name: t for name, t in weights(out).items() if name.endswith("global_scale")}
    for layer in (0, 1):
        for group in (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj")):
            alike = [t for name, t in found.items() if f"layers.{layer}." in name and name.split(".")[-2] in group]
            assert len(alike) == len(group)
            assert len({float(one) for one in alike}) == 1
    assert len({float(one) for one in found.values()}) > 4


# -- sources -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", METHODS)
def test_other_sources_and_workers_write_the_same_bytes(method: str, llama: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    assert ckpt("convert", "hf", "dcp", llama, "-o", run).code == 0
    first = quantize(llama, tmp_path / "first", method)
    second = quantize(run, tmp_path / "second", method, "--workers", "1", "--config", str(llama))
    assert (first / "model.safetensors").read_bytes() == (second / "model.safetensors").read_bytes()
    assert (first / "config.json").read_bytes() == (second / "config.json").read_bytes()


def test_run_is_quantized_like_its_exported_model(tmp_path: Path) -> None:
    run = REPOSITORY / "fixtures/trainer-zero2"
    direct = quantize(run, tmp_path / "direct", "int8")
    assert ckpt("convert", "auto", "hf", run, "-o", tmp_path / "plain").code == 0
    twice = quantize(tmp_path / "plain", tmp_path / "twice", "int8")
    for name in ("model.safetensors", "config.json"):
        assert (direct / name).read_bytes() == (twice / name).read_bytes()


# -- refusals ------------------------------------------------------------------------------------------------


def refusal(source: Path, method: str, out: Path, to: str = "hf") -> str:
    result = ckpt("convert", "auto", to, source, "-o", out, "--quantize", method)
    assert result.code != 0
    assert not out.exists()
    return str(result.err)


def test_quantized_model_is_refused(llama: Path, tmp_path: Path) -> None:
    out = quantize(llama, tmp_path / "out", "int8")
    error = refusal(out, "fp8-block", tmp_path / "again")
    assert "this model is quantized already" in error
    assert "add --dequantize to quantize its plain values again" in error
    result = ckpt("convert", "hf", "hf", out, "-o", tmp_path / "both", "--dequantize", "--quantize", "fp8-block")
    assert result.code == 0, result.err


def changed(source: Path, folder: Path, fqn: str, value: float) -> Path:
    """Copy a model, with another value at the tensor's end."""
    tensors = weights(source)
    tensors[fqn][(-1,) * tensors[fqn].ndim] = value
    folder.mkdir()
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_bytes((source / "config.json").read_bytes())
    return folder


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize(
    ("fqn", "found"),
    [
        ("model.layers.1.mlp.up_proj.weight", "1 of 32768 values are {}, the first at [255, 127]"),
        ("model.norm.weight", "1 of 128 values are {}, the first at [127]"),
    ],
    ids=["quantized", "plain"],
)
def test_weight_that_is_not_finite_is_refused(bad: float, fqn: str, found: str, llama: Path, tmp_path: Path) -> None:
    source = changed(llama, tmp_path / "bad", fqn, bad)
    old = changed(llama, tmp_path / "old", fqn, 1.0)
    before = {one.name: one.read_bytes() for one in old.iterdir()}
    for method in METHODS:
        out = ("--overwrite", "-o", old) if method == "int8" else ("-o", tmp_path / "out")
        result = ckpt("convert", "hf", "hf", source, *out, "--quantize", method)
        assert result.code == 4
        assert "can't quantize a model with NaN or infinity" in result.err
        assert f"tensor: {fqn}\n" in result.err
        assert found.format("NaN" if bad != bad else "infinite") in result.err
        assert sorted(one.name for one in tmp_path.iterdir()) == ["bad", "old"]
    assert {one.name: one.read_bytes() for one in old.iterdir()} == before


@pytest.mark.parametrize("fqn", ["model.layers.1.mlp.experts.down_proj", "model.layers.1.mlp.experts.down_proj_bias"])
def test_experts_that_are_not_finite_are_refused(fqn: str, gpt_oss: Path, tmp_path: Path) -> None:
    source = changed(gpt_oss, tmp_path / "bad", fqn, float("nan"))
    result = ckpt("convert", "hf", "hf", source, "-o", tmp_path / "out", "--quantize", "mxfp4")
    assert result.code == 4 and f"tensor: {fqn}\n" in result.err and "values are NaN, the first at [2, " in result.err
    assert [one.name for one in tmp_path.iterdir()] == ["bad"]


def test_number_beyond_the_dtype_is_refused(llama: Path, tmp_path: Path) -> None:
    source = changed(llama, tmp_path / "large", "model.layers.1.mlp.up_proj.weight", 1e30)
    result = ckpt("convert", "hf", "hf", source, "-o", tmp_path / "out", "--quantize", "int8", "--dtype", "fp16")
    assert result.code == 6
    assert "a number is too large for float16" in result.err and "a bfloat16 number at [255, 127]" in result.err
    assert [one.name for one in tmp_path.iterdir()] == ["large"]
    quantize(source, tmp_path / "out", "int8")


def test_stacked_experts_are_refused(gpt_oss: Path, tmp_path: Path) -> None:
    error = refusal(gpt_oss, "fp8-block", tmp_path / "out")
    assert "can't quantize these experts, stacked in one tensor" in error
    assert "expected: a tensor for each expert" in error
    assert "model.layers.0.mlp.experts" in error
    assert "hint: --quantize mxfp4 quantizes them" in error
    stack = "model.layers.0.block_sparse_moe.input_linear.weight"
    tensors = {stack: torch.ones(2, 128, 128), "model.layers.0.self_attn.q_proj.weight": torch.ones(128, 128)}
    granite = save_model(tmp_path / "granite", tensors, {"model_type": "granitemoe"})
    assert stack in refusal(granite, "fp8-block", tmp_path / "out")
    tensors["vision.layers.0.mlp.dwconv.weight"] = tensors.pop(stack)[:, :1, :3].clone()
    quantize(save_model(tmp_path / "convolution", tensors, {"model_type": "toy"}), tmp_path / "kept", "fp8-block")
    small = REPOSITORY / "fixtures/axolotl-fsdp2/outputs/gpt-oss-out"
    assert "expected: rows and columns in blocks of 32 by 1" in refusal(small, "mxfp4", tmp_path / "out")


def test_model_without_config_is_refused(llama: Path, tmp_path: Path) -> None:
    (tmp_path / "bare").mkdir()
    (tmp_path / "bare/model.safetensors").write_bytes((llama / "model.safetensors").read_bytes())
    assert "--quantize needs the model's config.json" in refusal(tmp_path / "bare", "int8", tmp_path / "out")


def test_other_format_is_refused(llama: Path, tmp_path: Path) -> None:
    assert "the format 'dcp' takes no --quantize int8" in refusal(llama, "int8", tmp_path / "out", "dcp")


def test_float16_is_refused_for_mxfp4(llama: Path, tmp_path: Path) -> None:
    result = ckpt("convert", "hf", "hf", llama, "-o", tmp_path / "x", "--quantize", "mxfp4", "--dtype", "fp16")
    assert result.code == 2
    assert "--dtype bf16" in result.err


@pytest.mark.parametrize("is_in_config", [True, False])
def test_modelopts_record_is_not_the_new_weights(is_in_config: bool, llama: Path, tmp_path: Path) -> None:
    """ModelOpt records its settings in a file of its own, next to the config."""
    source, out, module = tmp_path / "modelopt", tmp_path / "out", "model.layers.0.mlp.up_proj"
    shutil.copytree(llama, source)
    tensors = weights(source)
    one = torch.ones(())
    parts = {"weight": tensors[f"{module}.weight"].to(F8), "weight_scale": one, "input_scale": one.clone()}
    tensors |= {f"{module}.{part}": one for part, one in parts.items()}
    save_file(tensors, source / "model.safetensors", metadata={"format": "pt"})
    plain = ["*self_attn*", "*layers.1*", "*gate*", "*down*"]
    record = {"quantization": {"quant_algo": "FP8", "exclude_modules": plain}}
    (source / "hf_quant_config.json").write_text(json.dumps(record))
    if is_in_config:
        config = json.loads((source / "config.json").read_text())
        entry = {"quant_method": "modelopt", **record["quantization"]}
        (source / "config.json").write_text(json.dumps({**config, "quantization_config": entry}))
    refused = ckpt("convert", "hf", "hf", source, "-o", out, "--quantize", "int8")
    assert (refused.code, "quantized already" in refused.err, out.exists()) == (6, True, False)
    assert "hf_quant_config.json" in [file.name for file in carried(source, tmp_path / "carried")]
    quantize(source, out, "int8", "--dequantize")
    assert not (out / "hf_quant_config.json").exists()
    assert json.loads((out / "config.json").read_text())["quantization_config"]["format"] == "int-quantized"
    assert ckpt("check", out).code == 0


def carried(source: Path, out: Path) -> list[Path]:
    assert ckpt("convert", "hf", "hf", source, "-o", out).code == 0
    return list(out.iterdir())
