"""torchao's safetensors: the tensors of a subclass, described in the file's header.

Sources: torchao 0.18 `prototype/safetensors`, `quantization/quant_primitives.py` (`_dequantize_affine`,
`_dequantize_affine_float8`). The header has a weight's class, block size and plain dtype as JSON, by the weight's name.
Float8Tensor, Int8Tensor and IntxUnpackedToInt8Tensor are dequantized: values less zero points times scales, in fp32,
rounded to the recorded dtype.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from operator import floordiv, mod
from typing import Any

import numpy as np

from ckpt.plan.dtypes import BY_NAME, CASTABLE, DType
from ckpt.plan.tensors import Box, Shape
from converters.quantized._weight import E4M3, ScaleGrid, StoredWeights, Weight, by_rows, read_e4m3, rounded
from converters.quantized.grids import e4m3_rounding
from converters.quantized.scheme import (
    BYTES,
    E8M0,
    F8,
    FLOATS,
    FOUR_BITS,
    INT8,
    INT32,
    INTEGERS,
    Method,
    Part,
    Rounding,
    Scheme,
    Settings,
    any_blocks,
    for_activations,
    optional,
    wider,
    words,
)

NAME = "torchao"
DATA, SCALE, ZERO = "{m}_weight_qdata", "{m}_weight_scale", "{m}_weight_zero_point"

_PLAIN_DTYPES = {dtype.name: dtype for dtype in CASTABLE.values()}
#: Dtype of the values, by class.
_CLASSES = {"Float8Tensor": E4M3, "Int8Tensor": BY_NAME["int8"], "IntxUnpackedToInt8Tensor": BY_NAME["int8"]}


@dataclass(frozen=True, slots=True)
class _RecordedWeight:
    def __call__(self, stored: StoredWeights, owner: str, parts: Mapping[str, str]) -> Weight:
        try:
            kind, block, dtype, names = _record(stored.header(parts[DATA]), owner)
        except ValueError as error:
            expected = "a class, block size and dtype in the header of the weight's file"
            raise stored.unsupported(owner, expected=expected, found=error.args[0] or "none") from None
        data = stored.tensors[parts[DATA]]
        if kind not in _CLASSES:
            raise stored.unsupported(owner, expected=" or ".join(_CLASSES), found=kind)
        if data.dtype != _CLASSES[kind]:
            raise stored.unsupported(data.fqn, expected=_CLASSES[kind], found=data.dtype)
        if {f"{{m}}_weight_{name}" for name in names} != parts.keys():
            raise stored.corrupt(owner, f"the recorded parts {', '.join(names)}", ", ".join(sorted(parts.values())))
        grid = _scale_grid(stored, owner, data.shape, block)
        if ZERO in parts and (data.dtype == E4M3 or stored.tensors[parts[ZERO]].dtype != data.dtype):
            raise stored.unsupported(parts[ZERO], found=f"zero points in {stored.tensors[parts[ZERO]].dtype}")
        used = {template: parts[template] for template in (DATA, SCALE, ZERO) if template in parts}
        compute = partial(_affine_rows, stored, used, grid, dtype)
        return by_rows(stored, NAME, owner, data.shape, tuple(used.values()), compute, step=grid.rows or 1)


def _record(metadata: Mapping[str, str], owner: str) -> tuple[str, Shape, DType, tuple[str, ...]]:
    """Return class, block size, plain dtype and names of tensors. Raise ValueError with the class if one is unknown."""
    found: Any = None
    try:
        found = json.loads(metadata[owner])
        block, names = tuple(found["_data"]["block_size"]), tuple(found["_tensor_data_names"])
        dtype = _PLAIN_DTYPES[found["_data"]["dtype"]["_data"]]
        if all(type(size) is int and size > 0 for size in block) and all(isinstance(name, str) for name in names):
            return str(found["_type"]), block, dtype, names
    except (KeyError, TypeError, ValueError, RecursionError):
        pass
    raise ValueError(found.get("_type") if isinstance(found, dict) else None)


def _recorded_shapes(metadata: Mapping[str, str], owner: str, shapes: Mapping[str, Shape]) -> dict[str, Shape]:
    try:
        kind, block, _, _ = _record(metadata, owner)
    except ValueError:
        return {}
    data = shapes.get(DATA, ())
    if kind not in _CLASSES or len(block) != len(data) or any(map(mod, data, block)):
        return {}
    return dict.fromkeys((SCALE, ZERO), tuple(map(floordiv, data, block)))


def _scale_grid(stored: StoredWeights, owner: str, shape: Shape, block: tuple[int, ...]) -> ScaleGrid:
    if len(block) != 2 or len(shape) != 2 or any(size % step for size, step in zip(shape, block, strict=True)):
        raise stored.unsupported(owner, expected="blocks that divide a matrix", found=f"{block} in {list(shape)}")
    rows, columns = (None if step == size else step for size, step in zip(shape, block, strict=True))
    return ScaleGrid(rows, columns)


def _affine_rows(
    stored: StoredWeights, parts: Mapping[str, str], grid: ScaleGrid, dtype: DType, box: Box
) -> memoryview:
    if ZERO in parts or stored.tensors[parts[DATA]].dtype != E4M3:
        values = stored.read(parts[DATA], box).view(np.int8).astype(np.float32)
    else:
        values = read_e4m3(stored, parts[DATA], box)
    if ZERO in parts:
        zeros = grid.bits(stored, parts[ZERO], box).view(np.int8).astype(np.float32)
        grid.apply(np.subtract, values, zeros)
    grid.apply(np.multiply, values, grid.scales(stored, parts[SCALE], box))
    return rounded(values, dtype, stored.dtype)


#: int8, or fewer bits in int8. The product is rounded to the recorded dtype, so the scale is known in it only.
_INTEGERS = Rounding(SCALE, ((DATA, 0x01), (ZERO, 0)), span=128, epsilon=2.0**-8)


def _torchao(_: Settings) -> list[Scheme]:
    more = {"{m}_weight_act_quant_scale": for_activations(), "{m}_weight_act_pre_scale": optional()}
    zero = {ZERO: optional((*INTEGERS, *FLOATS))}
    zero_of_eight = {ZERO: optional((*INT8, *FLOATS), any_blocks)}
    scales = Part((*FLOATS, *E8M0), any_blocks)
    eight = Scheme(DATA, {DATA: Part(INT8), SCALE: scales, **zero_of_eight, **more}, tuple, rounding=_INTEGERS)
    float8 = replace(
        eight, parts={**eight.parts, DATA: Part(F8)}, rounding=e4m3_rounding(DATA, SCALE, _INTEGERS.epsilon)
    )
    scales = Part((*FLOATS, *F8, *E8M0))
    nibbles = Scheme(DATA, {DATA: Part(FOUR_BITS), SCALE: scales, **zero, **more}, wider(2))
    four = Scheme(DATA, {DATA: Part((*BYTES, *INT32)), SCALE: scales, **zero, **more})
    both = {DATA: Part((*FOUR_BITS, *INT32)), "{m}_weight_scale_and_zero": Part(FLOATS), **more}
    whole = {"{m}_weight_per_tensor_scale": Part(FLOATS), "{m}_weight_act_per_tensor_scale": optional()}
    tensor = replace(four, parts={**four.parts, **whole})
    found = [eight, float8, nibbles, four, Scheme(DATA, both), tensor]
    return [replace(scheme, dequantize=_RecordedWeight()) for scheme in found]


_UNWRITABLE = "torchao describes each weight in its file's header, and ckpt does not carry this header"

METHOD = Method(
    (NAME,),
    _torchao,
    takes_plain=True,
    unwritable=_UNWRITABLE,
    packages=(NAME,),
    known=words("quant_type quant_type_kwargs include_input_output_embeddings untie_embedding_weights"),
    recorded=_recorded_shapes,
)
