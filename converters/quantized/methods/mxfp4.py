"""MXFP4, used for gpt-oss experts: 4-bit floats (e2m1), with one power of two for each 32.

Source: transformers 5.23 `integrations/mxfp4.py` (`_convert_moe_packed_tensors`). `NAME_blocks`, uint8 [experts, out,
groups, 16], packs two values per byte, the first in the lower half. `NAME_scales`, uint8 [experts, out, groups], holds
exponents with bias 127. The plain `NAME` is [experts, in, out] with `in = 32 * groups`.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache, partial

import numpy as np
from numpy.typing import NDArray

from ckpt.move.casts import cast_bits, storage_dtype
from ckpt.plan.dtypes import FLOAT32, DType
from ckpt.plan.tensors import Box, Shape
from converters.quantized._weight import StoredWeights, Weight, WeightBlock
from converters.quantized.blocks import BLOCK, spans
from converters.quantized.floats import E8M0_BIAS, E8M0_NAN, e2m1_values
from converters.quantized.grids import e2m1_rounding
from converters.quantized.scheme import BYTES, E8M0, Method, Part, Scheme, Settings

NAME = "mxfp4"
BLOCKS, SCALES = "{w}_blocks", "{w}_scales"

_BYTES = 16  # per group


def _dequantize(stored: StoredWeights, owner: str, parts: Mapping[str, str]) -> Weight:
    packed, scales = parts[BLOCKS], parts[SCALES]
    *lead, num_out, num_groups, num_bytes = stored.tensors[packed].shape
    if len(lead) != 1 or num_bytes != _BYTES:
        raise stored.corrupt(packed, f"[experts, out, groups, {_BYTES}]", list(stored.tensors[packed].shape))
    group, blocks = 2 * _BYTES, []
    for expert in range(lead[0]):
        for start, stop in spans(num_groups, BLOCK // max(1, group * num_out)):
            region = Box((expert, start * group, 0), (1, (stop - start) * group, num_out))
            content = partial(
                _output_groups, stored, packed, scales, Box((expert, 0, start), (1, num_out, stop - start))
            )
            blocks.append(WeightBlock(region, content))
    shape = (lead[0], num_groups * group, num_out)
    return Weight(owner, NAME, stored.dtype, shape, (packed, scales), tuple(blocks))


def _output_groups(stored: StoredWeights, name: str, exponents_name: str, box: Box) -> memoryview:
    """Compute some groups for all outputs of one expert, as [in, out]. `box` is in the scales."""
    _, num_out, num_groups = box.sizes
    packed = stored.read(name, Box((*box.offsets, 0), (*box.sizes, _BYTES)))
    scales = stored.read(exponents_name, box)
    stored.check_finite(exponents_name, scales.reshape(-1) != E8M0_NAN, box)
    low, high = _tables(stored.dtype)
    # Transpose the packed bytes: they are four times smaller than the result.
    pairs = np.ascontiguousarray(packed.reshape(num_out, -1).T).reshape(num_groups, _BYTES, num_out)
    exponents = np.ascontiguousarray(scales.reshape(num_out, -1).T)
    result = np.empty((num_groups, _BYTES, 2, num_out), low.dtype)
    for group in range(num_groups):
        index = (exponents[group].astype(np.uint16) << np.uint16(8)) | pairs[group]
        result[group, :, 0], result[group, :, 1] = low[index], high[index]
    return result.reshape(-1).view(np.uint8).data


@cache
def _tables(dtype: DType) -> tuple[NDArray, NDArray]:
    """Return values for a byte's lower and upper half, as bits in `dtype`, indexed by `exponent << 8 | byte`."""
    values = e2m1_values().astype(np.float64)
    with np.errstate(over="ignore"):  # 1.5 * 2 ** 128 overflows; exponent 255, the NaN, was rejected
        table = np.ldexp(values[None, :], (np.arange(256) - E8M0_BIAS)[:, None]).astype(np.float32)
    bits = table.reshape(-1).view(np.uint32)
    if dtype != FLOAT32:
        bits = cast_bits(bits, FLOAT32, dtype)
    half = bits.view(storage_dtype(dtype)).reshape(256, 16)
    byte = np.arange(256)
    return half[:, byte & 15].reshape(-1), half[:, byte >> 4].reshape(-1)


def _mxfp4(_: Settings) -> list[Scheme]:
    """Return gpt-oss's scheme for experts: blocks [experts, out, groups, 16] for a plain [experts, in, out]."""

    def plain(packed: Shape) -> Shape:
        return (*packed[:-3], packed[-2] * packed[-1] * 2, packed[-3]) if len(packed) > 2 else packed

    def blocks(shape: Shape) -> list[Shape]:
        return [(*shape[:-2], shape[-1], shape[-2] // 32, 16)]

    def scales(shape: Shape) -> list[Shape]:
        return [(*shape[:-2], shape[-1], shape[-2] // 32)]

    parts = {BLOCKS: Part(BYTES, blocks), SCALES: Part(E8M0, scales)}
    return [Scheme(BLOCKS, parts, plain, dequantize=_dequantize, rounding=e2m1_rounding(BLOCKS, SCALES))]


METHOD = Method((NAME,), _mxfp4, unrecorded=lambda: _mxfp4({}))
