"""compressed-tensors: llm-compressor's formats, by config group.

Sources: compressed-tensors 0.20 `compressors/*/base.py` (`compression_param_names`, `decompress`),
`quantization/lifecycle/forward_helpers.py` (`_dequantize`). Zero points are subtracted and scales multiplied
in the scales' dtype. NVFP4's scales are divided by the global scale first, in fp32, and 4-bit floats become bfloat16.

`--quantize` follows `quantization/utils/helpers.py` (`calculate_qparams`, `generate_gparam`), `mxfp_utils.py`
(`generate_mx_scales`) and `forward_helpers.py` (`_quantize`), in the weight's dtype. MXFP4's exponent: the maximum is
rounded up to a power of two from 1.75 times the next lower one, and divided by 4. Numbers above 6 are clipped.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ckpt.move import groups
from ckpt.plan.dtypes import BFLOAT16, BY_NAME, FLOAT16, FLOAT32, DType
from ckpt.plan.tensors import Box, Shape
from converters.quantized._packed_weight import (
    PackedBlock,
    PackedPart,
    PackedParts,
    PlainWeight,
    largest_in,
    largest_in_groups,
    packed_by_rows,
)
from converters.quantized._weight import (
    ScaleGrid,
    StoredWeights,
    Weight,
    as_bits,
    as_rounded,
    by_rows,
    read_e2m1,
    read_e4m3,
    rounded,
    unpacked,
)
from converters.quantized.floats import (
    E2M1_MAX,
    E4M3_MAX,
    E8M0_BIAS,
    E8M0_NAN,
    e4m3_bytes,
    e4m3_values,
    e8m0_values,
    packed_pairs,
    unsigned_zero_codes,
)
from converters.quantized.grids import e2m1_rounding, e4m3_rounding
from converters.quantized.module_names import matches_by_name
from converters.quantized.scheme import (
    BYTES,
    E4M3,
    E8M0,
    EPSILON,
    F8,
    F32,
    FLOATS,
    GROUPS,
    INT8,
    INT32,
    INT64,
    INTEGERS,
    WEIGHT,
    Dequantizer,
    Method,
    Part,
    Quantizer,
    Rounding,
    Scheme,
    Settings,
    ShapeList,
    Shapes,
    UnknownValues,
    for_activations,
    number,
    optional,
    per_group,
    per_output,
    scalar,
    wider,
    words,
)

NAME = "compressed-tensors"
PACKED, SCALE, GLOBAL = "{w}_packed", "{w}_scale", "{w}_global_scale"
RECORDED, ZERO = "{w}_shape", "{w}_zero_point"

_USED = (SCALE, GLOBAL, RECORDED, ZERO)
_WORD = 8  # rows that share a word of packed zero points


@dataclass(frozen=True, slots=True)
class _CompressedWeight:
    """Product of a matrix and its scales, after its zero points.

    `bits` is a packed integer's size, `dtype` the product's, by default the scales'.
    """

    packed: str
    read: Callable[[StoredWeights, str, Box], NDArray]
    grid: ScaleGrid
    bits: int = 8
    dtype: DType | None = None
    is_symmetric: bool = True

    def __call__(self, stored: StoredWeights, owner: str, parts: Mapping[str, str]) -> Weight:
        shape, packed = self._shape(stored, parts), stored.tensors[parts[self.packed]]
        if self.read is read_e4m3 and packed.dtype.name not in E4M3:
            raise stored.unsupported(packed.fqn, expected=E4M3[0], found=packed.dtype)
        scale = stored.tensors[parts[SCALE]]
        if self.grid.columns and self.grid.rows == 1 and shape[-1] % self.grid.columns:
            raise stored.unsupported(parts[SCALE], expected="groups that divide the rows", found=list(shape))
        if self.grid == ScaleGrid(1) and len(scale.shape) != 2:
            raise stored.unsupported(parts[SCALE], expected=[shape[0], 1], found=list(scale.shape))
        if self.dtype and ScaleGrid(1, 32) == self.grid and scale.dtype.name != "uint8":
            raise stored.unsupported(scale.fqn, expected="exponents in uint8", found=scale.dtype)
        if ZERO in parts and (stored.tensors[parts[ZERO]].dtype.name not in self._zero_dtypes):
            raise stored.unsupported(parts[ZERO], found=f"zero points in {stored.tensors[parts[ZERO]].dtype}")
        if GLOBAL in parts:
            factor = stored.tensors[parts[GLOBAL]]
            if factor.shape != (1,):  # without dims torch computes in another precision
                raise stored.unsupported(parts[GLOBAL], expected=[1], found=list(factor.shape))
            if not stored.scales(parts[GLOBAL]).all():
                raise stored.corrupt(parts[GLOBAL], "a positive number", 0.0)
        used = {template: parts[template] for template in (self.packed, *_USED) if template in parts}
        compute = partial(self._rows, stored, used)
        return by_rows(
            stored, NAME, owner, shape, tuple(used.values()), compute, step=math.lcm(self.grid.rows or 1, _WORD)
        )

    @property
    def _zero_dtypes(self) -> tuple[str, ...]:
        if self.read is _read_int8:
            return INT8
        return () if self.is_symmetric else INT32

    def _shape(self, stored: StoredWeights, parts: Mapping[str, str]) -> Shape:
        packed = stored.tensors[parts[self.packed]]
        if len(packed.shape) != 2:
            raise stored.unsupported(packed.fqn, expected="a matrix", found=list(packed.shape))
        rows, columns = packed.shape
        if RECORDED in parts:
            recorded = stored.read(parts[RECORDED]).view(f"i{stored.tensors[parts[RECORDED]].dtype.itemsize}").tolist()
            if len(recorded) != 2 or recorded[0] != rows or -(-recorded[1] * self.bits // 32) != columns:
                expected = f"the shape of packed values with shape {list(packed.shape)}"
                raise stored.corrupt(parts[RECORDED], expected, recorded)
            return rows, recorded[1]
        return rows, columns * (2 if self.packed == PACKED else 1)

    def _rows(self, stored: StoredWeights, parts: Mapping[str, str], box: Box) -> memoryview:
        values = self.read(stored, parts[self.packed], box)
        if ZERO in parts:
            zeros = self._zeros(stored, parts[ZERO], box)
            self.grid.apply(np.subtract, values, zeros)
        scales = self.grid.scales(stored, parts[SCALE], box)
        if GLOBAL in parts:
            scales = scales / stored.scales(parts[GLOBAL])
        self.grid.apply(np.multiply, values, scales)
        return rounded(values, self.dtype or stored.tensors[parts[SCALE]].dtype, stored.dtype)

    def _zeros(self, stored: StoredWeights, fqn: str, box: Box) -> NDArray:
        """Return zero points. If packed, rows share words."""
        if self.packed == WEIGHT:
            return self.grid.bits(stored, fqn, box).view(np.int8).astype(np.float32)
        (first, _), (num_rows, _), per = box.offsets, box.sizes, 32 // self.bits
        words = Box((first // per, 0), (-(-num_rows // per), stored.tensors[fqn].shape[1]))
        return unpacked(stored.read(fqn, words).T, self.bits).T[:num_rows] - np.float32(1 << self.bits - 1)


def _read_int8(stored: StoredWeights, fqn: str, box: Box) -> NDArray:
    return stored.read(fqn, box).view(np.int8).astype(np.float32)


def _read_packed(bits: int, stored: StoredWeights, fqn: str, box: Box) -> NDArray:
    """Return packed integers, stored with half of their range added."""
    words = Box(box.offsets, (box.sizes[0], stored.tensors[fqn].shape[1]))
    values = unpacked(stored.read(fqn, words), bits)[:, : box.sizes[1]].astype(np.float32)
    values -= np.float32(1 << bits - 1)
    return values


@cache
def _packed_reader(bits: int) -> Callable[[StoredWeights, str, Box], NDArray]:
    return partial(_read_packed, bits)


def _compressed_tensors(settings: Settings) -> list[Scheme] | None:
    """Return one scheme per config group."""
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
    scales, bits = _strategy_shapes(weights), weights.get("num_bits")
    extra = _activation_parts(weights, inputs, format, scales)
    if format == "dense":
        return []
    if format in ("float-quantized", "int-quantized", "naive-quantized"):
        is_float = weights.get("type") == "float"
        found = _naive(F8, scales, extra) if is_float else _integers(scales, extra)
    elif format == "pack-quantized":
        found = _packed_integers(bits, scales, extra) if type(bits) is int and 0 < bits <= 32 else []
    elif format == "nvfp4-pack-quantized":
        parts = {SCALE: Part(E4M3, per_group(1, 16)), GLOBAL: Part(F32, scalar)}
        found = [_packed_bytes(2, {**parts, **extra})]
    elif format in ("mxfp4-pack-quantized", "mxfp6-pack-quantized"):
        scale = {SCALE: Part(E8M0, per_group(1, 32))}
        found = [_packed_bytes(2 if "mxfp4" in format else None, {**scale, **extra})]
    elif format == "mxfp8-quantized":
        found = [Scheme(WEIGHT, {WEIGHT: Part(F8), SCALE: Part(E8M0, per_group(1, 32)), **extra}, tuple)]
    else:
        return None
    dequantize, rounding = _dequantizer(format, weights), _rounding(format, weights)
    return [replace(scheme, dequantize=dequantize, rounding=rounding) for scheme in found] or None


def _rounding(format: str, weights: Settings) -> Rounding | None:
    """Return the rounding to the nearest value. Calibrated weights (GPTQ, SmoothQuant) are not recorded."""
    bits, is_symmetric = number(weights, "num_bits") or 8, weights.get("symmetric", True) is True
    if format == "pack-quantized":
        zero, repeated = 1 << bits - 1, 1 if bits == 8 else 0x11
        unit = ((PACKED, (zero + 1) * repeated), (ZERO, zero * repeated))
        return Rounding(SCALE, unit, span=zero if is_symmetric else 1 << bits)
    if format.startswith(("nvfp4", "mxfp4")):
        # scale over global scale is rounded to bf16
        return e2m1_rounding(PACKED, SCALE, 2.0**-7 if format.startswith("nvfp4") else EPSILON)
    if weights.get("type") == "float":
        return e4m3_rounding(WEIGHT, SCALE)
    return Rounding(SCALE, ((WEIGHT, 0x01), (ZERO, 0)), span=128 if is_symmetric else 256)


def _dequantizer(format: str, weights: Settings) -> Dequantizer:
    """Return UnknownValues if not compared with the library."""
    grid, bits, is_float = _grid(weights), weights.get("num_bits"), weights.get("type") == "float"
    is_symmetric = weights.get("symmetric", True) is True
    if weights.get("actorder") in ("group", "dynamic"):
        return UnknownValues(f"actorder {weights['actorder']!r}: columns in another order")
    if format == "nvfp4-pack-quantized" and is_symmetric:
        return _CompressedWeight(PACKED, read_e2m1, ScaleGrid(1, 16), dtype=BFLOAT16)
    if format == "mxfp4-pack-quantized" and is_symmetric:
        return _CompressedWeight(PACKED, read_e2m1, ScaleGrid(1, 32), dtype=BFLOAT16)
    if format == "mxfp8-quantized" and is_symmetric:
        return _CompressedWeight(WEIGHT, read_e4m3, ScaleGrid(1, 32), dtype=BFLOAT16)
    if format == "pack-quantized" and grid and bits in (4, 8) and (is_symmetric or grid.rows == 1):
        return _CompressedWeight(PACKED, _packed_reader(bits), grid, bits, is_symmetric=is_symmetric)
    if format in ("float-quantized", "naive-quantized") and grid and is_float and bits == 8 and is_symmetric:
        return _CompressedWeight(WEIGHT, read_e4m3, grid)
    if format in ("int-quantized", "naive-quantized") and grid and not is_float and bits == 8:
        return _CompressedWeight(WEIGHT, _read_int8, grid)
    words = (str(weights.get(key)) for key in ("num_bits", "type", "strategy"))
    return UnknownValues(f"{format} with {' '.join(words)}, {'' if is_symmetric else 'not '}symmetric")


def _grid(weights: Settings) -> ScaleGrid | None:
    strategy, size, block = (weights.get(key) for key in ("strategy", "group_size", "block_structure"))
    if strategy in ("group", "tensor_group") and type(size) is int and size > 0:
        return ScaleGrid(1, size)
    if strategy == "block" and isinstance(block, list) and all(type(n) is int and n > 0 for n in block):
        return ScaleGrid(*block)
    return {"tensor": ScaleGrid(), "channel": ScaleGrid(1)}.get(str(strategy))


_ARGS = ("weights", "input_activations")


def _activation_parts(weights: Settings, inputs: Settings, format: str, scales: ShapeList | None) -> dict[str, Part]:
    """Return the parts for asymmetric weights and for activations."""
    is_static, is_local = bool(inputs) and inputs.get("dynamic") is False, inputs.get("dynamic") == "local"
    is_global = format.startswith("nvfp4")
    zeros = Part((*INT8, *F8), scales)
    if format == "pack-quantized":
        per = 32 // max(1, number(weights, "num_bits") or 32)
        zeros = Part(INT32, scales and (lambda plain: [(-(-s[0] // per), *s[1:]) for s in scales(plain) if s]))
    return {
        "{w}_g_idx": optional(INT32, lambda plain: [(plain[-1],)]),
        ZERO: replace(zeros, required=weights.get("symmetric", True) is False),
        "{m}input_global_scale": for_activations(F32, scalar, required=is_global and (is_static or is_local)),
        "{m}input_scale": for_activations(FLOATS, None, required=is_static and not is_global),
        "{m}input_zero_point": for_activations(INTEGERS),
        "{m}output_scale": for_activations(),
        "{m}output_zero_point": for_activations(INTEGERS),
    }


def _strategy_shapes(weights: Settings) -> ShapeList | None:
    strategy, size, block = (weights.get(key) for key in ("strategy", "group_size", "block_structure"))
    if strategy == "tensor":
        return scalar
    if strategy == "channel":
        return per_output
    if strategy in ("group", "tensor_group") and type(size) is int and size > 0:
        return per_group(1, size)
    if strategy == "block" and isinstance(block, list) and all(type(n) is int and n > 0 for n in block):
        return per_group(block[0], block[1])
    return None


def _naive(dtypes: tuple[str, ...], scales: Shapes | None, extra: Mapping[str, Part]) -> list[Scheme]:
    parts = {WEIGHT: Part(dtypes), SCALE: Part(FLOATS, scales), **extra}
    return [Scheme(WEIGHT, parts, tuple, joins_experts=dtypes == F8)]


def _integers(scales: Shapes | None, extra: Mapping[str, Part]) -> list[Scheme]:
    return _naive(INT8, scales, extra)


def _packed_integers(bits: int, scales: Shapes | None, extra: Mapping[str, Part]) -> list[Scheme]:
    per = 32 // bits
    parts = {
        PACKED: Part(INT32),
        SCALE: Part(FLOATS, scales),
        RECORDED: Part((*INT64, *INT32), lambda _: [(2,)]),
    }
    return [Scheme(PACKED, {**parts, **extra}, wider(per))]


def _packed_bytes(per_byte: int | None, parts: Mapping[str, Part]) -> Scheme:
    """Store `per_byte` values in a byte. None means four 6-bit values in three bytes."""

    def plain(packed: Shape) -> Shape:
        return (*packed[:-1], packed[-1] * per_byte if per_byte else packed[-1] * 4 // 3)

    return Scheme(PACKED, {PACKED: Part(BYTES), **parts}, plain)


# -- quantizing -----------------------------------------------------------------------------------------------------


def _packed_channels(
    dtype: DType, largest: float, encode: Callable[[NDArray], NDArray], weight: PlainWeight
) -> list[PackedParts]:
    """Scale each row: its maximum becomes `largest`."""
    parts = {WEIGHT: PackedPart(dtype), SCALE: PackedPart(weight.choice.dtype, 1, None)}
    return [packed_by_rows(weight, parts, partial(_channel_rows, largest, encode))]


def _channel_rows(
    largest: float, encode: Callable[[NDArray], NDArray], weight: PlainWeight, values: NDArray
) -> list[NDArray]:
    dtype = weight.choice.dtype
    scales = as_rounded(largest_in(values, axis=1) / np.float32(largest), dtype)[:, None]
    scales[scales == 0] = _EPSILON[dtype]
    return [encode(as_rounded(values / scales, dtype)), as_bits(scales, dtype)]


def _as_e4m3(values: NDArray) -> NDArray:
    return e4m3_bytes(values)


def _as_int8(values: NDArray) -> NDArray:
    found: NDArray = np.rint(np.clip(values, -128, 127)).astype(np.int8)
    return found


def _packed_mxfp4(weight: PlainWeight) -> list[PackedParts]:
    weight.check_dtype(
        "mxfp4", BFLOAT16, FLOAT32
    )  # float16 can't hold the scales: compressed-tensors loses small groups
    parts = {PACKED: PackedPart(_UINT8, 1, 2), SCALE: PackedPart(_UINT8, 1, 32)}
    return [packed_by_rows(weight, parts, _mxfp4_rows, _mxfp4_bits)]


def _mxfp4_rows(weight: PlainWeight, values: NDArray) -> list[NDArray]:
    groups = values.reshape(len(values), -1, 32)
    # A quarter of the mantissa's range below the next power of two is rounded up to it.
    largest = largest_in_groups(values, 32)
    powers = (largest.view(np.uint32) + np.uint32(1 << 21)) >> np.uint32(23)
    exponents = np.maximum(powers, 2) - np.uint32(2)
    if (powers == E8M0_NAN).any():
        raise weight.refused("a group's maximum is too large for MXFP4", largest.max())
    scaled = groups * (np.float32(1) / e8m0_values()[exponents])[..., None]
    if np.abs(scaled).min(initial=1, where=scaled != 0) < _SMALLEST:  # larger products are exact
        scaled = as_rounded(scaled, weight.choice.dtype)
    return [_packed_e2m1(scaled.reshape(values.shape)), exponents.astype(np.uint8)]


#: In steps of bfloat16 above a quarter of the scale: the first number of each e2m1 value after zero.
_FIRST = (1, 192, 289, 352, 417, 480, 545)


def _mxfp4_bits(bits: NDArray) -> list[NDArray] | None:
    """Compare bfloat16 numbers with each value's first, with the bits of `_mxfp4_rows`."""
    rows = groups.in_rows(bits)
    sizes = rows & np.uint16(0x7FFF)
    largest = groups.largest_in_rows(sizes)
    powers = (largest + np.uint16(1 << 5)) >> np.uint16(7)
    # A step is constant for normal numbers. With a scale of 2 or more, the smallest numbers lose their signs.
    if powers.max() > E8M0_BIAS + 2 or largest[powers < 5].any():
        return None
    quarters = groups.for_rows((np.maximum(powers, np.uint16(5)) - np.uint16(4)) << np.uint16(7))
    codes = np.greater(rows, np.uint16(0x8000)).view(np.uint8)
    for _ in range(3):
        codes += codes
    reached = np.empty(rows.shape, np.bool_)
    for first in _FIRST:
        np.greater_equal(sizes, quarters + np.uint16(first), out=reached)
        codes += reached.view(np.uint8)
    packed = np.empty((len(largest), 16), np.uint8)
    groups.in_groups(packed_pairs(codes), packed)
    exponents = (np.maximum(powers, np.uint16(2)) - np.uint16(2)).astype(np.uint8)
    return [packed, exponents]


def _packed_e2m1(values: NDArray) -> NDArray:
    """Pack two e2m1 numbers per byte. A zero has no sign, but a number rounded to zero has."""
    return packed_pairs(unsigned_zero_codes(values))


def _packed_nvfp4(weight: PlainWeight) -> list[PackedParts]:
    parts = {PACKED: PackedPart(_UINT8, 1, 2), SCALE: PackedPart(BY_NAME["float8_e4m3fn"], 1, 16)}
    factor = PackedBlock((Box((0,), (1,)),), lambda: rounded(_global_scale(weight), FLOAT32))
    return [packed_by_rows(weight, parts, _nvfp4_rows), PackedParts({GLOBAL: (FLOAT32, (1,))}, (factor,))]


def _global_scale(weight: PlainWeight) -> NDArray:
    """Make the largest scale the largest e4m3 number, in the weight's dtype.

    A model to imitate keeps its own if no scale overflows.
    """
    dtype, largest = weight.choice.dtype, weight.fused.largest().reshape(1)
    if weight.stored is not None:
        stored = weight.stored.scales(GLOBAL)
        if (stored * as_rounded(largest / np.float32(E2M1_MAX), dtype) < _E4M3_LIMIT).all():
            return stored
    with np.errstate(over="ignore"):  # torch divides in two steps
        inverse = as_rounded(np.float32(1) / np.maximum(largest, _TINY[dtype]), dtype)
        factor = as_rounded(inverse * np.float32(E4M3_MAX * E2M1_MAX), dtype)
    return np.where(np.isfinite(factor), factor, np.float32(1))


def _nvfp4_rows(weight: PlainWeight, values: NDArray) -> list[NDArray]:
    factor, groups = _global_scale(weight), values.reshape(len(values), -1, 16)
    local = as_rounded(largest_in_groups(values, 16) / np.float32(E2M1_MAX), weight.choice.dtype)
    codes = _as_e4m3(factor * local)
    codes[codes == 0] = _EIGHTH
    scaled = groups / (e4m3_values()[codes] / factor)[..., None]
    return [_packed_e2m1(scaled.reshape(values.shape)), codes]


_UINT8 = BY_NAME["uint8"]
_SMALLEST = np.float32(2**-126)  # normal number in bfloat16 and fp32
_E4M3_LIMIT = 464  # smaller numbers are rounded to e4m3's largest, 448, or below
_EIGHTH = 0x20  # 1/8 in e4m3, if a group's scale would be zero
_EPSILON = {BFLOAT16: 2**-7, FLOAT16: 2**-10, FLOAT32: 2**-23}
_TINY = {BFLOAT16: np.float32(2**-126), FLOAT16: np.float32(2**-14), FLOAT32: np.float32(2**-126)}
_WEIGHTS: Settings = {"dynamic": False, "symmetric": True}
_TOKENS: Settings = {"dynamic": True, "num_bits": 8, "strategy": "token", "symmetric": True}


def _entry(format: str, weights: Settings, inputs: Settings | None, plain: Sequence[str]) -> dict[str, Any]:
    group = {
        "format": format,
        "input_activations": inputs and {**_TOKENS, **inputs},
        "targets": ["Linear"],
        "weights": {**_WEIGHTS, **weights},
    }
    return {
        "config_groups": {"group_0": group},
        "format": format,
        "ignore": list(plain),
        "quant_method": NAME,
        "quantization_status": "compressed",
    }


def _four_bits(size: int, strategy: str, dtype: str) -> Settings:
    entries = {"group_size": size, "num_bits": 4, "scale_dtype": dtype, "strategy": strategy}
    return {**entries, "type": "float", "zp_dtype": dtype}


_FLOAT8, _BYTE8 = ({"num_bits": 8, "type": name} for name in ("float", "int"))
_QUANTIZERS = {
    "fp8-dynamic": Quantizer(
        partial(_packed_channels, BY_NAME["float8_e4m3fn"], E4M3_MAX, _as_e4m3),
        partial(_entry, "float-quantized", {**_FLOAT8, "strategy": "channel"}, {"type": "float"}),
        "compressed-tensors 0.20: a row's maximum / 448, in the weight's dtype; ties to even",
    ),
    "int8": Quantizer(
        partial(_packed_channels, BY_NAME["int8"], 127.5, _as_int8),
        partial(_entry, "int-quantized", {**_BYTE8, "strategy": "channel"}, {"type": "int"}),
        "compressed-tensors 0.20: a row's maximum / 127.5, in the weight's dtype; ties to even",
    ),
    "mxfp4": Quantizer(
        _packed_mxfp4,
        partial(_entry, "mxfp4-pack-quantized", _four_bits(32, "group", "torch.uint8"), None),
        "compressed-tensors 0.20: the maximum is rounded up to 2^n from 1.75 * 2^(n-1), the scale is 2^(n-2), numbers "
        "above 6 are clipped; ties to even",
        blocks=(1, 32),
    ),
    "nvfp4a16": Quantizer(
        _packed_nvfp4,
        partial(_entry, "nvfp4-pack-quantized", _four_bits(16, "tensor_group", "torch.float8_e4m3fn"), None),
        "compressed-tensors 0.20: the global scale is 2688 / maximum, a group's scale is rounded to e4m3; ties to even",
        blocks=(1, 16),
    ),
}

METHOD = Method(
    (NAME,),
    _compressed_tensors,
    lambda: [*_naive(F8, None, {}), *_integers(None, {})],
    quantizers=_QUANTIZERS,
    packages=(NAME,),
    matches=matches_by_name,
    known=GROUPS | words("version quantization_status global_compression_ratio run_compressed use_optimized_inference"),
)
