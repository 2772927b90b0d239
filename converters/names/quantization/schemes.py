"""Declarations: the parts of a weight under each quantization method.

A part's name is a template: `{w}` is the plain weight's name, `{m}` its module's path prefix. Shapes follow from the
plain weight's shape, [..., out, in].

Sources: transformers 5.23 `integrations/finegrained_fp8.py`, `mxfp4.py`, `fbgemm_fp8.py`, `eetq.py`; compressed-tensors
0.20 `compressors/*/base.py` (`compression_param_names`); nvidia-modelopt 0.47 `torch/export/unified_export_hf.py`;
AutoGPTQ and AutoAWQ `qlinear`; bitsandbytes 0.50.2 `functional.py` (`QuantState.as_dict`); torchao 0.18
`prototype/safetensors`; mlx 0.30 `nn/layers/quantized.py`; DeepSeek-V4 `inference/model.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Any, Protocol

from ckpt.plan.tensors import Shape

Settings = Mapping[str, Any]


class ShapeSet(Protocol):
    """Legal shapes. The first is an example for messages."""

    def __contains__(self, shape: object, /) -> bool: ...
    def __getitem__(self, index: Any, /) -> Any: ...


Shapes = Callable[[Shape], ShapeSet]
ShapeList = Callable[[Shape], list[Shape]]

FLOATS = ("float32", "bfloat16", "float16")
F32 = ("float32",)
F8 = ("float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz")
E4M3 = ("float8_e4m3fn",)
E8M0 = ("float8_e8m0fnu", "uint8")
BYTES = ("uint8",)
FOUR_BITS = ("uint8", "int8", "float4_e2m1fn_x2")
INT8, INT32, UINT32, INT64 = ("int8",), ("int32",), ("uint32",), ("int64",)
INTEGERS = ("int8", "uint8", "int32", "int64", *F8)
#: Dtypes for packed values, never used by plain weights.
PACKED = frozenset({*F8, *E8M0, *FOUR_BITS, *INT8, *INT32, *UINT32, "int16", "uint16"})

_WEIGHT = "{w}"


@dataclass(frozen=True, slots=True)
class Part:
    """Tensor of a quantized weight. If `shapes` is None, any shape is legal."""

    dtypes: tuple[str, ...]
    shapes: Shapes | None = None
    required: bool = True


@dataclass(frozen=True, slots=True)
class Scheme:
    """All parts of a weight by name template.

    `plain` computes the plain shape from the shape of the part `packed`. If `is_stack` is True, the scheme is only for
    experts in one tensor, with a name not ending in `weight`. If False, it is only for all other weights. `bits` is the
    size of an element if the packed part has no dims.
    """

    packed: str
    parts: Mapping[str, Part]
    plain: Callable[[Shape], Shape] | None = None
    is_stack: bool | None = None
    bits: int | None = None


def schemes_of(method: str | None, settings: Settings) -> Sequence[Scheme] | None:
    """Return a method's schemes. None if the method or its settings are unknown.

    Without a recorded method, return all self-describing schemes.
    """
    if method is None:
        found = [*_bitsandbytes(settings), *_mxfp4(settings), *_fp8(settings), *_naive(F8, None, {})]
        return [*found, *(_auto_round({}) or []), *_integers(None, {})]
    declared = METHODS.get(method)
    return None if declared is None else declared(settings)


# -- shapes -----------------------------------------------------------------------------------------------------


def _scalar(plain: Shape) -> list[Shape]:
    """Return the shapes for one number per tensor, or per matrix in a stack."""
    lead = plain[:-2]
    return [(), (1,), (1, 1), *([lead, (*lead, 1), (*lead, 1, 1)] if lead else [])]


def _per_output(plain: Shape) -> list[Shape]:
    """Return the shapes for one number per output."""
    return [(*plain[:-2], plain[-2], 1), (*plain[:-2], plain[-2])]


def _per_group(rows: int, columns: int) -> ShapeList:
    """Return the shapes for one number per block, with `rows` by `columns` elements."""

    def shapes(plain: Shape) -> list[Shape]:
        return [(*plain[:-2], -(-plain[-2] // max(1, rows)), -(-plain[-1] // max(1, columns)))]

    return shapes


class _AnyBlocks:
    """Legal scale shapes for blocks that tile the weight, in any size."""

    def __init__(self, plain: Shape) -> None:
        self._plain = plain

    def __contains__(self, shape: object) -> bool:
        if not isinstance(shape, tuple):
            return False
        is_tiled = len(shape) == len(self._plain) and all(
            n and size % n == 0 for size, n in zip(self._plain, shape, strict=True)
        )
        return is_tiled or shape in _scalar(self._plain) + _per_output(self._plain)

    def __getitem__(self, _: int) -> Shape:
        return (*self._plain[:-1], 1)


def _any_blocks(plain: Shape) -> _AnyBlocks:
    return _AnyBlocks(plain)


def _wider(factor: int) -> Callable[[Shape], Shape]:
    return lambda packed: (*packed[:-1], packed[-1] * factor)


def _optional(dtypes: tuple[str, ...] = FLOATS, shapes: Shapes | None = None) -> Part:
    return Part(dtypes, shapes, required=False)


# -- FP8 --------------------------------------------------------------------------------------------------------


def _block_size(settings: Settings) -> tuple[int, int] | None:
    given = settings.get("weight_block_size")
    if isinstance(given, (list, tuple)) and len(given) == 2 and all(type(size) is int and size > 0 for size in given):
        return given[0], given[1]
    return None


def _fp8(settings: Settings) -> list[Scheme]:
    """Return schemes with block or tensor scales: DeepSeek-V3's `weight_scale_inv`, or DeepSeek-V4's `scale`."""
    size = _block_size(settings)
    scales = _per_group(*size) if size else _scalar if settings else None
    plain = Scheme(_WEIGHT, {_WEIGHT: Part(F8), "{w}_scale_inv": Part((*FLOATS, *E8M0), scales)}, tuple)
    activations = Part(FLOATS, _scalar, required=settings.get("activation_scheme") == "static")
    names = ("activation_scale", "input_scale")
    kinds = (("{m}", False, activations), ("{w}_", True, replace(activations, shapes=None)))
    found = [
        replace(plain, parts={**plain.parts, of + name: part}, is_stack=is_stack)
        for name in names
        for of, is_stack, part in kinds
    ]
    if size is None:  # AutoFP8, read by vLLM under the same method
        parts = {_WEIGHT: Part(F8), "{w}_scale": Part(FLOATS, lambda plain: _scalar(plain) + _per_output(plain))}
        found.append(Scheme(_WEIGHT, {**parts, "{m}input_scale": activations}, tuple))
    if settings.get("expert_dtype") or settings.get("scale_fmt") or not settings or size:
        blocks = _per_group(*size) if size else None
        found.append(Scheme(_WEIGHT, {_WEIGHT: Part(F8), "{m}scale": Part((*FLOATS, *E8M0), blocks)}, tuple))
        packed = {_WEIGHT: Part(FOUR_BITS), "{m}scale": Part(E8M0, _per_group(1, 32))}
        found.append(Scheme(_WEIGHT, packed, _wider(2)))
    return found


def _fbgemm(_: Settings) -> list[Scheme]:
    parts = {_WEIGHT: Part(F8), "{w}_scale": Part(F32, _per_output)}
    linear = Scheme(_WEIGHT, {**parts, "{m}input_scale_ub": _optional(F32, _scalar)}, tuple, is_stack=False)
    return [linear, Scheme(_WEIGHT, {**parts, "{w}_scale": Part(F32)}, tuple, is_stack=True)]


def _mxfp4(_: Settings) -> list[Scheme]:
    """Return gpt-oss's scheme for experts: blocks [experts, out, groups, 16] for a plain [experts, in, out]."""

    def plain(packed: Shape) -> Shape:
        return (*packed[:-3], packed[-2] * packed[-1] * 2, packed[-3]) if len(packed) > 2 else packed

    def blocks(shape: Shape) -> list[Shape]:
        return [(*shape[:-2], shape[-1], shape[-2] // 32, 16)]

    def scales(shape: Shape) -> list[Shape]:
        return [(*shape[:-2], shape[-1], shape[-2] // 32)]

    return [Scheme("{w}_blocks", {"{w}_blocks": Part(BYTES, blocks), "{w}_scales": Part(E8M0, scales)}, plain)]


# -- compressed-tensors ----------------------------------------------------------------------------------------


def _compressed_tensors(settings: Settings) -> list[Scheme] | None:
    """Return one scheme per config group. None if a format is unknown."""
    groups = settings.get("config_groups")
    found: list[Scheme] = []
    for group in groups.values() if isinstance(groups, Mapping) else ():
        if not isinstance(group, Mapping):
            return None
        schemes = _compressed_group(str(group.get("format") or settings.get("format")), group)
        if schemes is None:
            return None
        found += schemes
    return found or None


def _compressed_group(format: str, group: Settings) -> list[Scheme] | None:
    weights, inputs = (value if isinstance(value := group.get(key), Mapping) else {} for key in _ARGS)
    scales = _strategy_shapes(weights)
    extra = _activation_parts(weights, inputs, format, scales)
    if format == "dense":
        return []
    if format in ("float-quantized", "int-quantized", "naive-quantized"):
        is_float = weights.get("type") == "float"
        return _naive(F8, scales, extra) if is_float else _integers(scales, extra)
    if format == "pack-quantized":
        bits = weights.get("num_bits")
        return _packed_integers(bits, scales, extra) if type(bits) is int and 0 < bits <= 32 else None
    if format == "nvfp4-pack-quantized":
        parts = {"{w}_scale": Part(E4M3, _per_group(1, 16)), "{w}_global_scale": Part(F32, _scalar)}
        return [_packed_bytes(2, {**parts, **extra})]
    if format in ("mxfp4-pack-quantized", "mxfp6-pack-quantized"):
        scale = {"{w}_scale": Part(E8M0, _per_group(1, 32))}
        return [_packed_bytes(2 if "mxfp4" in format else None, {**scale, **extra})]
    if format == "mxfp8-quantized":
        parts = {_WEIGHT: Part(F8), "{w}_scale": Part(E8M0, _per_group(1, 32)), **extra}
        return [Scheme(_WEIGHT, parts, tuple)]
    return None


_ARGS = ("weights", "input_activations")


def _activation_parts(weights: Settings, inputs: Settings, format: str, scales: ShapeList | None) -> dict[str, Part]:
    """Return the parts for asymmetric weights and for activations, required if the config says so."""
    is_static, is_local = bool(inputs) and inputs.get("dynamic") is False, inputs.get("dynamic") == "local"
    is_global = format.startswith("nvfp4")
    zeros = Part((*INT8, *F8), scales)
    if format == "pack-quantized":
        per = 32 // max(1, _number(weights, "num_bits") or 32)
        zeros = Part(INT32, scales and (lambda plain: [(-(-s[0] // per), *s[1:]) for s in scales(plain) if s]))
    return {
        "{w}_g_idx": _optional(INT32, lambda plain: [(plain[-1],)]),
        "{w}_zero_point": replace(zeros, required=weights.get("symmetric", True) is False),
        "{m}input_global_scale": Part(F32, _scalar, required=is_global and (is_static or is_local)),
        "{m}input_scale": Part(FLOATS, None, required=is_static and not is_global),
        "{m}input_zero_point": _optional(INTEGERS),
        "{m}output_scale": _optional(),
        "{m}output_zero_point": _optional(INTEGERS),
    }


def _strategy_shapes(weights: Settings) -> ShapeList | None:
    strategy, size, block = (weights.get(key) for key in ("strategy", "group_size", "block_structure"))
    if strategy == "tensor":
        return _scalar
    if strategy == "channel":
        return _per_output
    if strategy in ("group", "tensor_group") and type(size) is int and size > 0:
        return _per_group(1, size)
    if strategy == "block" and isinstance(block, list) and all(type(n) is int and n > 0 for n in block):
        return _per_group(block[0], block[1])
    return None


def _naive(dtypes: tuple[str, ...], scales: Shapes | None, extra: Mapping[str, Part]) -> list[Scheme]:
    return [Scheme(_WEIGHT, {_WEIGHT: Part(dtypes), "{w}_scale": Part(FLOATS, scales), **extra}, tuple)]


def _integers(scales: Shapes | None, extra: Mapping[str, Part]) -> list[Scheme]:
    return _naive(INT8, scales, extra)


def _packed_integers(bits: int, scales: Shapes | None, extra: Mapping[str, Part]) -> list[Scheme]:
    per = 32 // bits
    parts = {
        "{w}_packed": Part(INT32),
        "{w}_scale": Part(FLOATS, scales),
        "{w}_shape": Part((*INT64, *INT32), lambda _: [(2,)]),
    }
    return [Scheme("{w}_packed", {**parts, **extra}, _wider(per))]


def _packed_bytes(per_byte: int | None, parts: Mapping[str, Part]) -> Scheme:
    """Return a scheme with `per_byte` values in a byte. None means four 6-bit values in three bytes."""

    def plain(packed: Shape) -> Shape:
        return (*packed[:-1], packed[-1] * per_byte if per_byte else packed[-1] * 4 // 3)

    return Scheme("{w}_packed", {"{w}_packed": Part(BYTES), **parts}, plain)


# -- ModelOpt ---------------------------------------------------------------------------------------------------


def _modelopt(settings: Settings) -> list[Scheme] | None:
    inner = settings.get("quantization")
    algorithm = (inner if isinstance(inner, Mapping) else settings).get("quant_algo")
    if algorithm == "MIXED_PRECISION":
        return [scheme for schemes in _MODELOPT.values() for scheme in schemes]
    return _MODELOPT.get(str(algorithm).upper())


_INPUT, _SMOOTH = {"{m}input_scale": Part(F32, _scalar)}, {"{m}pre_quant_scale": _optional()}
_BIAS = {"{m}output_scale": _optional(), **_SMOOTH}


def _modelopt_fp8(scales: Shapes, extra: Mapping[str, Part], dtypes: tuple[str, ...] = FLOATS) -> Scheme:
    return Scheme(_WEIGHT, {_WEIGHT: Part(E4M3), "{w}_scale": Part(dtypes, scales), **extra}, tuple, is_stack=False)


def _nvfp4(extra: Mapping[str, Part]) -> list[Scheme]:
    """Return schemes for linear layers and for stacked experts, whose matrices may be transposed."""
    scales = {"{w}_scale": Part(E4M3, _per_group(1, 16)), "{w}_scale_2": Part(F32, _scalar)}
    linear = Scheme(_WEIGHT, {_WEIGHT: Part(BYTES), **scales, **extra}, _wider(2), is_stack=False)
    own = {"{w}_weight_scale": Part(E4M3), "{w}_weight_scale_2": Part(F32)}
    more = {"{w}_input_scale": Part(F32)} if "{m}input_scale" in extra else {}
    return [linear, Scheme(_WEIGHT, {_WEIGHT: Part(BYTES), **own, **more}, is_stack=True)]


_AWQ_BYTES = {_WEIGHT: Part(BYTES), "{w}_scale": Part((*FLOATS, *E4M3))}


def _taller(packed: Shape) -> Shape:
    return (*packed[:-2], packed[-2] * 2, packed[-1])


def _pages(plain: Shape) -> list[Shape]:
    """Return the shapes for 128 by 128 blocks. ModelOpt also writes them as [rows, 1, columns, 1]."""
    ((*lead, rows, columns),) = _per_group(128, 128)(plain)
    return [(*lead, rows, columns), (*lead, rows, 1, columns, 1)]


_INT8_ROWS = {_WEIGHT: Part(INT8), "{w}_scale": Part(FLOATS, _per_output)}
_STACKED_SCALES = {"{w}_weight_scale": Part(F32), "{w}_input_scale": Part(F32)}
_MODELOPT: Mapping[str, list[Scheme]] = {
    "FP8": [
        _modelopt_fp8(_scalar, {**_INPUT, **_BIAS}),
        Scheme(_WEIGHT, {_WEIGHT: Part(E4M3), **_STACKED_SCALES}, tuple, is_stack=True),
    ],
    "FP8_PER_CHANNEL_PER_TOKEN": [_modelopt_fp8(_per_output, _BIAS)],
    "FP8_PB_WO": [_modelopt_fp8(_pages, _BIAS)],
    "FP8_PB_REAL": [_modelopt_fp8(_pages, _BIAS)],
    "MXFP8": [_modelopt_fp8(_per_group(1, 32), _BIAS, E8M0)],
    "NVFP4": _nvfp4({**_INPUT, **_BIAS}),
    "NVFP4_AWQ": _nvfp4({**_INPUT, **_BIAS}),
    "W4A16_NVFP4": _nvfp4(_BIAS),
    "W4A8_NVFP4_FP8": _nvfp4({**_INPUT, **_BIAS}),
    "INT8_SQ": [
        Scheme(_WEIGHT, {_WEIGHT: Part(INT8), "{w}_scale": Part(FLOATS, _per_output), **_INPUT, **_BIAS}, tuple)
    ],
    "W8A16": [Scheme(_WEIGHT, {_WEIGHT: Part(INT8), "{w}_scale": Part(FLOATS, _per_output), **_BIAS}, tuple)],
    "W4A16_AWQ": [Scheme(_WEIGHT, {**_AWQ_BYTES, **_BIAS}, _taller)],
    "W4A8_AWQ": [Scheme(_WEIGHT, {**_AWQ_BYTES, "{w}_scale_2": Part(F32), **_INPUT, **_BIAS}, _taller)],
}


# -- GPTQ, AWQ --------------------------------------------------------------------------------------------------


def _number(settings: Settings, *names: str) -> int | None:
    return next((settings[name] for name in names if type(settings.get(name)) is int), None)


def _gptq(settings: Settings) -> list[Scheme] | None:
    """Return the scheme for qweight [in * bits / 32, out]. Modules with own bits (`dynamic`) have other shapes."""
    if settings.get("checkpoint_format", "gptq") not in ("gptq", "gptq_v2", "", None):
        return None
    bits, group = _number(settings, "bits"), _number(settings, "group_size")
    index = _optional(INT32, lambda plain: [(plain[-1],)])
    if not bits or not group or settings.get("dynamic"):
        parts = {"{m}qweight": Part(INT32), "{m}qzeros": Part(INT32), "{m}scales": Part(FLOATS)}
        return [Scheme("{m}qweight", {**parts, "{m}g_idx": _optional(INT32)})]

    def count(plain: Shape) -> int:
        return 1 if group <= 0 else -(-plain[-1] // group)

    parts = {
        "{m}qweight": Part(INT32),
        "{m}qzeros": Part(INT32, lambda plain: [(count(plain), -(-plain[-2] * bits // 32))]),
        "{m}scales": Part(FLOATS, lambda plain: [(count(plain), plain[-2])]),
        "{m}g_idx": replace(index, required=bool(settings.get("desc_act"))),
    }
    return [Scheme("{m}qweight", parts, lambda packed: (packed[-1], packed[0] * 32 // bits))]


def _awq(settings: Settings) -> list[Scheme] | None:
    """Return the scheme for `gemm`'s qweight [in, out * bits / 32]. Other versions have other shapes."""
    version = str(settings.get("version", "gemm")).lower()
    bits, group = _number(settings, "bits", "w_bit") or 4, _number(settings, "group_size", "q_group_size")
    if version not in ("gemm", "gemv"):
        return None
    if version == "gemv" or not group:
        parts = {"{m}qweight": Part(INT32), "{m}qzeros": Part(INT32), "{m}scales": Part(FLOATS)}
        return [Scheme("{m}qweight", parts)]

    def count(plain: Shape) -> int:
        return 1 if group <= 0 else -(-plain[-1] // group)

    parts = {
        "{m}qweight": Part(INT32),
        "{m}qzeros": Part(INT32, lambda plain: [(count(plain), -(-plain[-2] * bits // 32))]),
        "{m}scales": Part(FLOATS, lambda plain: [(count(plain), plain[-2])]),
    }
    return [Scheme("{m}qweight", parts, lambda packed: (packed[-1] * 32 // bits, packed[0]))]


def _auto_round(settings: Settings) -> list[Scheme] | None:
    """Return the schemes for GPTQ and AWQ. Other packing formats are other methods' layouts."""
    packing = str(settings.get("packing_format", "auto_round:auto_gptq"))
    if "gptq" not in packing and "awq" not in packing:
        return None
    return [*(_gptq({}) or []), *(_awq({}) or [])]


# -- bitsandbytes, torchao, MLX, EETQ -----------------------------------------------------------------


def _per_block(plain: Shape) -> list[Shape]:
    """Return the shape for one scale per block, with 64 elements or another size supported by bitsandbytes."""
    return [(-(-prod(plain) // size),) for size in (64, 32, *(2**power for power in range(7, 13)))]


def _bitsandbytes(_: Settings) -> list[Scheme]:
    found = []
    for kind in ("nf4", "fp4"):
        state = {f"{{w}}.quant_state.bitsandbytes__{kind}": Part(BYTES), "{w}.quant_map": Part(F32)}
        packed = {_WEIGHT: Part((*FLOATS, *FOUR_BITS)), **state}
        nested = {"{w}.nested_absmax": Part(F32), "{w}.nested_quant_map": Part(F32)}
        found.append(Scheme(_WEIGHT, {**packed, "{w}.absmax": Part(F32, _per_block)}, bits=4))
        found.append(Scheme(_WEIGHT, {**packed, "{w}.absmax": Part(BYTES, _per_block), **nested}, bits=4))
    rows = {_WEIGHT: Part(INT8), "{m}SCB": Part(F32, _per_output), "{m}weight_format": _optional(BYTES)}
    return [*found, Scheme(_WEIGHT, rows, tuple)]


def _torchao(_: Settings) -> list[Scheme]:
    """Return schemes for a subclass's tensors, by their values' dtype."""
    data, scale = "{m}_weight_qdata", "{m}_weight_scale"
    more = {"{m}_weight_act_quant_scale": _optional(), "{m}_weight_act_pre_scale": _optional()}
    zero = {"{m}_weight_zero_point": _optional((*INTEGERS, *FLOATS))}
    zero_of_eight = {"{m}_weight_zero_point": _optional((*INT8, *FLOATS), _any_blocks)}
    scales = Part((*FLOATS, *E8M0), _any_blocks)
    eight = Scheme(data, {data: Part((*F8, *INT8)), scale: scales, **zero_of_eight, **more}, tuple)
    scales = Part((*FLOATS, *F8, *E8M0))
    nibbles = Scheme(data, {data: Part(FOUR_BITS), scale: scales, **zero, **more}, _wider(2))
    four = Scheme(data, {data: Part((*BYTES, *INT32)), scale: scales, **zero, **more})
    both = {data: Part((*FOUR_BITS, *INT32)), "{m}_weight_scale_and_zero": Part(FLOATS), **more}
    whole = {"{m}_weight_per_tensor_scale": Part(FLOATS), "{m}_weight_act_per_tensor_scale": _optional()}
    tensor = replace(four, parts={**four.parts, **whole})
    return [eight, nibbles, four, Scheme(data, both), tensor]


def _mlx(settings: Settings) -> list[Scheme]:
    bits, group = _number(settings, "bits") or 4, _number(settings, "group_size") or 64
    is_affine = settings.get("mode", "affine") == "affine"
    scales = {"{m}scales": Part(FLOATS if is_affine else (*E8M0, *F8), _per_group(1, group))}
    biases = {"{m}biases": Part(FLOATS, _per_group(1, group))} if is_affine else {}
    parts = {_WEIGHT: Part(UINT32), **scales, **biases}
    return [Scheme(_WEIGHT, parts, lambda packed: (*packed[:-1], packed[-1] * 32 // bits))]


def _eetq(_: Settings) -> list[Scheme]:
    """Return the scheme for int8 [in, out]."""
    scales = Part(FLOATS, lambda plain: [(plain[0],)])
    return [Scheme(_WEIGHT, {_WEIGHT: Part(INT8), "{w}_scales": scales}, lambda packed: packed[::-1])]


#: Declared methods, by `quant_method`.
METHODS: Mapping[str, Callable[[Settings], Sequence[Scheme] | None]] = {
    "auto-round": _auto_round,
    "awq": _awq,
    "bitsandbytes": _bitsandbytes,
    "compressed-tensors": _compressed_tensors,
    "eetq": _eetq,
    "fbgemm_fp8": _fbgemm,
    "fp8": _fp8,
    "gptq": _gptq,
    "intel/auto-round": _auto_round,
    "mlx": _mlx,
    "modelopt": _modelopt,
    "modelopt_fp4": _modelopt,
    "mxfp4": _mxfp4,
    "torchao": _torchao,
}
