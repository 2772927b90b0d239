"""Quantized weights: carried bit for bit, and dequantized to the bits of transformers and bitsandbytes themselves."""

from __future__ import annotations

import json
import shutil
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from ckpt import api
from ckpt.dtypes import CASTABLE
from ckpt.errors import CorruptError, LossError
from tests.commands import ckpt
from tests.test_lora import same, weights

BF16 = torch.bfloat16
#: Sizes of gpt_oss in groups of 32, unequal ones.
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
    """`folder`, which has one file, with its tensors and its config changed."""
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
    """The same tensors, bit for bit."""
    assert found.keys() == expected.keys()
    assert [name for name in found if not same(found[name], expected[name])] == []


def assert_carried(source: Path, tmp_path: Path) -> None:
    """`hf` to `hf`, in shards of another size, keeps every tensor's bits and the config; verify and hash agree."""
    out = tmp_path / "carried"
    result = ckpt("convert", "hf", "hf", source, "-o", out, "--max-shard-size", "20KB", "--manifest")
    assert result.code == 0, result.err
    assert len(list(out.glob("*.safetensors"))) > 2
    assert_same(weights(out), weights(source))
    assert config_of(out) == config_of(source)
    assert ckpt("verify", source, out).code == 0
    assert ckpt("verify", out).code == 0
    assert ckpt("hash", source, "-q").out == ckpt("hash", out, "-q").out


def dequantize(source: Path, out: Path, *more: str) -> Path:
    result = ckpt("convert", "hf", "hf", source, "-o", out, "--dequantize", *more)
    assert result.code == 0, result.err
    assert "dequantized from" in result.err
    return out


# -- MXFP4 ---------------------------------------------------------------------------------------------------


def packed_experts(tensors: dict[str, torch.Tensor]) -> None:
    """Experts as blocks and scales of any bits, in the shapes of openai/gpt-oss-20b's files."""
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
    assert "uint8" in ckpt("inspect", gpt_oss).out


@pytest.mark.parametrize("dtype", ["keep", "bf16", "fp16", "fp32"])
def test_mxfp4_is_dequantized_as_transformers_does(dtype: str, gpt_oss: Path, tmp_path: Path) -> None:
    out = dequantize(gpt_oss, tmp_path / "plain", "--dtype", dtype, "--max-shard-size", "100KB")
    wanted = BF16 if dtype == "keep" else getattr(torch, CASTABLE[dtype].name)
    loaded = load(gpt_oss, dtype=wanted).state_dict()  # on a CPU it dequantizes; it keeps norms in fp32 beside fp16
    assert_same(weights(out), {name: tensor.to(wanted) for name, tensor in loaded.items()})
    expected = config_of(gpt_oss) | {"dtype": str(wanted).removeprefix("torch.")}
    del expected["quantization_config"]
    assert config_of(out) == expected
    assert ckpt("verify", "--loads", out).code == 0


@pytest.mark.parametrize("dtype", ["bf16", "fp16", "fp32"])
def test_every_byte_with_every_exponent_of_mxfp4(dtype: str, tmp_path: Path) -> None:
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    values = torch.arange(256, dtype=torch.uint8)
    tensors = {
        "x.w_blocks": values.reshape(1, 1, 16, 16).expand(2, 256, 16, 16).contiguous(),
        "x.w_scales": values[None, :, None].expand(2, 256, 16).contiguous(),
    }
    save_file(tensors, tmp_path / "model.safetensors")
    plain = api.dequantized(api.open(tmp_path), CASTABLE[dtype])
    expected = convert_moe_packed_tensors(*tensors.values(), dtype=getattr(torch, CASTABLE[dtype].name))
    assert same(plain["x.w"][...], expected)
    assert same(plain["x.w"][1, 3:200, 5:77], expected[1, 3:200, 5:77])


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
        (lambda t, n: t.pop(f"{n}_scales"), "lacks one of its parts"),
        (lambda t, n: t.pop(f"{n}_blocks"), "lacks one of its parts"),
        (lambda t, n: t.update({f"{n}_blocks": t[f"{n}_blocks"][..., :8]}), "experts, out, groups, 16"),
        (lambda t, n: t.update({f"{n}_scales": t[f"{n}_scales"][:, :-1]}), "not as it should be"),
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
