"""`converters/quantized/rounding.py`, `ckpt/compare/quantized.py`: errors of quantized weights, and their bounds.

`fixtures/make_rounded_weights.py` recorded weights before and after rounding by the library that owns the format.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

import ckpt as library
from ckpt.errors import CorruptError, UsageError
from tests.quantized import test_methods
from tests.support.commands import ckpt
from tests.support.model_files import merge_json
from tests.support.places import REPOSITORY

Parts = dict[str, torch.Tensor]
E2M1 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
E4M3, E8M0 = torch.float8_e4m3fn, torch.float8_e8m0fnu
NAME = "model.layers.0.mlp.up_proj.weight"

RECORDED = sorted((REPOSITORY / "fixtures").glob("rounded-*/*.safetensors"))


def plain_weight(dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    """Return [64, 128] with rows of very different sizes, and one block of zeros."""
    generator = torch.Generator().manual_seed(5)
    weight = torch.randn(64, 128, generator=generator) * torch.logspace(-3, 1, 64)[:, None]
    weight[3, 32:64] = 0
    return weight.to(dtype)


def e2m1(numbers: torch.Tensor) -> torch.Tensor:
    """Return two codes per byte of the nearest values, ties to even."""
    distance = (numbers.abs()[..., None] - E2M1).abs()
    distance += torch.tensor([0.0, 1e-9] * 4)  # ties go to the even code
    codes = distance.argmin(-1).to(torch.uint8) | (torch.signbit(numbers).to(torch.uint8) << 3)
    return codes[..., ::2] | codes[..., 1::2] << 4


def blocks(weight: torch.Tensor, size: int) -> torch.Tensor:
    return weight.float().reshape(*weight.shape[:-1], -1, size)


def fp8_blocks(weight: torch.Tensor) -> Parts:
    tiles = weight.float().reshape(2, 32, 4, 32)
    scale = tiles.abs().amax((1, 3)).clamp(min=1e-12) / 448
    codes = (tiles / scale[:, None, :, None]).clamp(-448, 448).to(E4M3)
    return {NAME: codes.reshape(weight.shape), f"{NAME}_scale_inv": scale}


def mxfp4(weight: torch.Tensor, largest: float = 6.0, floors: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
    parts = blocks(weight, 32)
    amax = parts.abs().amax(-1).clamp(min=2.0**-120)
    exponent = amax.log2().floor() - 2 if floors else (amax / largest).log2().ceil()
    codes = e2m1((parts / exponent.exp2()[..., None]).clamp(-6, 6))
    return codes, (exponent + 127).to(torch.uint8)


def deepseek_experts(weight: torch.Tensor) -> Parts:
    codes, scale = mxfp4(weight)
    return {NAME: codes.reshape(64, 64).view(torch.int8), NAME.replace("weight", "scale"): scale.view(E8M0)}


def compressed_mxfp4(weight: torch.Tensor) -> Parts:
    codes, scale = mxfp4(weight, floors=True)
    return {f"{NAME}_packed": codes.reshape(64, 64), f"{NAME}_scale": scale}


def nvfp4(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    parts = blocks(weight, 16)
    amax = parts.abs().amax(-1)
    factor = (amax.max() / (6 * 448)).reshape(1)
    scale = (amax / 6 / factor).clamp(2.0**-9, 448).to(E4M3)
    numbers = parts / (scale.float() * factor)[..., None]
    return e2m1(numbers.clamp(-6, 6)).reshape(64, 64), scale, factor


def modelopt_nvfp4(weight: torch.Tensor) -> Parts:
    codes, scale, factor = nvfp4(weight)
    return {NAME: codes, f"{NAME}_scale": scale, f"{NAME}_scale_2": factor.reshape(())}


def compressed_nvfp4(weight: torch.Tensor) -> Parts:
    codes, scale, factor = nvfp4(weight)
    return {f"{NAME}_packed": codes, f"{NAME}_scale": scale, f"{NAME}_global_scale": 1 / factor}


def compressed_int8(weight: torch.Tensor) -> Parts:
    scale = weight.abs().amax(1, keepdim=True) / 127.5  # in the weight's dtype, as compressed-tensors computes
    return {NAME: (weight / scale).round().clamp(-128, 127).to(torch.int8), f"{NAME}_scale": scale}


def compressed_int4(weight: torch.Tensor) -> Parts:
    """Return packed integers with zero points."""
    parts = blocks(weight, 32)
    low, high = parts.amin(-1).clamp(max=0), parts.amax(-1).clamp(min=0)
    scale = ((high - low) / 15).clamp(min=1e-8)
    zero = (-low / scale).round().clamp(0, 15)
    codes = ((parts / scale[..., None]).round() + zero[..., None]).clamp(0, 15).to(torch.int64).reshape(64, 16, 8)
    shifts = torch.arange(0, 32, 4)
    words = (codes << shifts).sum(-1)
    zeros = (zero.to(torch.int64).reshape(8, 8, 4) << shifts[None, :, None]).sum(1)

    def int32(numbers: torch.Tensor) -> torch.Tensor:
        return torch.where(numbers >= 1 << 31, numbers - (1 << 32), numbers).to(torch.int32)

    found = {"packed": int32(words), "scale": scale, "zero_point": int32(zeros), "shape": torch.tensor([64, 128])}
    return {f"{NAME}_{part}": tensor for part, tensor in found.items()}


def bitsandbytes_int8(weight: torch.Tensor) -> Parts:
    import bitsandbytes.functional as functional

    codes, rows, _ = functional.int8_vectorwise_quant(weight.half())
    layout = torch.tensor(0, dtype=torch.uint8)
    return {NAME: codes, NAME.replace("weight", "SCB"): rows, NAME.replace("weight", "weight_format"): layout}


def bitsandbytes_four_bits(kind: str, weight: torch.Tensor) -> Parts:
    import bitsandbytes.functional as functional

    codes, state = functional.quantize_4bit(weight, quant_type=kind)
    return {NAME: codes, **{f"{NAME}.{part}": tensor for part, tensor in state.as_dict(packed=True).items()}}


def compressed(format: str, **weights: Any) -> dict[str, Any]:
    settings = {"num_bits": 4, "type": "float", "symmetric": True, "strategy": "group", **weights}
    return {
        "quant_method": "compressed-tensors",
        "format": format,
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": settings, "input_activations": None}},
    }


@dataclass(frozen=True)
class Case:
    quantize: Callable[[torch.Tensor], Parts]
    config: dict[str, Any]
    scale: str
    dtype: torch.dtype = torch.bfloat16


INT8 = {"num_bits": 8, "type": "int", "strategy": "channel"}
INT4 = {"type": "int", "group_size": 32, "symmetric": False}
FOUR_BITS = {"quant_method": "bitsandbytes", "load_in_4bit": True}
CASES = {
    "fp8": Case(fp8_blocks, {"quant_method": "fp8", "weight_block_size": [32, 32]}, f"{NAME}_scale_inv"),
    "deepseek experts": Case(
        deepseek_experts,
        {"quant_method": "fp8", "weight_block_size": [32, 32], "scale_fmt": "ue8m0", "expert_dtype": "fp4"},
        NAME.replace("weight", "scale"),
    ),
    "modelopt nvfp4": Case(modelopt_nvfp4, {"quant_method": "modelopt", "quant_algo": "W4A16_NVFP4"}, f"{NAME}_scale"),
    "compressed nvfp4": Case(compressed_nvfp4, compressed("nvfp4-pack-quantized", group_size=16), f"{NAME}_scale"),
    "compressed mxfp4": Case(compressed_mxfp4, compressed("mxfp4-pack-quantized", group_size=32), f"{NAME}_scale"),
    "compressed int8": Case(compressed_int8, compressed("int-quantized", **INT8), f"{NAME}_scale"),
    "compressed int8 of fp32": Case(
        compressed_int8, compressed("int-quantized", **INT8), f"{NAME}_scale", torch.float32
    ),
    "compressed int4": Case(compressed_int4, compressed("pack-quantized", **INT4), f"{NAME}_scale"),
    "bitsandbytes int8": Case(
        bitsandbytes_int8, {"quant_method": "bitsandbytes", "load_in_8bit": True}, NAME.replace("weight", "SCB")
    ),
    "nf4": Case(lambda weight: bitsandbytes_four_bits("nf4", weight), FOUR_BITS, f"{NAME}.absmax"),
    "fp4": Case(lambda weight: bitsandbytes_four_bits("fp4", weight), FOUR_BITS, f"{NAME}.absmax"),
}
every_case = pytest.mark.parametrize("case", CASES.values(), ids=CASES)


def save(folder: Path, parts: Parts, config: dict[str, Any] | None, metadata: Mapping[str, str] | None = None) -> Path:
    folder.mkdir(exist_ok=True)
    others = {"model.norm.weight": torch.ones(128, dtype=torch.bfloat16)}
    tensors = {name: part.contiguous() for name, part in {**others, **parts}.items()}
    save_file(tensors, folder / "model.safetensors", metadata or {"format": "pt"})
    (folder / "config.json").write_text(json.dumps({"quantization_config": config} if config else {}))
    return folder


@pytest.fixture
def pair(case: Case, tmp_path: Path) -> tuple[Path, Path]:
    """Return a plain model and the quantized one."""
    weight = plain_weight(case.dtype)
    return save(tmp_path / "plain", {NAME: weight}, None), save(tmp_path / "q", case.quantize(weight), case.config)


def changed(folder: Path, case: Case, change: Callable[[torch.Tensor], None]) -> Path:
    """Change the raw bits of the scales."""
    parts = load_file(folder / "model.safetensors")
    scale = parts[case.scale]
    change(scale.view({1: torch.uint8, 2: torch.int16, 4: torch.int32}[scale.element_size()]).view(-1))
    return save(folder, parts, case.config)


@every_case
def test_weights_are_within_their_methods_bound(case: Case, pair: tuple[Path, Path]) -> None:
    plain, quantized = pair
    report = library.verify(plain, quantized, quantized=True)
    assert report.exit_code == 0 and report.within_bound, str(report)
    ((weight,),) = [report.rounded]
    error = weight.rounding
    assert error is not None and error.num_beyond == 0 and 0 < error.mean < error.largest
    assert library.verify(quantized, plain, quantized=True).rounded[0].rounding == error


@pytest.mark.parametrize("path", RECORDED, ids=[f"{path.parent.name} {path.stem}" for path in RECORDED])
def test_weights_rounded_by_their_library_are_within_the_bound(path: Path, tmp_path: Path) -> None:
    with safe_open(path, "pt") as file:
        metadata = dict(file.metadata())
    parts = load_file(path)
    plain = save(tmp_path / "plain", {"layer.weight": parts.pop("original")}, None)
    quantized = save(tmp_path / "q", parts, json.loads(metadata.pop("config")), metadata)
    assert (report := library.verify(plain, quantized, quantized=True)).within_bound, str(report)


def exit_code(plain: Path, quantized: Path) -> int:
    return library.verify(plain, quantized, quantized=True).exit_code


@every_case
def test_a_changed_scale_is_beyond_the_bound(case: Case, pair: tuple[Path, Path]) -> None:
    plain, quantized = pair
    whole = load_file(quantized / "model.safetensors")[case.scale]
    exponent = {torch.float32: 23, torch.bfloat16: 7, E4M3: 3}.get(whole.dtype, 0)
    last = whole.numel() - 1  # the largest weights
    for bit in range(exponent, min(exponent + 3, 8 * whole.element_size())):

        def flip(bits: torch.Tensor, bit: int = bit) -> None:
            bits[last] ^= 1 << bit

        changed(quantized, case, flip)
        report = library.verify(plain, quantized, quantized=True)
        assert report.exit_code == 1, (bit, str(report))
        changed(quantized, case, flip)
    assert exit_code(plain, quantized) == 0


@every_case
def test_swapped_scales_are_beyond_the_bound(case: Case, pair: tuple[Path, Path]) -> None:
    plain, quantized = pair

    def swap(bits: torch.Tensor) -> None:
        bits[0], bits[-1] = bits[-1].clone(), bits[0].clone()

    assert exit_code(plain, changed(quantized, case, swap)) == 1


@every_case
def test_a_missing_scale_is_named(case: Case, pair: tuple[Path, Path]) -> None:
    plain, quantized = pair
    parts = load_file(quantized / "model.safetensors")
    del parts[case.scale]
    done = ckpt("verify", plain, save(quantized, parts, case.config), "--quantized")
    assert done.code == CorruptError.exit_code and case.scale in done.err


def gpt_oss_mxfp4(weight: torch.Tensor) -> tuple[Parts, Parts]:
    """Return plain experts [experts, in, out], and their parts with the scales of OCP's rule."""
    experts = weight.reshape(2, 32, 128).repeat(1, 2, 1)  # [experts, in 64, out 128]
    codes, scales = mxfp4(experts.transpose(1, 2).contiguous(), floors=True)
    name = "model.layers.0.mlp.experts.gate_up_proj"
    return {name: experts}, {f"{name}_blocks": codes, f"{name}_scales": scales}


def test_stacked_and_transposed_experts(tmp_path: Path) -> None:
    plain, parts = gpt_oss_mxfp4(plain_weight())
    a = save(tmp_path / "plain", plain, None)
    b = save(tmp_path / "q", parts, {"quant_method": "mxfp4"})
    report = library.verify(a, b, quantized=True)
    assert report.within_bound, str(report)
    parts["model.layers.0.mlp.experts.gate_up_proj_scales"][1, 5, 1] += 3
    save(b, parts, {"quant_method": "mxfp4"})
    done = ckpt("verify", a, b, "--quantized", "--json")
    (found,) = [one["rounding"] for one in json.loads(done.out)["tensors"] if "rounding" in one]
    assert done.code == 1 and 0 < found["num_beyond"] <= 32
    expert, row, column = found["index"]
    assert expert == 1 and row >= 32 and column == 5


@pytest.mark.parametrize("name", ["gptq", "awq"])
def test_methods_that_change_weights_have_no_bound(name: str, tmp_path: Path) -> None:
    case = test_methods.Case.read(next(one for one in test_methods.CASES if one.parent.name == f"weights-{name}"))
    plain = tmp_path / "plain"
    plain.mkdir()
    save_file({"layer.weight": case.expected}, plain / "model.safetensors", {"format": "pt"})
    (plain / "config.json").write_text("{}")
    report = library.verify(plain, case.save(tmp_path / "q"), quantized=True)
    assert report.exit_code == 1 and "without a bound" in report.outcome
    error = report.rounded[0].rounding
    assert error is not None and error.largest < 0.01, "the plain values are the rounded ones"


def test_other_tensors_must_be_equal(tmp_path: Path) -> None:
    case = CASES["fp8"]
    weight = plain_weight()
    plain = save(tmp_path / "plain", {NAME: weight, "model.norm.weight": torch.zeros(128).bfloat16()}, None)
    quantized = save(tmp_path / "q", case.quantize(weight), case.config)
    done = ckpt("verify", plain, quantized, "--quantized")
    assert done.code == 1 and "* model.norm.weight (weight): 128 of 128 elements differ" in done.out
    assert "not within the bound: 1 other tensor different" in done.out


@pytest.mark.parametrize("number", [torch.nan, torch.inf])
def test_numbers_that_are_not_finite_are_beyond_the_bound(number: float, tmp_path: Path) -> None:
    case, weight = CASES["fp8"], plain_weight()
    quantized = save(tmp_path / "q", case.quantize(weight), case.config)
    weight[7, 9] = number
    done = ckpt("verify", save(tmp_path / "plain", {NAME: weight}, None), quantized, "--quantized", "--json")
    found = json.loads(done.out)
    (error,) = [one["rounding"] for one in found["tensors"] if "rounding" in one]
    assert done.code == 1 and not found["within_bound"] and found["worst"] == [NAME]
    assert error["largest"] == "inf" and error["index"] == [7, 9] and error["num_beyond"] == 1


def test_one_side_must_be_quantized(tmp_path: Path) -> None:
    case, weight = CASES["fp8"], plain_weight()
    plain = save(tmp_path / "plain", {NAME: weight}, None)
    quantized = save(tmp_path / "q", case.quantize(weight), case.config)
    for side in (plain, quantized):
        with pytest.raises(UsageError, match="compares a quantized model with the plain one"):
            library.verify(side, side, quantized=True)
    for more in (["--run"], ["--loads"], ["--only", "optimizer"], ["--html", str(tmp_path / "x.html")]):
        assert ckpt("verify", plain, quantized, "--quantized", *more).code == UsageError.exit_code


def test_a_part_on_one_side_is_named(tmp_path: Path) -> None:
    case = CASES["fp8"]
    parts = case.quantize(plain_weight())
    a, b = save(tmp_path / "a", parts, case.config), save(tmp_path / "b", {NAME: parts[NAME]}, case.config)
    for pair, status, here, there in ((a, b), "-", "A", "B"), ((b, a), "+", "B", "A"):
        done = ckpt("verify", *pair)
        line = f"{status} {case.scale} (weight): a part of quantized weight {NAME} in {here}, missing from {there}"
        assert done.code == 1 and line in done.out.splitlines()
    (found,) = [one for one in json.loads(ckpt("verify", a, b, "--json").out)["tensors"] if one["status"] == "-"]
    assert found["part_of"] == NAME


def test_the_page_shows_this_output(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    case, weight = CASES["modelopt nvfp4"], plain_weight()
    save(Path("model"), {NAME: weight}, None)
    save(Path("model-nvfp4"), case.quantize(weight), case.config)
    done = ckpt("verify", "model", "model-nvfp4", "--quantized")
    printed = "".join(f"    {line}".rstrip() + "\n" for line in (done.err + done.out).splitlines())
    page = (REPOSITORY / "docs/verify.md").read_text()
    assert f"    $ ckpt verify model model-nvfp4 --quantized\n{printed}" in page, printed


@pytest.mark.parametrize(("run", "role"), [("megatron-dist-flattened", "weight"), ("moe-zero3", "master")])
def test_a_run_is_compared_with_its_quantized_model(run: str, role: str, tmp_path: Path) -> None:
    """A run's weights are compared, or its masters if it stores no weights."""
    source, folder = REPOSITORY / "fixtures" / run, tmp_path / "model"
    library.convert(source, "hf", folder)
    (file,), parts = folder.glob("*.safetensors"), {}
    for name, tensor in load_file(file).items():
        if name.endswith("_proj.weight"):
            scale = tensor.float().abs().amax() / 448
            parts[f"{name}_scale_inv"] = scale.reshape(())
            tensor = (tensor.float() / scale).clamp(-448, 448).to(E4M3)
        parts[name] = tensor
    save_file(parts, file, {"format": "pt"})
    config = folder / "config.json"
    settings = {"quantization_config": {"quant_method": "fp8"}}
    merge_json(config, settings)
    report = library.verify(source, folder, quantized=True, only="weights")
    assert report.within_bound and len(report.rounded) >= 14, str(report)
    assert {one.role for one in report.rounded} == {role}
    assert any("masters not compared" in note for note in report.notes) == (role == "weight")
