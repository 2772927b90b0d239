"""FP8 with a scale per block, for linear layers in DeepSeek-V3 and V4 and transformers' fine-grained FP8.

Sources: DeepSeek-V3 `inference/kernel.py` (`weight_dequant`, called by its `fp8_cast_bf16.py`), DeepSeek-V4
`inference/model.py`, transformers 5.23 `integrations/finegrained_fp8.py` (`Fp8Dequantize`). `NAME` is float8_e4m3fn
[..., out, in]. `NAME_scale_inv` [..., out blocks, in blocks] is a factor, despite its name, for every block of
`weight_block_size` elements; a row's or column's last block may be shorter. It may also be one factor for the whole
tensor. DeepSeek-V4 names it `scale`, a power of two; its experts are e2m1 with one for every 32 elements of a row. Both
are widened to fp32 and multiplied, and the product is rounded once.

`--quantize fp8-block` writes DeepSeek-V3's layout, with the bits of `Fp8Quantize`: a block's numbers are multiplied by
448 times the reciprocal of its maximum, in fp32. A zero block has scale 1. A matrix with partial blocks stays plain.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ckpt.base.errors import UsageError
from ckpt.move.casts import as_fp32
from ckpt.plan.dtypes import FLOAT32
from ckpt.plan.tensors import Box
from converters.quantized._packed_weight import STEP, PackedPart, PackedParts, PlainWeight, packed_by_rows
from converters.quantized._weight import (
    E4M3,
    ScaleGrid,
    StoredWeights,
    Weight,
    by_rows,
    read_e2m1,
    read_e4m3,
    rounded,
)
from converters.quantized.blocks import spans
from converters.quantized.floats import E4M3_MAX, e4m3_bytes, e4m3_sizes, sign_codes
from converters.quantized.grids import e2m1_rounding, e4m3_rounding
from converters.quantized.scheme import (
    E8M0,
    F8,
    FLOATS,
    FOUR_BITS,
    WEIGHT,
    Method,
    Part,
    Quantizer,
    Scheme,
    Settings,
    for_activations,
    per_group,
    per_output,
    scalar,
    wider,
    words,
)

NAME = "fp8"
SCALE = "{w}_scale_inv"
_GROUP = 32  # elements of an e2m1 row with one scale
_SIZE = 128  # rows and columns of a written block
_EXPERTS = re.compile(r".*\.experts(?=\.\d+\.)")


@dataclass(frozen=True, slots=True)
class _Fp8Weight:
    """Product of a matrix and its scales. `grid` is None if the config has no block size.

    `is_packed` is True for e2m1, two values per byte.
    """

    scale: str
    grid: ScaleGrid | None
    is_packed: bool = False

    def __call__(self, stored: StoredWeights, owner: str, parts: Mapping[str, str]) -> Weight:
        name, scale = parts[WEIGHT], parts[self.scale]
        tensor = stored.tensors[name]
        if not self.is_packed and tensor.dtype != E4M3:
            raise stored.unsupported(name, expected=E4M3, found=tensor.dtype)
        grid = ScaleGrid() if stored.tensors[scale].numel == 1 else self.grid
        if grid is None:
            raise UsageError(
                "the config does not record the block size",
                path=stored.checkpoint.path,
                fqn=scale,
                expected="weight_block_size, two sizes, in quantization_config",
            )
        shape = (*tensor.shape[:-1], tensor.shape[-1] * (2 if self.is_packed else 1))
        compute = partial(_rows, stored, name, scale, grid, self.is_packed)
        return by_rows(stored, NAME, owner, shape, (name, scale), compute, step=grid.rows or 1)


def _rows(stored: StoredWeights, name: str, scale: str, grid: ScaleGrid, is_packed: bool, box: Box) -> memoryview:
    values = read_e2m1(stored, name, box) if is_packed else read_e4m3(stored, name, box)
    grid.apply(np.multiply, values, grid.scales(stored, scale, box))
    return rounded(values, stored.dtype)


def _block_size(settings: Settings) -> tuple[int, int] | None:
    given = settings.get("weight_block_size")
    if isinstance(given, (list, tuple)) and len(given) == 2 and all(type(size) is int and size > 0 for size in given):
        return given[0], given[1]
    return None


def _fp8(settings: Settings) -> list[Scheme]:
    """Return schemes: DeepSeek-V3's `weight_scale_inv`, or DeepSeek-V4's `scale`."""
    size = _block_size(settings)
    grid = ScaleGrid(*size) if size else ScaleGrid() if settings else None
    scales = per_group(*size) if size else scalar if settings else None
    plain = Scheme(WEIGHT, {WEIGHT: Part(F8), SCALE: Part((*FLOATS, *E8M0), scales)}, tuple, joins_experts=True)
    plain = replace(plain, dequantize=_Fp8Weight(SCALE, grid), rounding=e4m3_rounding(WEIGHT, SCALE))
    activations = for_activations(FLOATS, scalar, required=settings.get("activation_scheme") == "static")
    names = ("activation_scale", "input_scale")
    kinds = (("{m}", False, activations), ("{w}_", True, replace(activations, shapes=None)))
    found = [
        replace(plain, parts={**plain.parts, of + name: part}, is_stack=is_stack)
        for name in names
        for of, is_stack, part in kinds
    ]
    if size is None:  # AutoFP8, read by vLLM
        parts = {WEIGHT: Part(F8), "{w}_scale": Part(FLOATS, lambda plain: scalar(plain) + per_output(plain))}
        found.append(Scheme(WEIGHT, {**parts, "{m}input_scale": activations}, tuple))
    if settings.get("expert_dtype") or settings.get("scale_fmt") or not settings or size:
        scale = "{m}scale"
        blocks = Part((*FLOATS, *E8M0), per_group(*size) if size else None)
        matrix = replace(plain, parts={WEIGHT: Part(F8), scale: blocks}, dequantize=_Fp8Weight(scale, grid))
        matrix = replace(matrix, rounding=e4m3_rounding(WEIGHT, scale))
        parts = {WEIGHT: Part(FOUR_BITS), scale: Part(E8M0, per_group(1, _GROUP))}
        experts = Scheme(WEIGHT, parts, wider(2), dequantize=_Fp8Weight(scale, ScaleGrid(1, _GROUP), is_packed=True))
        experts = replace(experts, rounding=e2m1_rounding(WEIGHT, scale))
        found += [matrix, experts]
    return found


def _packed_blocks(weight: PlainWeight) -> list[PackedParts]:
    parts = {WEIGHT: PackedPart(E4M3), SCALE: PackedPart(FLOAT32, _SIZE, _SIZE)}
    return [packed_by_rows(weight, parts, _quantized_rows, _quantized_bits)]


def _block_settings(plain: Sequence[str]) -> dict[str, Any]:
    experts = {match[0] for name in plain if (match := _EXPERTS.match(name))}  # one module in transformers
    return {
        "activation_scheme": "dynamic",
        "fmt": "e4m3",
        "modules_to_not_convert": sorted({*plain, *experts}),
        "quant_method": NAME,
        "weight_block_size": [_SIZE, _SIZE],
    }


def _quantized_rows(weight: PlainWeight, values: NDArray) -> list[NDArray]:
    codes, scales = np.empty(values.shape, np.uint8), []
    for start in range(0, len(values), _SIZE):
        rows = values[start : start + _SIZE]
        columns = np.maximum(rows.max(axis=0), -rows.min(axis=0))
        largest = np.maximum.reduceat(columns, np.arange(0, len(columns), _SIZE))
        factors = _scale_factors(largest)
        if not np.isfinite(factors).all():
            raise weight.refused("a block's numbers are too small for a scale", f"maximum {largest.min()} in a block")
        for first, last in spans(len(factors), STEP // _SIZE // _SIZE):
            place = (slice(start, start + _SIZE), slice(first * _SIZE, min(last * _SIZE, len(columns))))
            scaled = values[place] * np.repeat(factors[first:last], _SIZE)[: values[place].shape[1]]
            codes[place] = e4m3_bytes(scaled)
        scales.append(np.float32(1) / factors)
    return [codes, np.stack(scales)]


def _scale_factors(largest: NDArray) -> NDArray:
    with np.errstate(over="ignore", divide="ignore"):  # torch divides in these two steps
        factors: NDArray = np.float32(1) / largest * np.float32(E4M3_MAX)
    factors[largest == 0] = 1
    return factors


_INFINITY = 0x7F80  # in bfloat16


def _quantized_bits(bits: NDArray) -> list[NDArray] | None:
    """Compute whole blocks of bfloat16 numbers in fewer passes, with the bits of `_quantized_rows`.

    Each call of numpy takes all blocks: after a short one, threads wait for the interpreter's lock.
    """
    num_columns = bits.shape[1]
    if len(bits) % _SIZE or num_columns % _SIZE:
        return None
    sizes = bits.reshape(-1, _SIZE, num_columns) & np.uint16(0x7FFF)
    largest = np.maximum.reduceat(sizes.max(axis=1), np.arange(0, num_columns, _SIZE), axis=1)
    factors = _scale_factors(as_fp32(largest))
    if (largest >= _INFINITY).any() or not np.isfinite(factors).all():
        return None
    values = as_fp32(sizes)
    rows = values.reshape(len(values), -1, 8 * num_columns)  # numpy is faster with longer rows
    rows *= np.tile(np.repeat(factors, _SIZE, axis=1), 8)[:, None]
    codes = e4m3_sizes(values).reshape(bits.shape)
    codes |= sign_codes(bits > np.uint16(0x7FFF), 0x80)
    return [codes, np.float32(1) / factors]


_RULE = "transformers 5.23 Fp8Quantize: a block's numbers times 448 / maximum, in fp32; ties to even"
_QUANTIZER = Quantizer(_packed_blocks, _block_settings, _RULE, blocks=(_SIZE, _SIZE))
METHOD = Method(
    (NAME,),
    _fp8,
    unrecorded=lambda: _fp8({}),
    quantizers={"fp8-block": _QUANTIZER},
    known=words("weight_block_size activation_scheme fmt scale_fmt expert_dtype modules_to_convert"),
)
