"""`converters/quantized/parts.py`, `scheme.py`, `_weight.py`, `ckpt/state/kept_dtypes.py`: parts of weights.

`layouts.json` has the parts of a linear layer by llmcompressor 0.14, torchao 0.18 and mlx-lm 0.30. Other layouts follow
the code of their libraries.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import ckpt as toolkit
from ckpt import api
from ckpt.base.errors import CorruptError, LossError
from ckpt.plan.checkpoint import WEIGHT
from ckpt.plan.dtypes import BY_NAME, BY_TAG
from ckpt.plan.tensors import Extent, Tensor, Whole
from ckpt.runs.recorded_precision import quantization_of
from converters.quantized import module_names
from converters.quantized.parts import QuantizedWeights
from converters.quantized.scheme import UnknownValues
from tests.support.commands import ckpt
from tests.support.model_files import merge_json

LAYERS = 4
OUT, IN = 128, 256
Parts = Mapping[str, tuple[str, list[int]]]

_GPTQ = {"bits": 4, "group_size": 128, "desc_act": False}
_QZEROS = {"qzeros": ("I32", [2, 16]), "scales": ("F16", [2, 128])}
_FP8 = {"quant_method": "fp8", "activation_scheme": "dynamic"}
_NVFP4 = {"weight": ("U8", [128, 128]), "weight_scale": ("F8_E4M3", [128, 16]), "weight_scale_2": ("F32", [])}
BY_HAND: Mapping[str, tuple[Mapping[str, Any], Parts]] = {
    "fp8 block": (
        {"quantization_config": {**_FP8, "weight_block_size": [128, 128]}},
        {"weight": ("F8_E4M3", [128, 256]), "weight_scale_inv": ("F32", [1, 2])},
    ),
    "fp8 static": (
        {"quantization_config": {"quant_method": "fp8", "activation_scheme": "static", "weight_block_size": None}},
        {"weight": ("F8_E4M3", [128, 256]), "weight_scale_inv": ("BF16", []), "activation_scale": ("BF16", [])},
    ),
    "fp8 DeepSeek-V4": (
        {"quantization_config": {**_FP8, "weight_block_size": [128, 128], "scale_fmt": "ue8m0"}},
        {"weight": ("F8_E4M3", [128, 256]), "scale": ("F8_E8M0", [1, 2])},
    ),
    "fp8 DeepSeek-V4, fp4": (
        {"quantization_config": {**_FP8, "weight_block_size": [128, 128], "expert_dtype": "fp4"}},
        {"weight": ("I8", [128, 128]), "scale": ("F8_E8M0", [128, 8])},
    ),
    "fp8 AutoFP8": (
        {"quantization_config": {"quant_method": "fp8", "activation_scheme": "static"}},
        {"weight": ("F8_E4M3", [128, 256]), "weight_scale": ("F32", [1]), "input_scale": ("F32", [1])},
    ),
    "fbgemm_fp8": (
        {"quantization_config": {"quant_method": "fbgemm_fp8"}},
        {"weight": ("F8_E4M3", [128, 256]), "weight_scale": ("F32", [128, 1])},
    ),
    "gptq": (
        {"quantization_config": {"quant_method": "gptq", **_GPTQ}},
        {"qweight": ("I32", [32, 128]), **_QZEROS, "g_idx": ("I32", [256])},
    ),
    "awq": (
        {"quantization_config": {"quant_method": "awq", "bits": 4, "group_size": 128, "version": "gemm"}},
        {"qweight": ("I32", [256, 16]), **_QZEROS},
    ),
    "modelopt FP8": (
        {"quantization_config": {"quant_method": "modelopt", "quant_algo": "FP8"}},
        {"weight": ("F8_E4M3", [128, 256]), "weight_scale": ("F32", []), "input_scale": ("F32", [])},
    ),
    "modelopt NVFP4": (
        {"quantization_config": {"quant_method": "modelopt", "quant_algo": "NVFP4"}},
        {**_NVFP4, "input_scale": ("F32", [])},
    ),
    "bitsandbytes nf4": (
        {"quantization_config": {"quant_method": "bitsandbytes", "load_in_4bit": True}},
        {
            "weight": ("U8", [16384, 1]),
            "weight.absmax": ("U8", [512]),
            "weight.quant_map": ("F32", [16]),
            "weight.nested_absmax": ("F32", [2]),
            "weight.nested_quant_map": ("F32", [256]),
            "weight.quant_state.bitsandbytes__nf4": ("U8", [160]),
        },
    ),
    "bitsandbytes int8": (
        {"quantization_config": {"quant_method": "bitsandbytes", "load_in_8bit": True}},
        {"weight": ("I8", [128, 256]), "SCB": ("F32", [128]), "weight_format": ("U8", [])},
    ),
    "eetq": (
        {"quantization_config": {"quant_method": "eetq"}},
        {"weight": ("I8", [256, 128]), "weight_scales": ("F16", [128])},
    ),
}
RECORDED = json.loads((Path(__file__).parent / "layouts.json").read_text())
LAYOUTS = {**{name: (one["config"], one["parts"]) for name, one in RECORDED.items()}, **BY_HAND}
#: Methods whose loaders accept a plain weight among quantized weights.
TAKES_PLAIN = ("bitsandbytes", "mlx", "torchao")
#: Layouts without dequantization.
UNKNOWN_VALUES = ("eetq", "fbgemm_fp8", "fp8 AutoFP8", "mlx 4 bits")
#: Missing from the header of a single file: torchao stores block sizes in the metadata.
UNTOLD = {
    ("torchao Float8WeightOnlyConfig", "_weight_scale"),
    ("torchao Int8WeightOnlyConfig", "_weight_scale"),
    ("torchao Int8WeightOnlyConfig", "_weight_zero_point"),
}


def tensor(name: str, dtype: str, shape: list[int]) -> Tensor:
    return Tensor(
        name, WEIGHT, BY_TAG[dtype], tuple(shape), Whole(Extent.contiguous("f", 0, BY_TAG[dtype], tuple(shape)))
    )


def model(layout: str) -> tuple[dict[str, Tensor], Mapping[str, Any]]:
    config, parts = LAYOUTS[layout]
    names = {f"layers.{n}.up.{part}": one for n in range(LAYERS) for part, one in parts.items()}
    names["layers.0.norm.weight"] = ("BF16", [256])
    return {name: tensor(name, *one) for name, one in names.items()}, config


#: State recorded by bitsandbytes 0.50.2 for this weight with double quantization. Spaces pad its bytes.
STATE = {
    "quant_type": "nf4",
    "blocksize": 64,
    "dtype": "float16",
    "shape": [OUT, IN],
    "nested_blocksize": 256,
    "nested_dtype": "float32",
    "nested_offset": 0.02,
}


def content_of(name: str, size: int = 160, **changes: Any) -> bytes:
    """Return bytes for a tensor that needs content."""
    assert ".quant_state." in name
    return json.dumps({**STATE, **changes}).encode().ljust(size)


def weights_of(
    tensors: Mapping[str, Tensor], config: Mapping[str, Any], *, is_known: bool = True, **changes: Any
) -> QuantizedWeights:
    expected = {f"layers.{n}.up.weight": (OUT, IN) for n in range(LAYERS)} if is_known else {}
    return QuantizedWeights(tensors, quantization_of(config), expected, lambda name: content_of(name, **changes))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_weights_with_exactly_their_parts_have_no_fault(layout: str) -> None:
    tensors, config = model(layout)
    weights = weights_of(tensors, config)
    assert not weights.faults and weights.unproved is None
    assert weights.parts == tensors.keys() - {"layers.0.norm.weight"}
    shapes = weights.in_place({name: one.shape for name, one in tensors.items()})
    assert shapes.keys() == {"layers.0.norm.weight", *(f"layers.{n}.up.weight" for n in range(LAYERS))}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_layout_has_one_computation_of_its_values_or_none(layout: str) -> None:
    schemes = weights_of(*model(layout)).schemes
    assert len(schemes) == LAYERS
    (dequantize,) = {scheme.dequantize for fitting in schemes.values() for scheme in fitting}
    assert (dequantize is None) == (layout in UNKNOWN_VALUES) and not isinstance(dequantize, UnknownValues)


def damaged(tensors: Mapping[str, Tensor], layout: str) -> Iterator[tuple[str, dict[str, Tensor]]]:
    for part in LAYOUTS[layout][1]:
        name = f"layers.1.up.{part}"
        one = tensors[name]
        yield f"without {part}", {n: t for n, t in tensors.items() if n != name}
        for dtype in {"float64", "int16", "float8_e5m2fnuz"} - {one.dtype.name}:
            yield f"{part} in {dtype}", {**tensors, name: one._replace(dtype=BY_NAME[dtype])}
        is_metadata = part == "weight_format" or ".quant_state." in part
        if one.shape and not is_metadata and (layout, part) not in UNTOLD:
            for shape in ((*one.shape[:-1], one.shape[-1] + 1), (one.shape[0] + 1, *one.shape[1:]), (*one.shape, 3)):
                yield f"{part} of {shape}", {**tensors, name: one._replace(shape=shape)}
    for word in (
        "weight_scale_2",
        "qweight",
        "weight_scale_inv",
        "weight_packed",
        "SCB",
        "weight.absmax",
        "input_scale",
    ):
        name = f"layers.1.up.{word}"
        if name not in tensors:
            yield f"with {word}", {**tensors, name: tensor(name, "F32", [1])}
    if not layout.startswith(TAKES_PLAIN):
        gone = {f"layers.1.up.{part}" for part in LAYOUTS[layout][1]}
        plain = tensor("layers.1.up.weight", "BF16", [OUT, IN])
        yield "plain", {**{n: t for n, t in tensors.items() if n not in gone}, plain.fqn: plain}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_each_missing_extra_or_misshapen_part_is_a_fault(layout: str) -> None:
    tensors, config = model(layout)
    cases = dict(damaged(tensors, layout))
    assert len(cases) > 10
    assert [what for what, case in cases.items() if not weights_of(case, config).faults] == []
    assert all(
        fault.fqn.startswith("layers.1.") for case in cases.values() for fault in weights_of(case, config).faults
    )


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_part_of_a_plain_weight_is_a_fault(layout: str) -> None:
    tensors, config = model(layout)
    words = ["weight_scale", "weight_scale_inv", "qweight", "qzeros", "g_idx", "SCB", "weight.absmax", "weight_packed"]
    for word in words:
        name = f"layers.0.norm.{word}"
        faults = weights_of({**tensors, name: tensor(name, "F32", [1])}, config, is_known=False).faults
        assert faults and faults[0].fqn.startswith("layers.0.norm."), word


def test_a_recorded_state_is_compared_with_all_parts() -> None:
    tensors, config = model("bitsandbytes nf4")
    assert not weights_of(tensors, config, is_known=False).faults
    cases = [(what, case) for what, case in damaged(tensors, "bitsandbytes nf4") if " of " in what]
    assert (
        len(cases) > 10 and [what for what, case in cases if not weights_of(case, config, is_known=False).faults] == []
    )
    states: list[dict[str, Any]] = [
        {"shape": [OUT, IN + 2]},
        *({"blocksize": size} for size in (32, 128, 63, None)),
        *({"nested_blocksize": 128}, {"nested_dtype": "bfloat16"}, {"dtype": "int8"}, {"quant_type": "fp4"}),
    ]
    for changes in states:
        assert weights_of(tensors, config, is_known=False, **changes).faults, changes
    turned = weights_of(tensors, config, shape=[IN, OUT])
    assert not turned.faults, "the weight of a Conv1D is recorded as it is computed"


def test_the_config_says_which_weights_are_plain() -> None:
    tensors, config = model("fp8 block")
    gone = {"layers.1.up.weight", "layers.1.up.weight_scale_inv"}
    plain = {n: t for n, t in tensors.items() if n not in gone}
    plain["layers.1.up.weight"] = tensor("layers.1.up.weight", "BF16", [OUT, IN])
    listed = {"quantization_config": {**config["quantization_config"], "modules_to_not_convert": ["layers.1.up"]}}
    assert [fault.fqn for fault in weights_of(plain, config).faults] == ["layers.1.up.weight"]
    assert not weights_of(plain, listed).faults
    (fault,) = weights_of(tensors, listed).faults
    assert fault.fqn == "layers.1.up.weight" and "the config excludes it" in fault.what


#: Quantizer's layout, entry for the plain or quantized module `model.layers.1.mlp.up_proj`, and if it is excluded.
EXCLUDED = [
    ("fp8 block", "model.layers.1.mlp.up_proj", True),
    ("fp8 block", "model.layers.1.mlp", True),
    ("fp8 block", "model.layers.*.mlp", True),
    ("fp8 block", "up_proj", True),
    ("fp8 block", "language_model.model.layers.1.mlp.up_proj", True),
    ("fp8 block", "model.layers.1.mlp.up", False),
    ("fp8 block", "model.layers.1", True),
    ("fp8 block", "layers.1.mlp", False),
    ("fp8 block", "ayers.1.mlp.up_pro", False),
    ("compressed-tensors W8A8", "model.layers.1.mlp.up_proj", True),
    ("compressed-tensors W8A8", r"re:.*layers\.1\..*up_proj$", True),
    ("compressed-tensors W8A8", "model.language_model.layers.1.mlp.up_proj", True),
    ("compressed-tensors W8A8", r"re:layers\.1", False),
    ("compressed-tensors W8A8", "model.layers.1.mlp", False),
    ("compressed-tensors W8A8", "up_proj", False),
    ("compressed-tensors W8A8", r"re:.*up$", False),
    ("compressed-tensors W8A8", "re:(", False),
]


def in_module(layout: str, name: str, is_plain: bool, **settings: Any) -> QuantizedWeights:
    """Return three layers with one module. The second one may be plain."""
    config, parts = LAYOUTS[layout]
    tensors = {}
    for layer in range(3):
        module = name.replace("1", str(layer))
        stored = {"weight": ("BF16", [OUT, IN])} if is_plain and layer == 1 else parts
        names = {f"{module}.{part}": of for part, of in stored.items()}
        tensors |= {fqn: tensor(fqn, *of) for fqn, of in names.items()}
    return weights_of(tensors, {"quantization_config": {**config["quantization_config"], **settings}}, is_known=False)


@pytest.mark.parametrize(("layout", "entry", "is_excluded"), EXCLUDED)
def test_plain_weights_are_excluded_like_in_the_loader(layout: str, entry: str, is_excluded: bool) -> None:
    module = "model.layers.1.mlp.up_proj"
    found = in_module(layout, module, True, **{"ignore" if "W8A8" in layout else "modules_to_not_convert": [entry]})
    assert [fault.fqn for fault in found.faults] == ([] if is_excluded else [f"{module}.weight"])


@pytest.mark.parametrize(("layout", "entry", "is_excluded"), EXCLUDED)
def test_quantized_weights_are_not_excluded(layout: str, entry: str, is_excluded: bool) -> None:
    module, is_alias = "model.layers.1.mlp.up_proj", "language_model" in entry
    key, is_by_name = ("ignore", True) if "W8A8" in layout else ("modules_to_not_convert", False)
    found = in_module(layout, module, False, **{key: [entry]})
    is_fault = is_excluded and not is_alias and (is_by_name or entry == module)
    assert [fault.what for fault in found.faults] == ["quantized, but the config excludes it"] * is_fault
    if is_excluded and not is_fault and not is_alias:
        assert "transformers excludes model.layers." in str(found.untried)
    elif not is_fault:
        assert found.untried is None


@pytest.mark.parametrize(
    ("layout", "key"), [("fp8 block", "modules_to_not_convert"), ("compressed-tensors W8A8", "ignore")]
)
def test_long_lists_of_excluded_modules_take_little_time(layout: str, key: str) -> None:
    """Python's `re` keeps 512 patterns: with more, each module would compile all of them again."""
    norms = [f"model.layers.{n}.norm" for n in range(600)]
    module_names._compiled.cache_clear()
    found = in_module(layout, "model.layers.1.mlp.up_proj", True, **{key: [*norms, "model.layers.1.mlp.up_proj"]})
    assert not found.faults and found.untried is None
    assert module_names._compiled.cache_info().misses <= 601
    more = [f"model.layers.{n}.gate" for n in range(600)]
    found = in_module(layout, "model.layers.1.mlp.up_proj", True, **{key: [*norms, *more, "re:.*layers.2.mlp"]})
    assert [one.fqn for one in found.faults][:1] == ["model.layers.1.mlp.up_proj.weight"]


@pytest.mark.parametrize(
    ("targets", "is_quantized", "may_be_plain"),
    [
        (["Linear"], True, False),
        (["re:.*mlp.*"], True, False),
        (["model.language_model.layers.1.mlp.up_proj", "re:.*(0|2).mlp.up_proj"], True, False),
        ([r"re:.*\.[02]\.mlp.*"], False, True),
        (["re:.*self_attn.*"], False, True),
        (["Llama4TextMLP"], True, True),
    ],
)
def test_targets_say_which_weights_are_quantized(targets: list[str], is_quantized: bool, may_be_plain: bool) -> None:
    layout, module = "compressed-tensors W8A8", "model.layers.1.mlp.up_proj"
    (group,) = LAYOUTS[layout][0]["quantization_config"]["config_groups"].values()
    others = {**group, "weights": None, "targets": [r"re:.*up_proj"]}
    groups = {"config_groups": {"a": {**group, "targets": targets}, "b": others}}
    found = in_module(layout, module, False, **groups)
    assert (f"{module}.weight" not in [fault.fqn for fault in found.faults]) == is_quantized
    found = in_module(layout, module, True, **groups)
    assert (f"{module}.weight" not in [fault.fqn for fault in found.faults]) == may_be_plain


@pytest.mark.parametrize(
    ("entry", "is_module"),
    [
        ("layers.1.experts.down_proj", False),
        ("*.1.*down_proj", False),
        (r"re:.*\.1\..*down_proj$", False),
        ("layers.1.experts", True),
        ("*.1.experts", True),
    ],
)
def test_the_config_says_which_stacked_experts_are_plain(entry: str, is_module: bool) -> None:
    """In transformers, a stack is no module of its own, and the config excludes modules."""
    tensors: dict[str, Tensor] = {}
    for name in [f"layers.{layer}.experts.down_proj" for layer in range(LAYERS)]:
        tensors[f"{name}_blocks"] = tensor(f"{name}_blocks", "U8", [2, OUT, IN // 32, 16])
        tensors[f"{name}_scales"] = tensor(f"{name}_scales", "U8", [2, OUT, IN // 32])
    fqn = "layers.1.experts.down_proj"
    plain = {name: one for name, one in tensors.items() if not name.startswith(fqn)}
    plain[fqn] = tensor(fqn, "BF16", [2, IN, OUT])
    unlisted, listed = (
        {"quantization_config": {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head", *more]}}
        for more in ([], [entry])
    )
    assert [fault.fqn for fault in weights_of(plain, unlisted, is_known=False).faults] == [fqn]
    found = weights_of(plain, listed, is_known=False)
    assert not found.faults
    assert (found.untried is None) == is_module and (is_module or fqn in str(found.untried))
    if "*" not in entry:
        (fault,) = weights_of(tensors, listed, is_known=False).faults
        assert fault.fqn == fqn and "the config excludes it" in fault.what


def test_transformers_reads_one_entry_only() -> None:
    tensors, config = model("fp8 block")
    record = config["quantization_config"]
    read = [{"quantization_config": record}, {"text_config": {"quantization_config": record}}]
    for one in read:
        assert weights_of(tensors, one).unread is None
    unread = [{"compression_config": record}, {"text_config": {"compression_config": record}}]
    for one in unread:
        assert "recorded in compression_config in config.json" in str(weights_of(tensors, one).unread)


def test_an_unknown_method_is_not_proved_but_layers_are_compared() -> None:
    config = {"quantization_config": {"quant_method": "aqlm"}}
    names = [f"layers.{n}.up.{part}" for n in range(LAYERS) for part in ("codes", "codebooks", "scales")]
    tensors = {name: tensor(name, "F16", [4, 4]) for name in names}
    weights = weights_of(tensors, config)
    assert "aqlm" in str(weights.unproved) and not weights.faults
    del tensors["layers.2.up.scales"]
    assert [fault.fqn for fault in weights_of(tensors, config).faults] == ["layers.2.up.scales"]


def test_a_plain_model_with_such_names_has_no_quantized_weights() -> None:
    names = ["layer_scales", "a.scale", "a.scales", "a.biases", "b.k_scale", "relative_position_index"]
    tensors = {name: tensor(name, "F32", [4, 4]) for name in names} | {"i.weight": tensor("i.weight", "I64", [4, 4])}
    weights = weights_of(tensors, {"model_type": "llama"})
    assert not weights.parts and not weights.faults and weights.unproved is None


@pytest.mark.parametrize("part", ["codes", "W_q", "weight._data"])
def test_packed_values_without_a_recorded_method_are_not_called_whole(part: str) -> None:
    tensors = {"a.weight": tensor("a.weight", "F32", [4, 4]), f"b.{part}": tensor(f"b.{part}", "I8", [4, 4])}
    expected = {"a.weight": (4, 4), "b.weight": (4, 4)}
    assert f"b.{part}" in str(QuantizedWeights(tensors, None, expected).unproved)
    buffer = {**tensors, "b.weight": tensor("b.weight", "F32", [4, 4])}
    assert QuantizedWeights(buffer, None, expected).unproved is None


# -- commands --------------------------------------------------------------------------------------------------
@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Create a Llama with every projection in `layout`."""
    from transformers import LlamaConfig, LlamaForCausalLM

    home = tmp_path_factory.mktemp("llama")
    sizes = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 3, "vocab_size": 16}
    config = LlamaConfig(**sizes, num_attention_heads=4, num_key_value_heads=4, tie_word_embeddings=False)
    LlamaForCausalLM(config).half().save_pretrained(home / "plain")

    def make(layout: str) -> Path:
        folder = home / layout.replace(" ", "-")
        if folder.exists():
            return folder
        shutil.copytree(home / "plain", folder)
        stored, (quantization, parts) = load_file(folder / "model.safetensors"), LAYOUTS[layout]
        for name in [name for name in stored if name.endswith("down_proj.weight")]:
            module = stored.pop(name) is not None and name.removesuffix("weight")
            for part, (dtype, shape) in parts.items():
                stored[f"{module}{part}"] = torch.zeros(shape, dtype=getattr(torch, BY_TAG[dtype].name))
        save_file(stored, folder / "model.safetensors", metadata={"format": "pt"})
        merge_json(folder / "config.json", quantization)
        return folder

    return make


CLAIMS = ("whole", "every part of every tensor is there", "from_pretrained finds every tensor", "loads")
COMMANDS = ["fp8 block", "compressed-tensors MXFP4", "compressed-tensors W4A16", "modelopt NVFP4", "gptq", "mlx 4 bits"]


@pytest.mark.parametrize("layout", COMMANDS)
def test_commands_report_a_missing_part_and_claim_nothing(
    layout: str, folders: Callable[[str], Path], tmp_path: Path
) -> None:
    good = folders(layout)
    checked = ckpt("check", good)
    assert checked.code == 0 and "every part of every tensor is there" in checked.out
    assert ckpt("convert", "hf", "hf", good, "-o", tmp_path / "out").code == 0
    broken = tmp_path / "broken"
    shutil.copytree(good, broken)
    stored = load_file(broken / "model.safetensors")
    part = next(name for name in stored if "layers.1" in name and "down_proj" in name and "scale" in name)
    del stored[part]
    save_file(stored, broken / "model.safetensors", metadata={"format": "pt"})
    checked = ckpt("check", broken)
    assert checked.code == CorruptError.exit_code
    assert f"{part}: missing" in checked.out
    converted = ckpt("convert", "hf", "hf", broken, "-o", tmp_path / "no")
    assert converted.code == LossError.exit_code
    assert part in converted.err and not (tmp_path / "no").exists()
    said = checked.out + checked.err + converted.out + converted.err
    assert not [claim for claim in CLAIMS if claim in said.replace(str(tmp_path), "").replace("no loader", "")]


@pytest.mark.parametrize("layout", COMMANDS)
def test_a_config_without_the_quantization_of_its_weights_is_incomplete(
    layout: str, folders: Callable[[str], Path], tmp_path: Path
) -> None:
    """FP8 values would load unscaled in transformers, and a weight stored in parts would be initialized at random."""
    broken = Path(shutil.copytree(folders(layout), tmp_path / "broken"))
    entries = json.loads((broken / "config.json").read_text())
    plain = {name: value for name, value in entries.items() if name not in LAYOUTS[layout][0]}
    (broken / "config.json").write_text(json.dumps(plain))
    checked = ckpt("check", broken)
    assert checked.code == CorruptError.exit_code, checked.out
    assert "config.json: it records no quantization, and loaders take 3 quantized weights for plain" in checked.out
    assert "every part of every tensor is there" not in checked.out


def test_loads_reports_a_missing_scale(folders: Callable[[str], Path], tmp_path: Path) -> None:
    assert api.check_loads(folders("fp8 block")).good
    broken = tmp_path / "broken"
    shutil.copytree(folders("fp8 block"), broken)
    stored = load_file(broken / "model.safetensors")
    part = "model.layers.1.mlp.down_proj.weight_scale_inv"
    save_file({n: t for n, t in stored.items() if n != part}, broken / "model.safetensors", metadata={"format": "pt"})
    result = ckpt("verify", "--loads", broken)
    assert result.code == 1 and part in result.out and ": loads" not in result.out


@pytest.mark.parametrize("layout", COMMANDS)
def test_dtype_casts_no_part(layout: str, folders: Callable[[str], Path], tmp_path: Path) -> None:
    source = folders(layout)
    result = ckpt("convert", "hf", "hf", source, "-o", tmp_path / "out", "--dtype", "bf16")
    assert result.code == 0, result.err
    parts = api.quantized_parts(toolkit.open(source))
    before, after = (load_file(folder / "model.safetensors") for folder in (source, tmp_path / "out"))
    assert all(before[name].dtype == after[name].dtype for name in parts)
    assert {after[name].dtype for name in after.keys() - parts} == {torch.bfloat16}
    assert f"{len(parts)} parts of quantized weights kept" in result.err


def test_dtype_with_an_unknown_method_is_refused(folders: Callable[[str], Path], tmp_path: Path) -> None:
    source = tmp_path / "unknown"
    shutil.copytree(folders("gptq"), source)
    merge_json(source / "config.json", {"quantization_config": {"quant_method": "vptq"}})
    checked = ckpt("check", source)
    assert checked.code == 0 and "vptq" in checked.out
    assert "whole" not in checked.out and "every part" not in checked.out
    refused = ckpt("convert", "hf", "hf", source, "-o", tmp_path / "no", "--dtype", "bf16", "--names", "own")
    assert refused.code == LossError.exit_code
    assert "vptq" in refused.err
    assert ckpt("convert", "hf", "hf", source, "-o", tmp_path / "out", "--names", "own").code == 0


def test_every_method_of_transformers_is_checked_or_said_not_to_be(
    folders: Callable[[str], Path], tmp_path: Path
) -> None:
    from transformers.quantizers.auto import AUTO_QUANTIZER_MAPPING

    from converters.quantized.methods import methods

    tensors = {
        f"layers.{n}.up.{part}": tensor(f"layers.{n}.up.{part}", "U8", [4, 4]) for n in range(2) for part in "ab"
    }
    unknown = AUTO_QUANTIZER_MAPPING.keys() - methods().keys() - {"bitsandbytes_4bit", "bitsandbytes_8bit"}
    assert len(unknown) > 8
    for method in unknown:
        assert method in str(weights_of(tensors, {"quantization_config": {"quant_method": method}}).unproved)
    source = Path(shutil.copytree(folders("gptq"), tmp_path / "hqq"))
    stored = load_file(source / "model.safetensors")
    for name in [name for name in stored if name.endswith(("qweight", "qzeros", "scales", "g_idx"))]:
        words = {"qweight": "W_q", "qzeros": "zero", "scales": "scale"}
        value, (module, _, word) = stored.pop(name), name.rpartition(".")
        stored |= {f"{module}.{words[word]}": value} if word in words else {}
    save_file(stored, source / "model.safetensors", metadata={"format": "pt"})
    merge_json(source / "config.json", {"quantization_config": {"quant_method": "hqq"}})
    checked = ckpt("check", source)
    assert checked.code == 0 and "quantized by hqq were not checked" in checked.out, checked.out
    assert "whole" not in checked.out and "don't have" not in checked.out
    said = ckpt("convert", "hf", "hf", source, "-o", tmp_path / "out", "--names", "own").err
    assert "not checked: if from_pretrained can load this folder: weight parts quantized by hqq" in said
    gone = next(name for name in stored if name.endswith("scale"))
    save_file({n: t for n, t in stored.items() if n != gone}, source / "model.safetensors", metadata={"format": "pt"})
    checked = ckpt("check", source)
    assert checked.code == CorruptError.exit_code and gone in checked.out


@pytest.mark.parametrize("layout", COMMANDS)
@pytest.mark.parametrize("word", ["weight_scale", "scale", "input_scale"])
def test_scale_of_a_plain_weight_is_named_by_check_and_convert(
    word: str, layout: str, folders: Callable[[str], Path], tmp_path: Path
) -> None:
    broken = Path(shutil.copytree(folders(layout), tmp_path / "broken"))
    name = f"model.norm.{word}"
    stored = {**load_file(broken / "model.safetensors"), name: torch.ones(1)}
    save_file(stored, broken / "model.safetensors", metadata={"format": "pt"})
    checked, converted = ckpt("check", broken), ckpt("convert", "hf", "hf", broken, "-o", tmp_path / "out")
    assert (checked.code, converted.code) == (CorruptError.exit_code, LossError.exit_code), checked.out
    assert "model.norm." in checked.out and "model.norm." in converted.err


@pytest.mark.parametrize("target", ["zero1", "zero3", "universal", "dcp", "fsdp-ranks", "megatron"])
def test_a_training_format_takes_no_quantized_model(
    target: str, folders: Callable[[str], Path], tmp_path: Path
) -> None:
    refused = ckpt("convert", "hf", target, folders("fp8 block"), "-o", tmp_path / "no")
    assert refused.code == LossError.exit_code
    assert "has no place for quantized weights" in refused.err and "--dequantize" in refused.err
    refused = ckpt("convert", "hf", target, folders("mlx 4 bits"), "-o", tmp_path / "no")
    assert refused.code == LossError.exit_code
    assert "full-precision model" in refused.err and "--dequantize" not in refused.err


def test_the_hint_for_a_training_format_works(folders: Callable[[str], Path], tmp_path: Path) -> None:
    options = ("--world-size", "2", "--dequantize")
    assert ckpt("convert", "hf", "zero3", folders("fp8 block"), "-o", tmp_path / "out", *options).code == 0


@pytest.mark.parametrize(
    ("file", "content", "title"),
    [
        ("hf_quant_config.json", {"quantization": {"quant_algo": "NVFP4"}}, "modelopt NVFP4"),
        ("quantize_config.json", _GPTQ, "gptq, 4 bits"),
        ("config.json", {"quantization": {"bits": 4, "group_size": 64}}, "mlx, 4 bits"),
    ],
)
def test_inspect_shows_the_method_wherever_it_is_recorded(
    file: str, content: Mapping[str, Any], title: str, folders: Callable[[str], Path], tmp_path: Path
) -> None:
    layout = {"modelopt NVFP4": "modelopt NVFP4", "gptq, 4 bits": "gptq", "mlx, 4 bits": "mlx 4 bits"}[title]
    source = tmp_path / "source"
    shutil.copytree(folders(layout), source)
    entries = json.loads((source / "config.json").read_text())
    entries.pop("quantization_config", None)
    (source / "config.json").write_text(json.dumps(entries))
    if file != "config.json":
        (source / file).write_text(json.dumps(content))
    assert f"quantized   {title}" in ckpt("inspect", source).out
    result = ckpt("convert", "hf", "hf", source, "-o", tmp_path / "out")
    assert result.code == 0, result.err
    assert (
        "from_pretrained finds every tensor" not in result.err
        and "transformers does not read weights quantized by" in result.err
    )
    assert (tmp_path / "out" / file).exists()


@pytest.mark.parametrize(
    "file, layout, setting",
    [
        ("hf_quant_config.json", "modelopt NVFP4", {"quant_algo": "NVFP4_SVDQUANT"}),
        ("quant_config.json", "awq", {"version": "marlin"}),
        ("config.json", "mlx 4 bits", {}),
    ],
)
def test_dequantize_reads_the_method_wherever_it_is_recorded(
    file: str, layout: str, setting: Mapping[str, Any], folders: Callable[[str], Path], tmp_path: Path
) -> None:
    source = tmp_path / "source"
    shutil.copytree(folders(layout), source)
    if file != "config.json":
        entries = json.loads((source / "config.json").read_text())
        recorded = entries.pop("quantization_config")
        (source / file).write_text(json.dumps(recorded))
        (source / "config.json").write_text(json.dumps(entries))
        done = ckpt("convert", "hf", "hf", source, "-o", tmp_path / "plain", "--dequantize")
        assert done.code == 0 and not (tmp_path / "plain" / file).exists(), done.err
        assert ckpt("check", tmp_path / "plain").code == 0
        (source / file).write_text(json.dumps({**recorded, **setting}))
    result = ckpt("convert", "hf", "hf", source, "-o", tmp_path / "no", "--dequantize")
    assert result.code == 2 and file in result.err, result.err
    assert not (tmp_path / "no").exists()


def test_a_config_of_diffusers_records_what_is_written(folders: Callable[[str], Path], tmp_path: Path) -> None:
    source = Path(shutil.copytree(folders("fp8 block"), tmp_path / "source"))
    config = {"_class_name": "FluxTransformer2DModel", **LAYOUTS["fp8 block"][0]}
    (source / "config.json").write_text(json.dumps(config))
    done = ckpt("convert", "hf", "hf", source, "-o", tmp_path / "plain", "--dequantize")
    assert done.code == 0 and "left out quantization_config" in done.err, done.err
    assert json.loads((tmp_path / "plain/config.json").read_text()) == {"_class_name": "FluxTransformer2DModel"}
    done = ckpt("convert", "hf", "hf", tmp_path / "plain", "-o", tmp_path / "again", "--quantize", "fp8-block")
    assert done.code == 0, done.err
    assert json.loads((tmp_path / "again/config.json").read_text())["quantization_config"]["quant_method"] == "fp8"
    assert ckpt("convert", "hf", "hf", source, "-o", tmp_path / "same").code == 0
    assert json.loads((tmp_path / "same/config.json").read_text()) == config


# -- NaN and infinite scales -----------------------------------------------------------------------------------
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_dequantize_refuses_a_scale_that_is_not_finite(
    value: float, folders: Callable[[str], Path], tmp_path: Path
) -> None:
    source = tmp_path / "source"
    shutil.copytree(folders("fp8 block"), source)
    stored = load_file(source / "model.safetensors")
    part = "model.layers.1.mlp.down_proj.weight_scale_inv"
    stored[part][0, 1] = value
    save_file(stored, source / "model.safetensors", metadata={"format": "pt"})
    result = ckpt("convert", "hf", "hf", source, "-o", tmp_path / "no", "--dequantize")
    assert result.code == CorruptError.exit_code
    assert part in result.err and "[0, 1]" in result.err
    assert not (tmp_path / "no").exists()


def test_dequantize_refuses_the_nan_of_mxfp4(tmp_path: Path) -> None:
    scales = torch.full((2, 8, 2), 120, dtype=torch.uint8)
    scales[1, 3, 0] = 255
    tensors = {"x.w_blocks": torch.zeros(2, 8, 2, 16, dtype=torch.uint8), "x.w_scales": scales}
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(CorruptError) as caught:
        api.dequantized(api.open(tmp_path))["x.w"][...]
    assert caught.value.fqn == "x.w_scales" and "[1, 3, 0]" in str(caught.value.found)


@pytest.mark.parametrize("module", ["k_scale", "k_proj.k_scale", "attn.k_scale", "kv_scale", "k_zero_point"])
def test_scales_of_a_kv_cache_are_carried(module: str, folders: Callable[[str], Path], tmp_path: Path) -> None:
    """vLLM, compressed-tensors and modelopt store KV cache scales next to quantized weights. No weight needs them."""
    folder, name = tmp_path / "model", f"model.layers.1.self_attn.{module}"
    shutil.copytree(folders("fp8 block"), folder)
    stored = {**load_file(folder / "model.safetensors"), name: torch.full((1,), 0.5)}
    save_file(stored, folder / "model.safetensors", metadata={"format": "pt"})
    checked = ckpt("check", folder)
    assert (
        checked.code == 0 and "every part of every tensor is there" in checked.out and "don't have" not in checked.out
    )
    done = ckpt("convert", "auto", "hf", folder, "-o", tmp_path / "out")
    assert done.code == 0 and load_file(tmp_path / "out/model.safetensors")[name].item() == 0.5, done.err
    done = ckpt("convert", "auto", "hf", folder, "-o", tmp_path / "plain", "--dequantize", "-v")
    assert done.code == 0 and f"left out: 1 scale for activations, for example {name}" in done.err, done.err
    assert name not in load_file(tmp_path / "plain/model.safetensors")


def test_scales_of_a_kv_cache_are_unknown_to_a_plain_model(folders: Callable[[str], Path], tmp_path: Path) -> None:
    folder, name = tmp_path / "model", "model.layers.1.self_attn.k_scale"
    shutil.copytree(folders("fp8 block").parent / "plain", folder)
    stored = {**load_file(folder / "model.safetensors"), name: torch.full((1,), 0.5)}
    save_file(stored, folder / "model.safetensors", metadata={"format": "pt"})
    assert name in ckpt("check", folder).out
    done = ckpt("convert", "auto", "hf", folder, "-o", tmp_path / "out")
    assert done.code == 6 and name in done.err
