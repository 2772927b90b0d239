"""NVIDIA ModelOpt: FP8, NVFP4, AWQ and int8.

Sources: nvidia-modelopt 0.47 `torch/export/unified_export_hf.py`, `torch/quantization/qtensor/fp8_tensor.py`,
`nvfp4_tensor.py`, `mxfp8_tensor.py` (`dequantize`). NVFP4's scale is the product of an e4m3 number per 16 elements and
`weight_scale_2`, in fp32. FP8's scale is rounded to the target dtype before it is used.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial

import numpy as np

from ckpt.plan.tensors import Box, Shape
from converters.quantized._weight import (
    ScaleGrid,
    StoredWeights,
    Weight,
    as_rounded,
    by_rows,
    read_e2m1,
    read_e4m3,
    rounded,
)
from converters.quantized.grids import e2m1_rounding, e4m3_rounding
from converters.quantized.module_names import matches_parts_of_names
from converters.quantized.scheme import (
    BYTES,
    E4M3,
    E8M0,
    F32,
    FLOATS,
    GROUPS,
    INT8,
    WEIGHT,
    Dequantizer,
    Method,
    Part,
    Scheme,
    Settings,
    Shapes,
    for_activations,
    optional,
    per_group,
    per_output,
    scalar,
    wider,
    words,
)

NAME = "modelopt"
SCALE, SCALE_2 = "{w}_scale", "{w}_scale_2"


@dataclass(frozen=True, slots=True)
class _ModelOptWeight:
    """Product of a matrix and its scales.

    `is_narrow`: the scales are rounded to the target dtype first, and the product is computed in it.
    """

    grid: ScaleGrid
    is_packed: bool = False
    is_narrow: bool = False

    def __call__(self, stored: StoredWeights, owner: str, parts: Mapping[str, str]) -> Weight:
        tensor = stored.tensors[parts[WEIGHT]]
        shape = (*tensor.shape[:-1], tensor.shape[-1] * (2 if self.is_packed else 1))
        used = {template: parts[template] for template in (WEIGHT, SCALE, SCALE_2) if template in parts}
        if (scale := stored.tensors[parts[SCALE]]).dtype.name == "float8_e8m0fnu":
            raise stored.unsupported(scale.fqn, expected="exponents in uint8", found=scale.dtype)
        if self.grid.columns and shape[-1] % self.grid.columns:
            raise stored.unsupported(owner, expected=f"columns in blocks of {self.grid.columns}", found=list(shape))
        return by_rows(stored, NAME, owner, shape, tuple(used.values()), partial(self._rows, stored, used))

    def _rows(self, stored: StoredWeights, parts: Mapping[str, str], box: Box) -> memoryview:
        values = (read_e2m1 if self.is_packed else read_e4m3)(stored, parts[WEIGHT], box)
        if self.is_packed:
            values += np.float32(0)  # ModelOpt's table has no negative zero
        scales = self.grid.scales(stored, parts[SCALE], box)
        if SCALE_2 in parts:
            scales = scales * ScaleGrid().scales(stored, parts[SCALE_2], box)
        if self.is_narrow:
            scales = as_rounded(scales, stored.dtype)
        self.grid.apply(np.multiply, values, scales)
        return rounded(values, stored.dtype)


def _modelopt(settings: Settings) -> list[Scheme] | None:
    algorithm = settings.get("quant_algo")
    if algorithm == "MIXED_PRECISION":
        return [scheme for schemes in _MODELOPT.values() for scheme in schemes]
    return _MODELOPT.get(str(algorithm).upper())


_INPUT, _SMOOTH = {"{m}input_scale": for_activations(F32, scalar, required=True)}, {"{m}pre_quant_scale": optional()}
_BIAS = {"{m}output_scale": for_activations(), **_SMOOTH}


def _modelopt_fp8(
    scales: Shapes,
    extra: Mapping[str, Part],
    dtypes: tuple[str, ...] = FLOATS,
    dequantize: Dequantizer | None = None,
) -> Scheme:
    parts = {WEIGHT: Part(E4M3), SCALE: Part(dtypes, scales), **extra}
    rounding = e4m3_rounding(WEIGHT, SCALE)
    return Scheme(WEIGHT, parts, tuple, is_stack=False, dequantize=dequantize, rounding=rounding)


_NVFP4 = _ModelOptWeight(ScaleGrid(1, 16), is_packed=True)


def _nvfp4(extra: Mapping[str, Part], dequantize: Dequantizer | None = _NVFP4) -> list[Scheme]:
    """Return schemes for linear layers and for stacked experts. Their matrices may be transposed."""
    scales = {SCALE: Part(E4M3, per_group(1, 16)), SCALE_2: Part(F32, scalar)}
    parts, rounding = {WEIGHT: Part(BYTES), **scales, **extra}, e2m1_rounding(WEIGHT, SCALE)
    linear = Scheme(WEIGHT, parts, wider(2), is_stack=False, dequantize=dequantize, rounding=rounding)
    own = {"{w}_weight_scale": Part(E4M3), "{w}_weight_scale_2": Part(F32)}
    more = {"{w}_input_scale": Part(F32)} if "{m}input_scale" in extra else {}
    return [linear, Scheme(WEIGHT, {WEIGHT: Part(BYTES), **own, **more}, is_stack=True)]


def _taller(packed: Shape) -> Shape:
    return (*packed[:-2], packed[-2] * 2, packed[-1])


def _pages(plain: Shape) -> list[Shape]:
    """Return the shapes for 128 by 128 blocks. ModelOpt also writes them as [rows, 1, columns, 1]."""
    ((*lead, rows, columns),) = per_group(128, 128)(plain)
    return [(*lead, rows, columns), (*lead, rows, 1, columns, 1)]


_AWQ_BYTES = {WEIGHT: Part(BYTES), SCALE: Part((*FLOATS, *E4M3))}
_INT8_ROWS = {WEIGHT: Part(INT8), SCALE: Part(FLOATS, per_output)}
_STACKED_SCALES = {"{w}_weight_scale": Part(F32), "{w}_input_scale": Part(F32)}
_MODELOPT: Mapping[str, list[Scheme]] = {
    "FP8": [
        _modelopt_fp8(scalar, {**_INPUT, **_BIAS}, dequantize=_ModelOptWeight(ScaleGrid(), is_narrow=True)),
        Scheme(WEIGHT, {WEIGHT: Part(E4M3), **_STACKED_SCALES}, tuple, is_stack=True),
    ],
    "FP8_PER_CHANNEL_PER_TOKEN": [_modelopt_fp8(per_output, _BIAS)],
    "FP8_PB_WO": [_modelopt_fp8(_pages, _BIAS)],
    "FP8_PB_REAL": [_modelopt_fp8(_pages, _BIAS)],
    "MXFP8": [_modelopt_fp8(per_group(1, 32), _BIAS, E8M0, _ModelOptWeight(ScaleGrid(1, 32)))],
    "NVFP4": _nvfp4({**_INPUT, **_BIAS}),
    "NVFP4_AWQ": _nvfp4({**_INPUT, **_BIAS}),
    "W4A16_NVFP4": _nvfp4(_BIAS),
    "W4A8_NVFP4_FP8": _nvfp4({**_INPUT, **_BIAS}, None),
    "INT8_SQ": [Scheme(WEIGHT, {WEIGHT: Part(INT8), SCALE: Part(FLOATS, per_output), **_INPUT, **_BIAS}, tuple)],
    "W8A16": [Scheme(WEIGHT, {WEIGHT: Part(INT8), SCALE: Part(FLOATS, per_output), **_BIAS}, tuple)],
    "W4A16_AWQ": [Scheme(WEIGHT, {**_AWQ_BYTES, **_BIAS}, _taller)],
    "W4A8_AWQ": [Scheme(WEIGHT, {**_AWQ_BYTES, SCALE_2: Part(F32), **_INPUT, **_BIAS}, _taller)],
}

METHOD = Method(
    (NAME, "modelopt_fp4"),
    _modelopt,
    own_settings="quantized_layers",
    matches=matches_parts_of_names,
    known=GROUPS | words("quant_algo quantized_layers has_zero_point pre_quant_scale"),
)
