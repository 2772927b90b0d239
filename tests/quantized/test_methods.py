"""`converters/quantized/methods/awq.py`, `compressed_tensors.py`, `gptq.py`, `modelopt.py`, `torchao.py`.

Plain values are equal to the owning library's, bit for bit.

`fixtures/make_quantized_weights.py` recorded parts and plain values, with every bit pattern of small floats and scales.
"""

from __future__ import annotations

import inspect
import json
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from transformers.utils import quantization_config

from ckpt import api
from ckpt.base.errors import CkptError, CorruptError, UsageError
from ckpt.plan.dtypes import CASTABLE
from converters.quantized import methods as registry
from tests.support.adapters import same
from tests.support.commands import ckpt
from tests.support.places import REPOSITORY

CASES = sorted((REPOSITORY / "fixtures").glob("weights-*/*.safetensors"))
NAMES = [f"{path.parent.name.removeprefix('weights-')} {path.stem}" for path in CASES]
DTYPES = {getattr(torch, dtype.name): dtype for dtype in CASTABLE.values()}
#: Libraries that round to a dtype of their own before the target's.
_ROUND_FIRST = ("weights-awq", "weights-compressed-tensors", "weights-gptq", "weights-torchao")
every_case = pytest.mark.parametrize("path", CASES, ids=NAMES)


@dataclass(frozen=True)
class Case:
    """Parts, plain values, quantization config, and metadata of the file's header."""

    parts: dict[str, torch.Tensor]
    expected: torch.Tensor
    config: dict[str, Any]
    metadata: dict[str, str]

    @classmethod
    def read(cls, path: Path) -> Case:
        with safe_open(path, "pt") as file:
            parts = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
            metadata = dict(file.metadata())
        return cls(parts, parts.pop("expected"), json.loads(metadata.pop("config")), metadata)

    @classmethod
    def of(cls, name: str) -> Case:
        return cls.read(REPOSITORY / f"fixtures/weights-{name}.safetensors")

    def save(self, folder: Path, **changes: Any) -> Path:
        """Write a model with this weight."""
        case = replace(self, **changes)
        folder.mkdir(exist_ok=True)
        parts = {name: part.contiguous() for name, part in case.parts.items()}
        save_file(parts, folder / "model.safetensors", case.metadata)
        (folder / "config.json").write_text(json.dumps({"quantization_config": case.config}))
        return folder


@every_case
def test_plain_values_are_the_librarys(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    case = Case.read(path)
    folder, expected = case.save(tmp_path / "model"), case.expected
    plain = api.dequantized(api.open(folder), DTYPES[expected.dtype])
    if not expected.isfinite().all():
        with pytest.raises(CorruptError, match="NaN or infinite numbers"):
            plain["layer.weight"][...]
        monkeypatch.setattr("ckpt.move.finite.not_finite", lambda *_: None)  # compare these bits, too
    assert [name for name, _ in plain.tensors] == ["layer.weight"]
    assert same(plain["layer.weight"][...], expected)
    assert same(plain["layer.weight"][3:9, 1:-1], expected[3:9, 1:-1])
    if path.parent.name in _ROUND_FIRST:
        wide = api.dequantized(api.open(folder), CASTABLE["fp32"])["layer.weight"][...]
        assert same(wide, expected.to(torch.float32))


def test_the_page_counts_the_recorded_weights() -> None:
    rows = re.findall(r"^\| ([\w-]+) \| (\d+) \| (\d+) \|$", (REPOSITORY / "docs/testing.md").read_text(), re.MULTILINE)
    told = {name.lower().replace("_", "-"): (int(read), int(written)) for name, read, written in rows}
    recorded: dict[str, list[int]] = {}
    for number, kind in enumerate(("weights", "quantize")):
        for folder in (REPOSITORY / "fixtures").glob(f"{kind}-*"):
            counts = recorded.setdefault(folder.name.removeprefix(f"{kind}-"), [0, 0])
            counts[number] = len(list(folder.glob("*.safetensors")))
    assert told == {name: tuple(counts) for name, counts in recorded.items()}


def damaged(parts: dict[str, torch.Tensor]) -> Iterator[tuple[str, dict[str, torch.Tensor]]]:
    for name, part in parts.items():
        if name == "layer.input_scale":  # has no effect
            continue
        if name != "layer.g_idx":  # GPTQ needs none for inputs in order
            yield f"without {name}", {other: one for other, one in parts.items() if other != name}
        if part.numel() > 1 and name != "layer.weight":
            yield f"{name} longer", {**parts, name: torch.cat([part, part])}
        yield f"{name} in int16", {**parts, name: part.to(torch.int16)}
        if "scale" in name:
            bad = part.clone()
            bad.view(torch.uint8 if part.element_size() == 1 else part.dtype).view(-1)[-1] = (
                torch.nan if part.element_size() > 1 else 255
            )
            yield f"{name} not finite", {**parts, name: bad}
    if "layer.weight" not in parts:
        yield "stored twice", {**parts, "layer.weight": torch.zeros(4, 4)}
    for name in ("layer.weight_g_idx", "layer.pre_quant_scale", "layer.weight_zero_point", "layer.qweight"):
        if name not in parts:
            yield f"with {name}", {**parts, name: torch.ones(1, dtype=torch.int32)}


@every_case
def test_bad_parts_are_refused(path: Path, tmp_path: Path) -> None:
    case = Case.read(path)
    for what, broken in damaged(case.parts):
        with pytest.raises(CkptError) as caught:
            api.dequantized(api.open(case.save(tmp_path / "model", parts=broken)))["layer.weight"][...]
        assert isinstance(caught.value, CorruptError | UsageError), what
        assert str(caught.value.fqn).startswith("layer."), what


@every_case
def test_a_scale_that_is_not_finite_leaves_no_file(path: Path, tmp_path: Path) -> None:
    case = Case.read(path)
    what, broken = next(one for one in damaged(case.parts) if one[0].endswith("not finite"))
    folder = case.save(tmp_path / "model", parts=broken)
    done = ckpt("convert", "hf", "hf", folder, "-o", tmp_path / "no", "--dequantize")
    assert done.code == CorruptError.exit_code and what.removesuffix(" not finite") in done.err, done.err
    assert not (tmp_path / "no").exists()


# -- settings and parts whose values are not proved ------------------------------------------------------------
_CT = "compressed-tensors"
#: Recorded by AutoRound 0.5.1 (Intel/Qwen3-14B-int4-AutoRound-gptq-inc) and by gptqmodel 7.7.
AUTO_ROUND = json.loads("""{
    "act_bits": 16, "act_data_type": "int", "act_dynamic": true, "act_group_size": 128, "act_sym": true, "amp": true,
    "autoround_version": "0.5.1", "batch_size": 8, "damp_percent": 0.01, "data_type": "int", "desc_act": false,
    "enable_minmax_tuning": true, "enable_norm_bias_tuning": false, "enable_quanted_input": true, "iters": 1000,
    "gradient_accumulate_steps": 1, "low_gpu_mem_usage": true, "lr": 0.001, "minmax_lr": 0.001, "nsamples": 512,
    "scale_dtype": "torch.float16", "seqlen": 2048, "super_bits": null, "super_group_size": null, "sym": true,
    "to_quant_block_names": null, "true_sequential": false
}""")
GPTQMODEL = {"pack_dtype": "int32", "lm_head": False, "meta": {"quantizer": ["gptqmodel:7.7"], "damp_percent": 0.05}}


def group(**changes: Any) -> dict[str, Any]:
    """Return changes to a config with one group: to the group's weights."""
    return {"config_groups": {"group_0": {"weights": changes}}}


def merged(config: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    """Merge nested dicts."""
    nested = {key: merged(config[key], value) for key, value in changes.items() if isinstance(config.get(key), dict)}
    return {**config, **changes, **nested}


@pytest.mark.parametrize(
    "case, changes, found",
    [
        (f"{_CT}/int4-packed-group", group(actorder="group"), "actorder 'group'"),
        (f"{_CT}/int4-packed-group", group(strategy="tensor_group", symmetric=False, num_bits=3), "3 int tensor_group"),
        (f"{_CT}/int4-packed-group", {"transform_config": {"config_groups": {"u": {}}}}, "transform_config"),
        (f"{_CT}/fp8-channel-bf16", {"sparsity_config": {"format": "sparse-24-bitmask"}}, "sparsity_config"),
        (f"{_CT}/fp8-channel-bf16", group(symmetric=False), "not symmetric"),
        (f"{_CT}/nvfp4-1", group(symmetric=False), "not symmetric"),
        ("gptq/gptq-4-groups-32", {"bits": 3}, "3 bits"),
        ("gptq/gptq-4-groups-32", {"dynamic": {"+:.*q_proj": {"bits": 8}}}, "dynamic"),
        ("gptq/gptq-4-groups-32", {"rotation": "hadamard"}, "rotation in the config"),
        (f"{_CT}/fp8-channel-bf16", {"online_rotation": {"kind": "hadamard"}}, "online_rotation in the config"),
        (f"{_CT}/int4-packed-group", group(new=1), "new in the config"),
        (f"{_CT}/int4-packed-group", {"config_groups": {"group_0": {"new": [1]}}}, "new in the config"),
        ("awq/gemm-32", {"hadamard": True}, "hadamard in the config"),
        ("modelopt/nvfp4-bf16", {"svd_rank": 32}, "svd_rank in the config"),
        ("torchao/int8-axis-bf16", {"new": "x"}, "new in the config, which may change the weights"),
        ("gptq/gptq-4-groups-32", {"checkpoint_format": "gptq_p"}, "gptq"),
        ("gptq/gptq-4-groups-32", {"format": "marlin"}, "gptq"),
        ("gptq/gptq-4-groups-32", {"format": "gptq_v2"}, "format 'gptq_v2'"),
        ("gptq/gptq-4-reordered", {"desc_act": False}, "another order"),
        ("awq/gemm-32", {"version": "gemv"}, "version gemv"),
        ("awq/gemm-32", {"version": "gemv_fast"}, "awq"),
        ("awq/gemm-32", {"version": None, "checkpoint_format": "gemv"}, "version gemv"),
        ("awq/gemm-32", {"data_type": "mx_fp"}, "data_type 'mx_fp'"),
        ("gptq/gptq-4-groups-32", {"data_type": "mx_fp"}, "data_type 'mx_fp'"),
        ("awq/gemm-32", {"zero_point": False}, "zero_point"),
        ("awq/gemm-32", {"backend": "llm-awq"}, "llm-awq"),
        ("awq/gemm-32", {"bits": 8}, "8 bits"),
        ("modelopt/fp8-bf16", {"quant_algo": "FP8_PB_WO"}, "FP8_PB_WO"),
        ("modelopt/nvfp4-bf16", {"quant_algo": "NVFP4_SVDQUANT"}, "NVFP4_SVDQUANT"),
        ("modelopt/nvfp4-bf16", {"quant_algo": "W4A8_NVFP4_FP8"}, "W4A8_NVFP4_FP8"),
    ],
)
def test_settings_without_proved_values_are_refused(
    case: str, changes: dict[str, Any], found: str, tmp_path: Path
) -> None:
    one = Case.of(case)
    folder = one.save(tmp_path / "model", config=merged(one.config, changes))
    done = ckpt("convert", "hf", "hf", folder, "-o", tmp_path / "no", "--dequantize")
    assert done.code == UsageError.exit_code and found in done.err, done.err
    assert not (tmp_path / "no").exists()


@pytest.mark.parametrize(
    "case, changes",
    [
        (f"{_CT}/int4-packed-group", group(actorder="static")),
        (f"{_CT}/int4-packed-group", {"transform_config": {}, "sparsity_config": {"format": "dense", "ignore": []}}),
        (f"{_CT}/fp8-channel-bf16", {"kv_cache_scheme": None, "ignore": ["lm_head"], "global_compression_ratio": 1.5}),
        ("gptq/gptq-4-groups-32", {"sym": True, "true_sequential": True, "static_groups": False, "dynamic": None}),
        ("gptq/gptq_v2-4-groups-32", {"format": "gptq_v2", "pack_dtype": "int32", "rotation": None}),
        (f"{_CT}/int4-packed-group", {"transform_config": {"config_groups": {}}, "sparsity_config": {}}),
        ("awq/gemm-32", {"rotation": None, "hadamard": False, "transformers_version": "5.23.0"}),
        ("awq/gemm-32", {"version": "GEMM", "backend": "autoawq", "modules_to_not_convert": None}),
        ("gptq/gptq-4-groups-32", AUTO_ROUND),
        ("awq/gemm-32", AUTO_ROUND),
        ("gptq/gptq-4-groups-32", {"method": "gptq", "format": "gptq", "checkpoint_format": "gptq", **GPTQMODEL}),
        (
            "awq/gemm-32",
            {"method": "awq", "format": "gemm", "checkpoint_format": "gemm", "desc_act": True, **GPTQMODEL},
        ),
        ("modelopt/nvfp4-bf16", {"kv_cache_quant_algo": "FP8", "group_size": 16, "exclude_modules": ["lm_head"]}),
    ],
)
def test_settings_without_effect_are_accepted(case: str, changes: dict[str, Any], tmp_path: Path) -> None:
    one = Case.of(case)
    plain = api.dequantized(api.open(one.save(tmp_path / "model", config=merged(one.config, changes))))
    assert same(plain["layer.weight"][...], one.expected.to(torch.bfloat16))


@pytest.mark.parametrize(
    "method, config",
    [
        ("awq", "AwqConfig"),
        ("bitsandbytes", "BitsAndBytesConfig"),
        ("compressed-tensors", "CompressedTensorsConfig"),
        ("fp8", "FineGrainedFP8Config"),
        ("gptq", "GPTQConfig"),
        ("mxfp4", "Mxfp4Config"),
        ("torchao", "TorchAoConfig"),
    ],
)
def test_settings_of_transformers_classes_are_known(method: str, config: str) -> None:
    names = inspect.signature(getattr(quantization_config, config)).parameters.keys() - {"kwargs"}
    one = registry.methods()[method]
    assert registry.unknown_setting(one, dict.fromkeys(names, "x")) is None
    assert registry.unknown_setting(one, {**dict.fromkeys(names, ""), "new": "x"}) == "new"


def test_groups_that_both_fit_are_refused(tmp_path: Path) -> None:
    case = Case.of("compressed-tensors/int8-channel")
    case = replace(case, parts={name: part[:1] for name, part in case.parts.items()})
    one = case.config["config_groups"]["group_0"]
    other = {**one, "weights": {**one["weights"], "strategy": "tensor"}}
    for groups, is_refused in (({"a": one, "b": other}, True), ({"a": one, "b": one}, False)):
        source = api.open(case.save(tmp_path / "model", config={**case.config, "config_groups": groups}))
        if is_refused:
            with pytest.raises(UsageError):
                api.dequantized(source)
        else:
            assert same(api.dequantized(source)["layer.weight"][...], case.expected[:1])


def test_gptq_zero_points_with_two_meanings_are_refused(tmp_path: Path) -> None:
    for version, is_refused in (("gptq", True), ("gptq_v2", False)):
        case = Case.of(f"gptq/{version}-4-groups-32")
        case.parts["layer.qzeros"][1, 2] |= 15
        plain = api.dequantized(api.open(case.save(tmp_path / version)))
        if is_refused:
            with pytest.raises(UsageError, match="zero points 15"):
                plain["layer.weight"][...]
        else:
            assert plain["layer.weight"].shape == (40, 96)


def test_gptq_group_numbers_out_of_range_are_refused(tmp_path: Path) -> None:
    for number in (-1, 3):
        case = Case.of("gptq/gptq-4-reordered")
        case.parts["layer.g_idx"][7] = number
        with pytest.raises(CorruptError, match="groups 0 to 2"):
            api.dequantized(api.open(case.save(tmp_path / "model")))


@pytest.mark.parametrize(
    "old, new, found",
    [
        ("Float8Tensor", "NVFP4Tensor", "NVFP4Tensor"),
        ("Float8Tensor", "Int8Tensor", "float8_e4m3fn"),
        ("[1, 96]", "[1, 48]", "[24, 2]"),
        ("[1, 96]", "[1, 36]", "blocks that divide"),
        ("[1, 96]", "[0, 96]", "block size"),
        ("bfloat16", "float64", "dtype"),
        ('["qdata", "scale"]', '["qdata"]', "recorded parts"),
        ("{", "", "header"),
    ],
)
def test_torchao_headers_that_do_not_describe_the_weight(old: str, new: str, found: str, tmp_path: Path) -> None:
    case = Case.of("torchao/float8-bf16")
    record = case.metadata["layer.weight"]
    assert old in record
    for metadata in ({"layer.weight": record.replace(old, new)}, {"layer.weight": record}):
        source = api.open(case.save(tmp_path / "model", metadata=metadata))
        if metadata["layer.weight"] == record:
            assert api.dequantized(source)["layer.weight"].shape == (24, 96)
        else:
            with pytest.raises((UsageError, CorruptError), match=re.escape(found)):
                api.dequantized(source)


# -- new methods -----------------------------------------------------------------------------------------------
TOY = """
from functools import partial

import numpy as np

from converters.quantized._weight import ScaleGrid, by_rows, rounded
from converters.quantized.scheme import F32, INT8, WEIGHT, Method, Part, Scheme, per_output


def halves(stored, owner, parts):
    tensor = stored.tensors[parts[WEIGHT]]
    names = tuple(parts.values())
    return by_rows(stored, "toy", owner, tensor.shape, names, partial(rows, stored, parts))


def rows(stored, parts, box):
    values = stored.read(parts[WEIGHT], box).view(np.int8).astype(np.float32)
    grid = ScaleGrid(1)
    grid.apply(np.multiply, values, grid.scales(stored, parts["{w}_half"], box) / 2)
    return rounded(values, stored.dtype)


PARTS = {WEIGHT: Part(INT8), "{w}_half": Part(F32, per_output)}
METHOD = Method(("toy",), lambda _: [Scheme(WEIGHT, PARTS, tuple, dequantize=halves)])
"""


def test_a_module_in_the_folder_is_a_method(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    (tmp_path / "methods").mkdir()
    (tmp_path / "methods/toy.py").write_text(TOY)
    monkeypatch.setattr(registry, "__path__", [*registry.__path__, str(tmp_path / "methods")])
    registry.methods.cache_clear()
    request.addfinalizer(registry.methods.cache_clear)
    weight, half = torch.randint(-128, 128, (6, 4), dtype=torch.int8), torch.rand(6, 1)
    case = Case({"x.weight": weight, "x.weight_half": half}, weight.float() * half / 2, {"quant_method": "toy"}, {})
    source = api.open(case.save(tmp_path / "model"))
    assert api.quantized_parts(source) == case.parts.keys()
    assert same(api.dequantized(source, CASTABLE["fp32"])["x.weight"][...], case.expected)
    for name, part in case.parts.items():
        broken = {**case.parts, name: torch.cat([part, part])}
        with pytest.raises(CorruptError, match="instead of"):
            api.dequantized(api.open(case.save(tmp_path / "model", parts=broken)))


@pytest.mark.parametrize("dtype", [torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz])
def test_other_small_floats_are_not_read_as_e4m3(dtype: torch.dtype, tmp_path: Path) -> None:
    case = Case.of(f"{_CT}/fp8-channel-bf16")
    (name,) = (name for name, part in case.parts.items() if part.dtype == torch.float8_e4m3fn)
    folder = case.save(tmp_path / "model", parts={**case.parts, name: case.parts[name].view(dtype)})
    (tmp_path / "plain").mkdir()
    save_file({"layer.weight": case.expected}, tmp_path / "plain/model.safetensors")
    for command in (
        ("convert", "hf", "hf", folder, "-o", tmp_path / "no", "--dequantize"),
        ("verify", folder, tmp_path / "plain", "--quantized"),
    ):
        done = ckpt(*command)
        assert done.code == UsageError.exit_code and str(dtype).removeprefix("torch.") in done.err, done.err
    assert not (tmp_path / "no").exists()


def test_modelopts_mixed_layers_have_their_own_methods(tmp_path: Path) -> None:
    kinds = {"a.0.up": ("FP8", "fp8-bf16"), "a.1.up": ("NVFP4", "nvfp4-bf16"), "a.2.up": ("FP8", "fp8-bf16")}
    cases = {module: Case.of(f"modelopt/{name}") for module, (_, name) in kinds.items()}
    parts = {n.replace("layer", m): p.clone() for m, case in cases.items() for n, p in case.parts.items()}
    layers = {module: {"quant_algo": algorithm} for module, (algorithm, _) in kinds.items()}
    config = {"quant_method": "modelopt", "quant_algo": "MIXED_PRECISION", "quantized_layers": layers}
    one = cases["a.0.up"]
    folder = one.save(tmp_path / "model", parts=parts, config=config)
    assert ckpt("check", folder).code == 0
    plain = api.dequantized(api.open(folder))
    for module, case in cases.items():
        assert same(plain[f"{module}.weight"][...], case.expected.to(torch.bfloat16))
    for algorithm, error in (("FP8", CorruptError), ("NVFP4_SVDQUANT", UsageError)):
        changed = {**config, "quantized_layers": {**layers, "a.1.up": {"quant_algo": algorithm}}}
        folder = one.save(tmp_path / "model", parts=parts, config=changed)
        with pytest.raises(error):
            api.dequantized(api.open(folder))
        assert ckpt("check", folder).code == (4 if error is CorruptError else 0)


@pytest.mark.parametrize(
    ("case", "file", "record", "says"),
    [
        ("modelopt/fp8-bf16", "hf_quant_config.json", {"quantization": {"quant_algo": "NVFP4"}}, "quant_algo is NVFP4"),
        ("modelopt/fp8-bf16", "hf_quant_config.json", {"quantization": {"quant_algo": "FP8"}}, ""),
        ("gptq/gptq-4-groups-32", "quantize_config.json", {"bits": 4, "group_size": 64}, "group_size is 64"),
        ("gptq/gptq-4-groups-32", "quantize_config.json", {"bits": 4, "damp_percent": 0.3}, ""),
        ("awq/gemm-32", "quant_config.json", {"version": "gemv", "zero_point": True}, "version is gemv"),
        ("awq/gemm-32", "quant_config.json", {"version": "GEMM", "zero_point": True}, ""),
    ],
)
def test_two_records_of_one_quantization_agree(
    case: str, file: str, record: dict[str, Any], says: str, tmp_path: Path
) -> None:
    """Servers read one of them, and compute other values from the other one."""
    folder = Case.of(case).save(tmp_path / "model")
    (folder / file).write_text(json.dumps(record))
    done = ckpt("check", folder)
    assert (done.code, f"{file}: {says}" in done.out) == ((4, True) if says else (0, False)), done.out
