"""`converters/quantized/dequantize.py`, `converters/quantized/methods/awq.py`, `bitsandbytes.py`, `torchao.py`: models.

Each library quantizes and saves a tiny Llama on a CPU. `--dequantize` writes the library's own plain values, so the
logits are equal, too. `tests/quantized` has recorded weights with every bit pattern.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests.quantized.test_damaged_scales import overwritten
from tests.quantized.test_dequantize import KINDS, dequantize, load
from tests.support.adapters import Tables, differing, same, weights
from tests.support.model_files import save_model

pytestmark = pytest.mark.slow
BF16, F16 = torch.bfloat16, torch.float16
SIZES = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2, "vocab_size": 35}
SIZES |= {"num_attention_heads": 4, "num_key_value_heads": 2}
INPUTS = torch.arange(24).reshape(2, 12) * 7 % 32
#: Title of the table printed after the tests.
TABLE = "logits of quantized models against their plain values"
#: The weight whose scale is changed.
CHANGED = "model.layers.0.mlp.down_proj.weight"
#: The quantized model's own logits, or None if it doesn't run on a CPU, and a model with the library's plain values.
Quantized = tuple[torch.Tensor | None, Any]


def save_llama(folder: Path, dtype: torch.dtype) -> Path:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(3)
    config = LlamaConfig(**SIZES, initializer_range=0.2, tie_word_embeddings=False)
    LlamaForCausalLM(config).to(dtype).save_pretrained(folder)
    return folder


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        return model.eval()(INPUTS).logits.float()


def attempt(load_model: Callable[[], Any]) -> torch.Tensor | None:
    """Return a model's logits, or None if it can't be loaded or run."""
    try:
        return logits(load_model())
    except (RuntimeError, AssertionError):
        return None


def with_weights(source: Path, plain: dict[str, torch.Tensor]) -> Any:
    """Load a model and replace the weights of all layers' projections."""
    model = load(source)
    found = model.load_state_dict(plain, strict=False, assign=True)
    assert len(plain) == 14 and not found.unexpected_keys
    return model


def one_scale_changed(folder: Path) -> AbstractContextManager[None]:
    """Change the highest byte of one scale in a file."""
    (file,) = folder.glob("*.safetensors")
    parts, layer = load_file(file), CHANGED.removesuffix("weight")
    ends = ("scale", "scales", "SCB", "absmax")
    (name, *_) = sorted(one for one in parts if one.startswith(layer) and one.endswith(ends) and "input" not in one)
    scale = parts[name].contiguous()
    scale.view(-1)[:1].view(torch.uint8)[-1] ^= 1
    return overwritten(file, {name: scale})


def compress(source: Path, out: Path, scheme: str) -> Path:
    from llmcompressor import model_free_ptq

    plain = ["lm_head", "re:.*embed_tokens", r"re:.*\.gate$"]
    model_free_ptq(str(source), str(out), scheme=scheme, ignore=plain, device="cpu", max_workers=1)
    return out


def by_compressed_tensors(source: Path, out: Path, scheme: str) -> Quantized:
    from transformers import CompressedTensorsConfig

    compress(source, out, scheme)
    return attempt(lambda: load(out)), load(out, quantization_config=CompressedTensorsConfig(dequantize=True))


def by_torchao(source: Path, out: Path, kind: str) -> Quantized:
    from torchao import quantization as ao
    from transformers import TorchAoConfig

    method = {
        "float8": ao.Float8WeightOnlyConfig(),
        "int8": ao.Int8WeightOnlyConfig(),
        "int8-dynamic": ao.Int8DynamicActivationInt8WeightConfig(),
        "int8-axis": ao.IntxWeightOnlyConfig(weight_dtype=torch.int8, granularity=ao.PerAxis(0)),
        "int4-groups": ao.IntxWeightOnlyConfig(weight_dtype=torch.int4, granularity=ao.PerGroup(32)),
    }[kind]
    config = TorchAoConfig(quant_type=method, modules_to_not_convert=["lm_head"])
    load(source, device_map="cpu", quantization_config=config).save_pretrained(out)
    model = load(out, device_map="cpu")
    stored = {name: one for name, one in model.state_dict().items() if type(one) is not torch.Tensor}
    return logits(model), with_weights(source, {name: one.dequantize().to(BF16) for name, one in stored.items()})


def by_bitsandbytes(source: Path, out: Path, kind: str) -> Quantized:
    from transformers import BitsAndBytesConfig

    config = BitsAndBytesConfig(**KINDS[kind])
    load(source, device_map="cpu", quantization_config=config).save_pretrained(out)
    return logits(load(out, device_map="cpu")), load(out, device_map="cpu").dequantize()


def by_modelopt(source: Path, out: Path, kind: str) -> Quantized:
    """Quantize with simulated formats, and let `QTensor` compute the exported weights.

    transformers reads none of the exports.
    """
    from modelopt.torch import quantization
    from modelopt.torch.export import export_hf_checkpoint
    from modelopt.torch.quantization import qtensor

    model = quantization.quantize(load(source), getattr(quantization, f"{kind}_DEFAULT_CFG"), forward_loop=logits)
    own = attempt(lambda: model)
    with torch.inference_mode():
        export_hf_checkpoint(model, export_dir=str(out))
    parts, shapes = weights(out), {name: one.shape for name, one in weights(source).items()}
    plain = {}
    for name in [name for name in parts if name.endswith(".weight_scale")]:
        weight, factors = name.removesuffix("_scale"), {"scale": parts[name]}
        if kind == "NVFP4":
            factors |= {"double_scale": parts[f"{name}_2"], "block_sizes": {-1: 16}}
        tensor = getattr(qtensor, f"{kind}QTensor")(shapes[weight], BF16, parts[weight])
        plain[weight] = tensor.dequantize(**factors)
    return own, with_weights(source, plain)


def by_gptqmodel(source: Path, out: Path, kind: str) -> Quantized:
    """Pack rounded weights with GPTQModel's layers. They compute in fp16."""
    from gptqmodel.nn_modules.qlinear.torch import TorchLinear
    from gptqmodel.nn_modules.qlinear.torch_awq import AwqTorchLinear
    from gptqmodel.quantization.awq.utils.packing_utils import dequantize_gemm
    from gptqmodel.utils.backend import BACKEND
    from transformers import AwqConfig, GPTQConfig

    from fixtures.make_whole_models import GROUP, gptq, rounding

    settings = {"bits": 4, "group_size": GROUP, "desc_act": False, "sym": False}
    tensors = {}
    for name, weight in weights(source).items():
        if not name.endswith("_proj.weight"):
            tensors[name] = weight
            continue
        if kind == "awq":
            codes, scale, zero = rounding(weight)
            linear = torch.nn.Linear(*reversed(weight.shape), bias=False, dtype=weight.dtype)
            linear.weight.data = ((codes - zero[..., None]) * scale[..., None]).reshape(weight.shape).to(weight.dtype)
            layer = AwqTorchLinear(**settings, in_features=weight.shape[1], out_features=weight.shape[0])
            layer.pack(linear, scale.half(), zero)
            parts = {part: getattr(layer, part) for part in ("qweight", "qzeros", "scales")}
        else:
            parts = gptq(weight)
            if kind == "gptq":  # its zero points are stored minus one; none is zero
                parts["qzeros"] -= 0x11111111
        parts["scales"] = parts["scales"].to(weight.dtype)
        tensors |= {f"{name.removesuffix('weight')}{part}": one.contiguous() for part, one in parts.items()}
    entry = {"quant_method": "awq", "zero_point": True, "version": "gemm", "modules_to_not_convert": ["lm_head"]}
    if kind != "awq":
        entry = {"quant_method": "gptq", "checkpoint_format": kind}
    config = json.loads((source / "config.json").read_text())
    save_model(out, tensors, {**config, "quantization_config": {**settings, **entry}})
    backend = AwqConfig(backend="torch_awq") if kind == "awq" else GPTQConfig(4, backend=BACKEND.TORCH)
    model = load(out, device_map="cpu", quantization_config=backend)
    plain = {}
    for name, layer in model.named_modules():
        if isinstance(layer, AwqTorchLinear):
            plain[name] = dequantize_gemm(layer.qweight, layer.qzeros, layer.scales, 4, GROUP)
        elif isinstance(layer, TorchLinear):
            plain[name] = layer.dequantize_weight()
    dtype = next(iter(weights(source).values())).dtype
    return logits(model), with_weights(
        source, {f"{name}.weight": one.T.to(dtype).contiguous() for name, one in plain.items()}
    )


@dataclass(frozen=True)
class Case:
    quantize: Callable[[Path, Path, str], Quantized]
    kind: str
    #: Bound for differences between the model's own logits and the plain model's. None: it doesn't run on a CPU.
    own: float | None = 0
    dtype: torch.dtype = BF16

    def __str__(self) -> str:
        return f"{self.quantize.__name__.removeprefix('by_').replace('_', '-')} {self.kind}"


CASES = [
    *(Case(by_compressed_tensors, one) for one in ("W8A16", "W4A16", "MXFP4A16", "NVFP4A16")),
    *(Case(by_compressed_tensors, one, 6) for one in ("W8A8", "FP8_DYNAMIC", "FP8_BLOCK", "MXFP8", "MXFP4")),
    Case(by_compressed_tensors, "W4A16_ASYM", None),
    *(Case(by_torchao, one) for one in ("float8", "int8-axis", "int4-groups")),
    *(Case(by_torchao, one, 0.5) for one in ("int8", "int8-dynamic")),
    *(Case(by_bitsandbytes, one, 0.5) for one in ("nf4", "nf4 double", "int8")),
    *(Case(by_gptqmodel, one, 0.02, F16) for one in ("gptq", "gptq_v2", "awq")),
    Case(by_modelopt, "FP8", 2),
    *(Case(by_modelopt, one, None) for one in ("MXFP8", "NVFP4")),
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_plain_values_and_logits_are_the_librarys(case: Case, tmp_path: Path, tables: Tables) -> None:
    source, quantized = save_llama(tmp_path / "source", case.dtype), tmp_path / "quantized"
    own, expected = case.quantize(source, quantized, case.kind)

    def differences() -> list[str]:
        model = load(dequantize(quantized, tmp_path / "plain", "--overwrite"))
        found = differing(model.state_dict(), expected.state_dict())
        return found if same(logits(model), logits(expected)) else [*found, "logits"]

    assert differences() == []
    with one_scale_changed(quantized):
        assert differences() == [CHANGED, "logits"]
    if case.own is None:
        assert own is None
    else:
        difference = float((own - logits(expected)).abs().max())
        tables[TABLE][str(case)]["largest difference"] = f"{difference:.2g}"
        assert difference <= case.own


def test_gptqmodel_holds_scales_in_fp16(tmp_path: Path, tables: Tables) -> None:
    """Scales in bf16 that fp16 can't hold give other numbers there."""
    source, quantized = save_llama(tmp_path / "source", BF16), tmp_path / "quantized"
    own, expected = by_gptqmodel(source, quantized, "gptq_v2")
    plain = dequantize(quantized, tmp_path / "plain")
    found, theirs = weights(plain), expected.state_dict()
    count, total = (
        sum(int((found[name] != theirs[name]).sum()) for name in found),
        sum(map(torch.numel, found.values())),
    )
    assert 0 < count < 1e-3 * total
    difference = float((own - logits(load(plain))).abs().max())
    row = {"largest difference": f"{difference:.2g}", "other numbers": f"{count} of {total}"}
    tables[TABLE]["gptqmodel gptq_v2, scales in bf16"] = row


@pytest.mark.parametrize("kind", ["FP8", "MXFP8", "NVFP4"])
def test_transformers_reads_no_scales_of_modelopt(kind: str, tmp_path: Path) -> None:
    out = tmp_path / "quantized"
    by_modelopt(save_llama(tmp_path / "source", BF16), out, kind)
    if kind == "NVFP4":
        with pytest.raises(RuntimeError):
            load(out)
    else:
        assert same(load(out).state_dict()[CHANGED], weights(out)[CHANGED].to(BF16))
