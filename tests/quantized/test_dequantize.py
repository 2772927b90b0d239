"""`converters/quantized/dequantize.py`, `stored_states.py`, `converters/quantized/methods/bitsandbytes.py`: weights.

They are copied bit for bit, and dequantized to the same bits as transformers and bitsandbytes.
"""

from __future__ import annotations

import json
import re
import shutil
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from ckpt import api
from ckpt.errors import CorruptError, LossError, UsageError
from ckpt.plan.dtypes import BY_NAME, CASTABLE
from tests.support.adapters import differing, same, save_adapter, weights
from tests.support.commands import ckpt
from tests.support.sampling import sample

BF16 = torch.bfloat16
#: Sizes of gpt_oss with unequal groups of 32.
GPT_OSS = {
    "vocab_size": 131,
    "hidden_size": 96,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "num_local_experts": 3,
    "num_experts_per_tok": 2,
}


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def edit(folder: Path, change: Callable[[dict[str, torch.Tensor]], None], **config: Any) -> Path:
    """Edit the tensors and config of `folder`, a model in one file."""
    tensors = weights(folder)
    change(tensors)
    save_file({n: t.contiguous() for n, t in tensors.items()}, folder / "model.safetensors", metadata={"format": "pt"})
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | config, indent=2))
    return folder


def config_of(folder: Path) -> dict[str, Any]:
    return dict(json.loads((folder / "config.json").read_text()))


def load(folder: Path, **options: Any) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, **({"dtype": "auto"} | options))


def assert_same(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert differing(found, expected) == []


def assert_carried(source: Path, tmp_path: Path) -> None:
    """Check that `hf` to `hf` with another shard size keeps all bits and the config, and that verify and hash agree."""
    out = tmp_path / "carried"
    result = ckpt("convert", "hf", "hf", source, "-o", out, "--max-shard-size", "20KB")
    assert result.code == 0, result.err
    assert len(list(out.glob("*.safetensors"))) > 2
    assert_same(weights(out), weights(source))
    assert config_of(out) == config_of(source)
    assert ckpt("verify", source, out).code == 0
    assert ckpt("verify", out).code == 0
    assert ckpt("verify", "--loads", out).code == 0
    assert ckpt("hash", source, "-q").out == ckpt("hash", out, "-q").out


def dequantize(source: Path, out: Path, *more: str) -> Path:
    result = ckpt("convert", "hf", "hf", source, "-o", out, "--dequantize", *more)
    assert result.code == 0, result.err
    assert "dequantized from" in result.err
    return out


# -- MXFP4 ---------------------------------------------------------------------------------------------------
def packed_experts(tensors: dict[str, torch.Tensor]) -> None:
    """Replace experts by random blocks and scales in the shapes of openai/gpt-oss-20b's files."""
    generator = torch.Generator().manual_seed(3)
    for name in [name for name in tensors if name.endswith(("gate_up_proj", "down_proj"))]:
        num_experts, num_in, num_out = tensors.pop(name).shape
        shape = (num_experts, num_out, num_in // 32, 16)
        tensors[f"{name}_blocks"] = torch.randint(0, 256, shape, generator=generator, dtype=torch.uint8)
        tensors[f"{name}_scales"] = torch.randint(110, 130, shape[:-1], generator=generator, dtype=torch.uint8)


@pytest.fixture(scope="module")
def gpt_oss(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from transformers import GptOssConfig, GptOssForCausalLM

    folder = tmp_path_factory.mktemp("mxfp4") / "gpt-oss"
    torch.manual_seed(1)
    model = GptOssForCausalLM(GptOssConfig(**GPT_OSS, dtype=BF16)).to(BF16)
    model.save_pretrained(folder)
    skipped = ["model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head"]
    method = {"quant_method": "mxfp4", "modules_to_not_convert": skipped}
    return edit(folder, packed_experts, quantization_config=method)


def test_mxfp4_is_carried(gpt_oss: Path, tmp_path: Path) -> None:
    assert_carried(gpt_oss, tmp_path)
    assert "quantized   mxfp4\n" in ckpt("inspect", gpt_oss).out


@pytest.mark.parametrize("dtype", ["keep", "bf16", "fp16", "fp32"])
def test_mxfp4_is_dequantized_as_transformers_does(dtype: str, gpt_oss: Path, tmp_path: Path) -> None:
    out = dequantize(gpt_oss, tmp_path / "plain", "--dtype", dtype, "--max-shard-size", "100KB")
    wanted = BF16 if dtype == "keep" else getattr(torch, CASTABLE[dtype].name)
    loaded = load(gpt_oss, dtype=wanted).state_dict()  # on a CPU it dequantizes, and widens bf16 norms in an fp16 model
    kept = {name: BF16 for name, tensor in loaded.items() if tensor.dtype != wanted}
    assert_same(weights(out), {name: tensor.to(kept.get(name, wanted)) for name, tensor in loaded.items()})
    assert len(kept) == (5 if dtype == "fp16" else 0)
    expected = config_of(gpt_oss) | {"dtype": str(wanted).removeprefix("torch.")}
    del expected["quantization_config"]
    assert config_of(out) == expected
    assert ckpt("verify", "--loads", out).code == 0


@pytest.mark.parametrize("dtype", ["bf16", "fp16", "fp32"])
def test_every_byte_with_every_exponent_of_mxfp4_that_fits(dtype: str, tmp_path: Path) -> None:
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    values = torch.arange(256, dtype=torch.uint8)
    tensors = {
        "x.w_blocks": values.reshape(1, 1, 16, 16).expand(2, 255, 16, 16).contiguous(),
        "x.w_scales": values[None, :255, None].expand(2, 255, 16).contiguous(),
    }
    expected = convert_moe_packed_tensors(*tensors.values(), dtype=getattr(torch, CASTABLE[dtype].name))
    fits = 141 if dtype == "fp16" else 253  # exponents: larger ones make infinite numbers
    assert expected[..., :fits].isfinite().all() and expected[..., fits].isinf().any()
    save_file({name: tensor[:, :fits].contiguous() for name, tensor in tensors.items()}, tmp_path / "model.safetensors")
    plain = api.dequantized(api.open(tmp_path), CASTABLE[dtype])
    assert same(plain["x.w"][...], expected[..., :fits])
    assert same(plain["x.w"][1, 3:200, 5:77], expected[1, 3:200, 5:77])


def test_numbers_of_mxfp4_beyond_fp16(tmp_path: Path) -> None:
    blocks, scales = torch.full((1, 2, 1, 16), 0x77, dtype=torch.uint8), torch.full((1, 2, 1), 140, dtype=torch.uint8)
    source, out = tmp_path / "source", tmp_path / "out"
    for exponent, code in ((140, 0), (141, LossError.exit_code)):
        shutil.rmtree(source, ignore_errors=True)
        source.mkdir()
        scales[0, 1] = exponent
        save_file({"x.w_blocks": blocks, "x.w_scales": scales}, source / "model.safetensors")
        (source / "config.json").write_text('{"quantization_config": {"quant_method": "mxfp4"}}')
        result = ckpt("convert", "hf", "hf", source, "-o", out, "--dequantize", "--dtype", "fp16", "--overwrite")
        assert result.code == code, result.err
        assert ("too large for float16" in result.err) == bool(code)
    assert "tensor: x.w\n" in result.err
    assert "found: 32 numbers in the part computed here, the first at [0, 0, 1]\n" in result.err
    assert "hint: use --dtype bf16 or --dtype fp32" in result.err
    assert not weights(out)["x.w"].isinf().any()


@pytest.mark.parametrize("dtype", ["keep", "fp32", "fp16"])
@pytest.mark.parametrize(
    ("row", "code", "scale", "found"),
    [
        (200, 0x7F, 1.0, "1 number in the part computed here, the first at [200, 7]"),  # e4m3's NaN
        (200, 0xFF, 1.0, "1 number in the part computed here, the first at [200, 7]"),
        (129, 0x7E, 1e38, "1 number in the part computed here, the first at [129, 7]"),  # 448 times the scale
    ],
)
def test_fp8_numbers_that_are_not_finite_are_refused(
    row: int, code: int, scale: float, found: str, dtype: str, tmp_path: Path
) -> None:
    weight, scales = torch.zeros(256, 128, dtype=torch.uint8), torch.ones(2, 1)
    weight[row, 7], scales[1] = code, scale
    source, out = tmp_path / "source", tmp_path / "out"
    source.mkdir()
    tensors = {"x.weight": weight.view(torch.float8_e4m3fn), "x.weight_scale_inv": scales}
    save_file(tensors, source / "model.safetensors")
    config = {"quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]}}
    (source / "config.json").write_text(json.dumps(config))
    command = ("convert", "hf", "hf", source, "-o", out, "--names", "own")
    assert ckpt(*command).code == 0  # every bit is carried
    shutil.rmtree(out)
    result = ckpt(*command, "--dequantize", "--dtype", dtype)
    is_too_large = dtype == "fp16" and scale != 1
    assert result.code == (LossError if is_too_large else CorruptError).exit_code, result.err
    assert "tensor: x.weight\n" in result.err and f"found: {found}\n" in result.err
    assert ("NaN or infinite numbers" in result.err) != is_too_large
    assert not out.exists()


def test_to_megatron(quantized: Callable[[str, str], Path], fp8: Path, tmp_path: Path) -> None:
    for number, source in enumerate((quantized("llama", "nf4 double"), quantized("llama", "int8"), fp8)):
        refused = ckpt("convert", "hf", "megatron", source, "-o", tmp_path / "no")
        assert refused.code == LossError.exit_code
        assert "--dequantize" in refused.err
        out = tmp_path / f"{number}"
        result = ckpt("convert", "hf", "megatron", source, "-o", out, "--tp", "2", "--dequantize")
        assert result.code == 0, result.err
        plain = dequantize(source, tmp_path / f"{number}-plain")
        assert ckpt("verify", out, plain, "--config", plain).code == 0


def test_mxfp4_to_megatron(gpt_oss: Path, tmp_path: Path) -> None:
    refused = ckpt("convert", "hf", "megatron", gpt_oss, "-o", tmp_path / "no", "--tp", "2")
    assert refused.code == LossError.exit_code
    assert "--dequantize" in refused.err
    plain = dequantize(gpt_oss, tmp_path / "plain")
    for source, out in ((gpt_oss, "direct"), (plain, "by-hf")):
        options = ("--tp", "2", "--pp", "2", "--ep", "3", "--dequantize")
        result = ckpt("convert", "hf", "megatron", source, "-o", tmp_path / out, *options)
        assert result.code == 0, result.err
    assert ckpt("verify", tmp_path / "direct", tmp_path / "by-hf").code == 0
    assert ckpt("verify", tmp_path / "direct", plain).code == 0


@pytest.mark.parametrize(
    "change, expected",
    [
        (lambda t, n: t.pop(f"{n}_scales"), "_scales: missing"),
        (lambda t, n: t.pop(f"{n}_blocks"), "_blocks: missing"),
        (lambda t, n: t.update({f"{n}_blocks": t[f"{n}_blocks"][..., :8]}), "but the architecture has"),
        (lambda t, n: t.update({f"{n}_scales": t[f"{n}_scales"][:, :-1]}), "instead of"),
    ],
)
def test_broken_mxfp4(change: Any, expected: str, gpt_oss: Path, tmp_path: Path) -> None:
    folder = tmp_path / "broken"
    shutil.copytree(gpt_oss, folder)
    edit(folder, lambda tensors: change(tensors, "model.layers.1.mlp.experts.down_proj"))
    result = ckpt("convert", "hf", "hf", folder, "-o", tmp_path / "out", "--dequantize")
    assert result.code == CorruptError.exit_code, result.err
    assert expected in result.err
    assert not (tmp_path / "out").exists()


# -- bitsandbytes --------------------------------------------------------------------------------------------
FOUR_BITS = {
    "nf4": {"bnb_4bit_quant_type": "nf4"},
    "nf4 double": {"bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": True},
    "fp4": {"bnb_4bit_quant_type": "fp4"},
    "nf4 in bf16": {"bnb_4bit_quant_type": "nf4", "bnb_4bit_quant_storage": "bfloat16"},
}
KINDS: dict[str, dict[str, Any]] = {
    **{name: {"load_in_4bit": True, **options} for name, options in FOUR_BITS.items()},
    "int8": {"load_in_8bit": True},
}


def bitsandbytes() -> Any:
    return pytest.importorskip("bitsandbytes", reason="the oracle for its weights; pip install bitsandbytes")


@pytest.fixture(scope="module")
def quantized(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, str], Path]:
    """Return a function that quantizes a model with bitsandbytes and saves it with transformers, by model and kind."""
    bitsandbytes()
    from transformers import AutoModelForCausalLM, BitsAndBytesConfig, GPT2Config, LlamaConfig

    root = tmp_path_factory.mktemp("bitsandbytes")
    sizes = {"num_hidden_layers": 2, "vocab_size": 131, "hidden_size": 64, "intermediate_size": 128}
    ends = {"bos_token_id": 1, "eos_token_id": 2}
    configs = {
        "llama": LlamaConfig(**sizes, num_attention_heads=4, num_key_value_heads=2, dtype=BF16),
        "gpt2": GPT2Config(n_embd=64, n_layer=1, n_head=2, vocab_size=131, n_positions=64, dtype=torch.float16, **ends),
    }

    def save(model: str, kind: str) -> Path:
        plain, folder = root / model, root / f"{model} {kind}"
        if not plain.exists():
            torch.manual_seed(2)
            config = configs[model]
            AutoModelForCausalLM.from_config(config, dtype=config.dtype).save_pretrained(plain)
        if not folder.exists():
            options = {"quantization_config": BitsAndBytesConfig(**KINDS[kind]), "device_map": "cpu"}
            load(plain, **options).save_pretrained(folder)
        return folder

    return save


def dequantized_by_transformers(folder: Path, dtype: torch.dtype | None = None) -> dict[str, torch.Tensor]:
    """Return the dequantized state dict, with linear layers for Conv1D and without fp4's negative zeros."""
    model = load(folder, device_map="cpu").dequantize(dtype)
    found = {name: tensor + 0 for name, tensor in model.state_dict().items()}
    if model.config.model_type == "gpt2":
        for name, tensor in found.items():
            if name.endswith(("c_attn.weight", "c_proj.weight", "c_fc.weight")):
                found[name] = tensor.T
    if model.config.tie_word_embeddings:
        del found["lm_head.weight"]
    return found


@pytest.mark.parametrize("kind", KINDS)
def test_bitsandbytes_is_carried(kind: str, quantized: Callable[[str, str], Path], tmp_path: Path) -> None:
    source = quantized("llama", kind)
    assert_carried(source, tmp_path)
    cast = ckpt("convert", "hf", "hf", source, "-o", tmp_path / "cast", "--dtype", "fp16")
    assert cast.code == 0 and "parts of quantized weights kept as they are" in cast.err
    before, after = weights(source), weights(tmp_path / "cast")
    parts = api.quantized_parts(api.open(source))
    assert len(parts) >= 14 and all(same(before[name], after[name]) for name in parts)
    assert {after[name].dtype for name in after.keys() - parts} == {torch.float16}


def test_memory_is_that_of_a_block(tmp_path: Path) -> None:
    """The peak of a plan counts one block, whatever the weight's size."""
    bounds = []
    for number, num_rows in enumerate((1 << 14, 1 << 16)):
        folder = tmp_path / str(number)
        folder.mkdir()
        weight = torch.zeros(num_rows, 1024, dtype=torch.float8_e4m3fn)
        save_file({"x.weight": weight, "x.weight_scale_inv": torch.tensor(1.0)}, folder / "model.safetensors")
        conversion = api.plan(api.dequantized(api.open(folder)), "hf")
        assert conversion.plan.largest_computed == 1 << 24
        bounds.append(conversion.peak_buffers)
    assert 5 << 24 < bounds[0] == bounds[1] <= 1 << 30


def test_packed_weights_are_no_masters(quantized: Callable[[str, str], Path], tmp_path: Path) -> None:
    """A cast of stored bf16 bytes to fp32 changes bits: a signalling NaN becomes quiet."""
    source = quantized("llama", "nf4 in bf16")
    refused = ckpt("convert", "hf", "zero3", source, "-o", tmp_path / "no", "--world-size", "2")
    assert refused.code == LossError.exit_code
    assert "zero3 has no place for quantized weights" in refused.err
    assert refused.err.endswith("hint: --dequantize makes plain weights of them\n")


@pytest.mark.parametrize("model", ["llama", "gpt2"])
@pytest.mark.parametrize("kind", KINDS)
def test_bitsandbytes_is_dequantized_as_it_does(
    kind: str, model: str, quantized: Callable[[str, str], Path], tmp_path: Path
) -> None:
    source = quantized(model, kind)
    out = dequantize(source, tmp_path / "plain")
    assert_same(weights(out), dequantized_by_transformers(source))
    assert "quantization_config" not in config_of(out)
    assert config_of(out)["dtype"] == config_of(source)["dtype"]
    assert ckpt("verify", "--loads", out).code == 0
    wide = dequantize(source, tmp_path / "wide", "--dtype", "fp32")
    assert_same(weights(wide), {n: t.float() for n, t in dequantized_by_transformers(source, torch.float32).items()})


def four_bits(folder: Path, weight: torch.Tensor, **options: Any) -> Any:
    """Write one weight in bitsandbytes' serialized form and return its state."""
    packed, state = bitsandbytes().functional.quantize_4bit(weight, **options)
    parts = {f"x.weight.{name}": tensor for name, tensor in state.as_dict(packed=True).items()}
    save_file({"x.weight": packed} | parts, folder / "model.safetensors")
    return packed, state


#: bitsandbytes compiles its general code for each dtype and kind, which takes more than ten seconds.
STANCES = sample(["force_eager", "default"], lambda _: ["the same code"])


@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize("kind", ["nf4", "fp4"])
def test_block_sizes_and_shapes_of_4_bits(
    kind: str, nested: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Blocks of any size are dequantized. bitsandbytes' AVX-512 code is correct only if each row is whole blocks."""
    bitsandbytes()
    from bitsandbytes.backends.default import ops
    from bitsandbytes.functional import dequantize_4bit, dequantize_blockwise

    from converters.quantized.methods import bitsandbytes as ours

    monkeypatch.setattr(ours, "BLOCK", 8192)
    general = ops._dequantize_4bit_compute.__wrapped__  # without torch.compile
    generator = torch.Generator().manual_seed(4)
    cases = [
        (shape, size, dtype)
        for shape in ((64, 96), (7, 13), (1, 1), (3, 4096), (150, 64))
        for size in (32, 64, 4096)
        for dtype in (BF16, torch.float16, torch.float32)
    ]
    for number, (shape, size, dtype) in enumerate(cases):
        folder = tmp_path / str(number)
        folder.mkdir()
        weight = (0.02 * torch.randn(shape, generator=generator)).to(dtype)
        packed, state = four_bits(folder, weight, blocksize=size, quant_type=kind, compress_statistics=nested)
        absmax = dequantize_blockwise(state.absmax, state.state2) + state.offset if nested else state.absmax
        expected = general(packed.view(torch.uint8).reshape(-1), absmax, state.code, size, shape, dtype)
        found = api.dequantized(api.open(folder), BY_NAME[str(dtype).removeprefix("torch.")])["x.weight"][...]
        assert same(found, expected), (shape, size, dtype)
        for stance in STANCES[: 1 + (kind == "nf4" and not nested and dtype is BF16)] if shape[1] % size == 0 else ():
            with torch.compiler.set_stance(stance):
                assert same(found, dequantize_4bit(packed, state) + 0), (shape, size, dtype)
        other = api.dequantized(api.open(folder))["x.weight"][...]
        assert same(other, expected.bfloat16()), (shape, size, dtype)


def test_int8_by_row_blocks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    functional = bitsandbytes().functional
    from converters.quantized.methods import bitsandbytes as ours

    monkeypatch.setattr(ours, "BLOCK", 1000)
    weight, scales, _ = functional.int8_vectorwise_quant(torch.randn(77, 51).half())
    save_file({"x.weight": weight, "x.SCB": scales}, tmp_path / "model.safetensors")
    plain = api.dequantized(api.open(tmp_path), CASTABLE["fp32"])
    assert same(plain["x.weight"][...], functional.int8_vectorwise_dequant(weight, scales))


@pytest.mark.parametrize(
    "change, error, expected",
    [
        (lambda t: t.pop("x.weight.absmax"), CorruptError, "absmax: missing"),
        (lambda t: t.pop("x.weight.nested_absmax"), CorruptError, "nested_absmax: missing"),
        (lambda t: t.update({"x.weight": t["x.weight"][:-1]}), CorruptError, "1023 bytes instead of 1024"),
        (lambda t: t.update({"x.weight": t["x.weight"].T}), CorruptError, "one column"),
        (lambda t: t["x.weight.quant_map"].mul_(2), UsageError, "16 values differ"),
        (lambda t: t.update({STATE: t[STATE][:-1]}), CorruptError, "JSON"),
        (lambda t: t.update({STATE: coded({"quant_type": "nf4"})}), CorruptError, "a shape and a dtype"),
        (lambda t: t.update({STATE: coded(read_state(t) | {"blocksize": 48})}), CorruptError, "a blocksize"),
        (lambda t: t.update({STATE: coded(read_state(t) | {"shape": [32, -64]})}), CorruptError, "a shape and"),
        (lambda t: t.update({STATE: coded(read_state(t) | {"nested_offset": "1"})}), CorruptError, "nested_offset"),
        (lambda t: t.pop(STATE), CorruptError, "nf4: missing"),
    ],
)
def test_broken_4_bits(change: Any, error: Any, expected: str, tmp_path: Path) -> None:
    four_bits(tmp_path, torch.randn(32, 64), compress_statistics=True, quant_type="nf4")
    tensors = weights(tmp_path)
    change(tensors)
    save_file({n: t.contiguous() for n, t in tensors.items()}, tmp_path / "model.safetensors")
    with pytest.raises(error, match=expected) as caught:
        api.dequantized(api.open(tmp_path))
    assert caught.value.fqn


STATE = "x.weight.quant_state.bitsandbytes__nf4"


def coded(content: dict[str, Any]) -> torch.Tensor:
    return torch.tensor(list(json.dumps(content).encode()), dtype=torch.uint8)


def read_state(tensors: dict[str, torch.Tensor]) -> dict[str, Any]:
    return dict(json.loads(bytes(tensors[STATE].tolist())))


def test_int8_in_a_layout_of_a_gpus_is_refused(tmp_path: Path) -> None:
    tensors = {"x.weight": torch.ones(4, 4, dtype=torch.int8), "x.SCB": torch.ones(4)}
    save_file(tensors | {"x.weight_format": torch.tensor(2, dtype=torch.uint8)}, tmp_path / "model.safetensors")
    with pytest.raises(UsageError, match="GPU-specific layout"):
        api.dequantized(api.open(tmp_path))


# -- FP8 -----------------------------------------------------------------------------------------------------
@pytest.fixture(scope="module")
def fp8(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Create a model with MLA and experts, quantized by transformers' own FP8 method in small blocks."""
    from transformers import AutoModelForCausalLM, DeepseekV3Config, FineGrainedFP8Config
    from transformers.integrations.finegrained_fp8 import Fp8Quantize

    sizes = {"vocab_size": 131, "hidden_size": 64, "intermediate_size": 96, "moe_intermediate_size": 32}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2, "q_lora_rank": 32, "kv_lora_rank": 16}
    heads |= {"qk_rope_head_dim": 16, "qk_nope_head_dim": 16, "v_head_dim": 16}
    experts = {"n_routed_experts": 4, "n_group": 2, "topk_group": 1, "num_experts_per_tok": 2}
    layers = {"num_hidden_layers": 2, "first_k_dense_replace": 1, "bos_token_id": 1, "eos_token_id": 2}
    folder = tmp_path_factory.mktemp("fp8") / "deepseek"
    torch.manual_seed(5)
    config = DeepseekV3Config(**sizes, **heads, **experts, **layers, dtype=BF16)
    AutoModelForCausalLM.from_config(config, dtype=BF16).save_pretrained(folder)
    method = FineGrainedFP8Config(weight_block_size=(16, 32))

    class Quantizer:
        quantization_config = method

    def quantize(tensors: dict[str, torch.Tensor]) -> None:
        for name in [name for name in tensors if name.endswith(("proj.weight", "proj_with_mqa.weight"))]:
            tensors |= Fp8Quantize(Quantizer()).convert({name: tensors[name]})

    return edit(folder, quantize, quantization_config=method.to_dict())


def test_fp8_is_carried(fp8: Path, tmp_path: Path) -> None:
    assert_carried(fp8, tmp_path)


@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
def test_fp8_is_dequantized_as_transformers_does(dtype: str, fp8: Path, tmp_path: Path) -> None:
    out = dequantize(fp8, tmp_path / "plain", "--dtype", dtype)
    assert sum(name.endswith("_scale_inv") for name in weights(fp8)) == 26
    wanted = getattr(torch, CASTABLE[dtype].name)
    # On a CPU transformers dequantizes. It keeps some unquantized tensors in bf16 or fp32, whatever dtype is requested.
    ours, theirs = (
        {name: tensor.to(wanted) for name, tensor in load(folder, dtype=wanted).state_dict().items()}
        for folder in (out, fp8)
    )
    assert_same(ours, theirs)
    assert not any(name.endswith("_scale_inv") for name in weights(out))
    assert ckpt("verify", "--loads", out).code == 0


@pytest.mark.parametrize("shape", [(576, 256), (130, 129), (3, 300), (2, 200, 300)])
@pytest.mark.parametrize("scale_dtype", [torch.float32, BF16])
def test_fp8_blocks_that_are_cut_short(
    shape: tuple[int, ...], scale_dtype: torch.dtype, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """DeepSeek-V3 has such blocks (`kv_a_proj_with_mqa`, 576 rows). All values are one: expect the rounded factor."""
    from converters.quantized import _weight

    monkeypatch.setattr(_weight, "BLOCK", 30_000)
    generator = torch.Generator().manual_seed(6)
    values = torch.randint(0, 254, shape, generator=generator, dtype=torch.uint8)
    values[values == 0x7F] = 0xFE
    weight = values.view(torch.float8_e4m3fn)
    blocks = (*shape[:-2], -(-shape[-2] // 128), -(-shape[-1] // 128))
    scales = torch.rand(blocks, generator=generator).to(scale_dtype)
    save_file({"x.weight": weight, "x.weight_scale_inv": scales}, tmp_path / "model.safetensors")
    config = {"quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]}, "dtype": "bfloat16"}
    (tmp_path / "config.json").write_text(json.dumps(config))
    factors = scales.float().repeat_interleave(128, -2)[..., : shape[-2], :]
    factors = factors.repeat_interleave(128, -1)[..., : shape[-1]]
    found = api.dequantized(api.open(tmp_path))["x.weight"]
    assert same(found[...], (weight.float() * factors).to(BF16))


def test_fp8_with_one_factor_for_all(tmp_path: Path) -> None:
    weight = torch.randn(5, 7).to(torch.float8_e4m3fn)
    tensors = {"x.weight": weight, "x.weight_scale_inv": torch.tensor(0.3), "x.activation_scale": torch.tensor(2.0)}
    save_file(tensors, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps({"quantization_config": {"quant_method": "fp8"}}))
    plain = api.dequantized(api.open(tmp_path))
    assert set(plain.tensors) == {("x.weight", "weight")}
    assert same(plain["x.weight"][...], (weight.float() * 0.3).to(BF16))
    assert any("activations" in note for note in plain.notes)


# -- unsupported and plain weights ---------------------------------------------------------------------------
@pytest.mark.parametrize(
    "tensors, method, error, expected",
    [
        ({"x.qweight": torch.int32}, {"quant_method": "gptq"}, UsageError, "cannot dequantize this"),
        ({"x.weight": torch.float8_e4m3fn, "x.weight_scale": torch.float32}, {}, UsageError, "an unrecorded method"),
        ({"x.weight_scale_inv": torch.float32}, {"quant_method": "fp8"}, CorruptError, "x.weight: missing"),
        (
            {"x.weight": torch.float8_e4m3fn, "x.weight_scale_inv": torch.float32},
            {"quant_method": "fp8"},
            CorruptError,
            "[8, 8] instead of []",
        ),
        (
            {"x.weight": torch.float8_e4m3fn, "x.weight_scale_inv": torch.float64},
            {"quant_method": "fp8", "weight_block_size": [1, 1]},
            CorruptError,
            "dtype float64",
        ),
        (
            {"x.weight": torch.float8_e4m3fn, "x.weight_scale_inv": torch.float32},
            {"quant_method": "fp8", "weight_block_size": [4, 8]},
            CorruptError,
            "instead of [2, 1]",
        ),
    ],
)
def test_what_is_not_dequantized(
    tensors: dict[str, torch.dtype], method: dict[str, Any], error: Any, expected: str, tmp_path: Path
) -> None:
    save_file({n: torch.ones(8, 8).to(dtype) for n, dtype in tensors.items()}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama", "quantization_config": method}))
    result = ckpt("convert", "hf", "hf", tmp_path, "-o", tmp_path.parent / "out", "--dequantize")
    assert result.code == error.exit_code
    assert expected in result.err


def test_a_plain_model_stays_as_it_is(tmp_path: Path) -> None:
    source = tmp_path / "in"
    source.mkdir()
    save_file({"layer_scales": torch.ones(3), "a.weight": torch.ones(2, 2)}, source / "model.safetensors")
    result = ckpt("convert", "hf", "hf", source, "-o", tmp_path / "out", "--dequantize")
    assert result.code == 0
    assert "no weight is quantized" in result.err
    assert_same(weights(tmp_path / "out"), weights(source))


_FP8_LAYERS = re.compile(r".*\.(?:wq_[ab]|wkv|wo_[ab]|w[123])\.weight")
_FP4_EXPERTS = re.compile(r".*\.experts\.\d+\.w[123]\.weight")


def released_deepseek_v4(tensors: dict[str, torch.Tensor]) -> None:
    """Rename and quantize as in DeepSeek-V4's release: random bytes, scales that are powers of two."""
    for name in list(tensors):
        weight = tensors.pop(name)
        name = name.removeprefix("model.").replace("embed_tokens.", "embed.").replace("hc_head.hc_", "hc_head_")
        rows, columns = weight.shape if weight.ndim == 2 else (1, 1)
        scale = f"{name.removesuffix('weight')}scale"
        if _FP4_EXPERTS.fullmatch(name):
            weight = torch.randint(-128, 128, (rows, columns // 2), dtype=torch.int8)
            tensors[scale] = torch.randint(120, 124, (rows, columns // 32)).to(torch.uint8).view(torch.float8_e8m0fnu)
        elif _FP8_LAYERS.fullmatch(name) and ".compressor." not in name and not (rows % 32 or columns % 32):
            exponents = torch.randint(116, 120, (rows // 32, columns // 32))
            weight = weight.mul(256).to(torch.float8_e4m3fn)
            tensors[scale] = exponents.to(torch.uint8).view(torch.float8_e8m0fnu)
        tensors[name] = weight


def test_deepseek_v4_has_the_logits_of_transformers(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM, DeepseekV4Config

    torch.manual_seed(5)
    layers = ("sliding_attention", "compressed_sparse_attention", "heavily_compressed_attention")
    sizes = {"vocab_size": 131, "hidden_size": 128, "moe_intermediate_size": 64, "num_hidden_layers": 3, "hc_mult": 2}
    sizes |= {"num_attention_heads": 4, "head_dim": 32, "q_lora_rank": 64, "o_groups": 2, "o_lora_rank": 32}
    sizes |= {"index_n_heads": 2, "index_head_dim": 32, "index_topk": 4, "sliding_window": 8}
    sizes |= {"n_routed_experts": 4, "num_experts_per_tok": 2, "max_position_embeddings": 256}
    kinds = {"layer_types": list(layers), "mlp_layer_types": ["hash_moe", "moe", "moe"]}
    rates = dict(zip(layers[1:], (4, 8), strict=True))
    config = DeepseekV4Config(**sizes, **kinds, compress_rates=rates, partial_rotary_factor=0.5, initializer_range=0.1)
    AutoModelForCausalLM.from_config(config, dtype=BF16).save_pretrained(tmp_path / "model")
    method = {"quant_method": "fp8", "scale_fmt": "ue8m0", "fmt": "e4m3", "weight_block_size": [32, 32]}
    source = edit(
        tmp_path / "model", released_deepseek_v4, quantization_config=method, expert_dtype="fp4", dtype="bfloat16"
    )
    assert sum(name.endswith(".scale") for name in weights(source)) == 25 + 36

    def logits(folder: Path) -> torch.Tensor:
        model, info = load(folder, dtype=BF16, output_loading_info=True)
        assert not any(info.values()), info
        with torch.no_grad():
            return model.eval()(torch.arange(24).reshape(2, 12)).logits

    plain = dequantize(source, tmp_path / "plain", "--names", "own")
    expected = logits(source)
    assert expected.isfinite().all() and same(logits(plain), expected)
    changed = ["layers.0.attn.wq_a", "layers.1.ffn.experts.0.w2"]

    def flip(tensors: dict[str, torch.Tensor]) -> None:
        for layer in changed:
            tensors[f"{layer}.scale"].view(torch.uint8)[0, 0] ^= 1

    flipped = dequantize(edit(source, flip), tmp_path / "flipped", "--names", "own")
    assert differing(weights(flipped), weights(plain)) == [f"{layer}.weight" for layer in changed]
    assert not same(logits(flipped), expected)


# -- merging an adapter --------------------------------------------------------------------------------------
def test_an_adapter_is_merged_onto_dequantized_weights(quantized: Callable[[str, str], Path], tmp_path: Path) -> None:
    """The result matches peft's merge into the model dequantized by transformers."""
    from peft import PeftModel

    for kind in ("nf4 double", "nf4 in bf16", "int8"):
        base = quantized("llama", kind)
        folder = tmp_path / kind
        saved = save_adapter(base.parent / "llama", folder / "adapter", {"target_modules": ["q_proj", "down_proj"]})
        refused = ckpt("merge-lora", saved, "--base", base, "-o", folder / "merged")
        assert refused.code == UsageError.exit_code
        assert "--dequantize" in refused.err
        assert "full-precision model with --base" in refused.err
        result = ckpt("merge-lora", saved, "--base", base, "-o", folder / "merged", "--dequantize")
        assert result.code == 0, result.err
        plain = load(base, device_map="cpu").dequantize()
        merged = PeftModel.from_pretrained(plain, saved).merge_and_unload()
        assert_same(weights(folder / "merged"), dict(merged.state_dict()))
        assert "quantization_config" not in config_of(folder / "merged")


def test_an_adapter_of_experts_is_merged_onto_dequantized_mxfp4(gpt_oss: Path, tmp_path: Path) -> None:
    from peft import PeftModel

    plain = dequantize(gpt_oss, tmp_path / "plain")
    targets = {"target_modules": ["q_proj"], "target_parameters": ["mlp.experts.gate_up_proj"]}
    saved = save_adapter(plain, tmp_path / "adapter", targets)
    options = ("--base", gpt_oss, "-o", tmp_path / "merged")
    assert ckpt("merge-lora", saved, *options).code == UsageError.exit_code
    result = ckpt("merge-lora", saved, *options, "--dequantize")
    assert result.code == 0, result.err
    model = load(gpt_oss, experts_implementation="eager", attn_implementation="eager")  # on a CPU it dequantizes
    merged = PeftModel.from_pretrained(model, saved).merge_and_unload()
    assert_same(weights(tmp_path / "merged"), dict(merged.state_dict()))
    assert "quantization_config" not in config_of(tmp_path / "merged")


def test_quantized_experts_stay_where_only_attention_is_adapted(gpt_oss: Path, tmp_path: Path) -> None:
    plain = dequantize(gpt_oss, tmp_path / "plain")
    saved = save_adapter(plain, tmp_path / "adapter", {"target_modules": ["q_proj"]})
    for base, out in ((plain, "onto-plain"), (gpt_oss, "onto-mxfp4")):
        assert ckpt("merge-lora", saved, "--base", base, "-o", tmp_path / out).code == 0
    expected, found = weights(tmp_path / "onto-plain"), weights(tmp_path / "onto-mxfp4")
    before = weights(gpt_oss)
    for name, tensor in found.items():
        assert same(tensor, before[name] if ".experts." in name else expected[name]), name
    assert found.keys() == before.keys()
    assert config_of(tmp_path / "onto-mxfp4") == config_of(gpt_oss)


def test_a_qlora_run_is_merged_onto_the_base_that_its_checkpoint_holds(
    quantized: Callable[[str, str], Path], tmp_path: Path
) -> None:
    """A trainer saves the state dict of a PeftModel over 4 bits in one file."""
    from peft import LoraConfig, PeftModel, get_peft_model

    base, run = quantized("llama", "nf4 double"), tmp_path / "run"
    torch.manual_seed(8)
    model = get_peft_model(load(base, device_map="cpu"), LoraConfig(target_modules=["v_proj"], init_lora_weights=False))
    model.save_pretrained(run)
    torch.save(model.state_dict(), run / "pytorch_model.bin")
    (run / "adapter_model.safetensors").unlink()
    shutil.copy(base / "config.json", run)
    assert ckpt("merge-lora", run, "-o", tmp_path / "no").code == UsageError.exit_code
    result = ckpt("merge-lora", run, "-o", tmp_path / "merged", "--dequantize")
    assert result.code == 0, result.err
    model.save_pretrained(tmp_path / "adapter")
    plain = load(base, device_map="cpu").dequantize()
    merged = PeftModel.from_pretrained(plain, tmp_path / "adapter").merge_and_unload()
    assert_same(weights(tmp_path / "merged"), dict(merged.state_dict()))


@pytest.mark.parametrize("key", ["quantization_config", "compression_config"])
@pytest.mark.parametrize("is_nested", [False, True])
def test_config_of_plain_values_records_no_quantization(key: str, is_nested: bool, tmp_path: Path) -> None:
    """Vision models record it in `text_config`; the first releases of compressed-tensors had another key."""
    weight = torch.randn(128, 128).to(torch.float8_e4m3fn)
    tensors = {"x.weight": weight, "x.weight_scale_inv": torch.ones(1, 1)}
    record = {key: {"quant_method": "fp8", "weight_block_size": [128, 128]}}
    text = {"num_hidden_layers": 1, **(record if is_nested else {})}
    folder = tmp_path / "in"
    folder.mkdir()
    save_file(tensors, folder / "model.safetensors")
    config = {"model_type": "x", "text_config": text, **({} if is_nested else record)}
    (folder / "config.json").write_text(json.dumps(config))
    found = config_of(dequantize(folder, tmp_path / "out"))
    assert {**found, "dtype": None} == {"model_type": "x", "text_config": {"num_hidden_layers": 1}, "dtype": None}
    assert config_of(dequantize(folder, tmp_path / "again")) == found
    assert ckpt("convert", "hf", "hf", folder, "-o", tmp_path / "carried").code == 0
    assert {**config_of(tmp_path / "carried"), "dtype": None} == {**config, "dtype": None}


def test_dtypes_in_a_quantizations_record_are_not_the_models(tmp_path: Path) -> None:
    """AMD Quark calls the packed values' dtype `dtype`."""
    record = {"quant_method": "quark", "global_quant_config": {"weight": {"dtype": "fp8_e4m3"}}, "dtype": "fp8_e4m3"}
    tensors = {"x.weight": torch.ones(4, 4).to(torch.float8_e4m3fn), "y.weight": torch.ones(64, 4, dtype=BF16)}
    folder = tmp_path / "in"
    folder.mkdir()
    save_file(tensors, folder / "model.safetensors")
    sub = {"text_config": {"dtype": "float16", "quantization_config": record}}
    config = {"model_type": "x", "dtype": "float16", "quantization_config": record, **sub}
    (folder / "config.json").write_text(json.dumps(config))
    assert ckpt("convert", "hf", "hf", folder, "-o", tmp_path / "out").code == 0
    sub = {"text_config": {"dtype": "bfloat16", "quantization_config": record}}
    assert config_of(tmp_path / "out") == {**config, "dtype": "bfloat16", **sub}


def test_parameters_with_names_of_attention_scales_stay(tmp_path: Path) -> None:
    """A scale of the KV cache is one number, or one per head. Without a table, other shapes are parameters."""
    tensors = {"x.weight": torch.randn(128, 128).to(torch.float8_e4m3fn), "x.weight_scale_inv": torch.ones(1, 1)}
    scales = {"attn.k_scale": torch.ones(1), "attn.v_scale": torch.ones(()), "attn.q_scale": torch.ones(4, 1, 1)}
    own = {"attn.output_scale": torch.rand(128), "attn.kv_scale": torch.rand(4, 32)}
    save_file({**tensors, **scales, **own}, tmp_path / "model.safetensors")
    config = {"quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    plain = api.dequantized(api.open(tmp_path))
    assert {fqn for fqn, _ in plain.tensors} == {"x.weight", *own}
    assert any("left out: 3 scales for activations" in note for note in plain.notes)
