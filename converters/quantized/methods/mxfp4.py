"""MXFP4, used for gpt-oss experts: 4-bit floats (e2m1), with one power of two for each 32.

Source: transformers 5.23 `integrations/mxfp4.py` (`_convert_moe_packed_tensors`). `NAME_blocks`, uint8 [experts, out,
groups, 16], packs two values per byte, the first in the lower half. `NAME_scales`, uint8 [experts, out, groups], holds
exponents with bias 127. The plain `NAME` is [experts, in, out] with `in = 32 * groups`.

`--quantize mxfp4` follows triton_kernels' `downcast_to_mxfp_torch` (triton 018a674f): the exponent is the maximum
divided by 6, rounded up to a power of two, so that no number is clipped. Numbers are rounded to bfloat16 first, and to
e2m1 with ties to even. The older version on the Hub, called by transformers' `quantize_to_mxfp4`, rounds ties away
from zero. Models other than gpt-oss get the format of compressed-tensors.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from functools import cache, partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ckpt.move.casts import cast_bits, storage_dtype
from ckpt.plan.dtypes import BFLOAT16, BY_NAME, FLOAT32, DType
from ckpt.plan.tensors import Box, Shape
from converters.quantized._packed_weight import ELEMENTS, STEP, PackedBlock, PackedParts, PlainWeight, largest_in
from converters.quantized._weight import StoredWeights, Weight, WeightBlock, as_rounded
from converters.quantized.blocks import BLOCK, spans
from converters.quantized.floats import E2M1_MAX, E8M0_BIAS, E8M0_NAN, e2m1_codes, e2m1_values, e8m0_values
from converters.quantized.grids import e2m1_rounding
from converters.quantized.scheme import BYTES, E8M0, Method, Part, Quantizer, Scheme, Settings

NAME = "mxfp4"
BLOCKS, SCALES = "{w}_blocks", "{w}_scales"

_BYTES, _GROUP = 16, 32  # bytes and elements per group


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
    rows = partial(_outputs, stored, packed, scales)
    return Weight(owner, NAME, stored.dtype, shape, (packed, scales), tuple(blocks), rows)


def _outputs(stored: StoredWeights, name: str, exponents_name: str, box: Box) -> memoryview:
    """Compute some outputs. `box` is in the plain weight."""
    (expert, _, first_out), (_, num_in, num_out) = box.offsets, box.sizes
    return _output_groups(stored, name, exponents_name, Box((expert, first_out, 0), (1, num_out, num_in // _GROUP)))


def _output_groups(stored: StoredWeights, name: str, exponents_name: str, box: Box) -> memoryview:
    """Compute some groups as [in, out]. `box` is in the scales."""
    _, num_out, num_groups = box.sizes
    packed = stored.read(name, Box((*box.offsets, 0), (*box.sizes, _BYTES)))
    scales = stored.read(exponents_name, box)
    stored.check_finite(exponents_name, scales.reshape(-1) != E8M0_NAN, box)
    low, high = _tables(stored.dtype)
    # Transpose the packed bytes: they are four times smaller.
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
    """Return gpt-oss's scheme."""

    def plain(packed: Shape) -> Shape:
        return (*packed[:-3], packed[-2] * packed[-1] * 2, packed[-3]) if len(packed) > 2 else packed

    def blocks(shape: Shape) -> list[Shape]:
        return [(*shape[:-2], shape[-1], shape[-2] // 32, 16)]

    def scales(shape: Shape) -> list[Shape]:
        return [(*shape[:-2], shape[-1], shape[-2] // 32)]

    parts = {BLOCKS: Part(BYTES, blocks), SCALES: Part(E8M0, scales)}
    rounding = e2m1_rounding(BLOCKS, SCALES)
    return [Scheme(BLOCKS, parts, plain, dequantize=_dequantize, rounding=rounding, loads_stacks=True)]


# -- quantizing -----------------------------------------------------------------------------------------------------


def _packed_experts(weight: PlainWeight) -> list[PackedParts]:
    num_experts, num_in, num_out = weight.shape
    groups, blocks = num_in // _GROUP, []
    for expert in range(num_experts):
        for start, stop in spans(num_out, max(1, ELEMENTS // num_in)):
            scales = Box((expert, start, 0), (1, stop - start, groups))
            boxes = (Box((*scales.offsets, 0), (*scales.sizes, _BYTES)), scales)
            plain = Box((expert, 0, start), (1, num_in, stop - start))
            blocks.append(PackedBlock(boxes, partial(_packed_outputs, weight, plain), plain, is_transposed=True))
    shape = (num_experts, num_out, groups)
    parts = {BLOCKS: (_UINT8, (*shape, _BYTES)), SCALES: (_UINT8, shape)}
    return [PackedParts(parts, tuple(blocks))]


def _packed_outputs(weight: PlainWeight, box: Box) -> memoryview:
    """Compute all blocks, then all scales. `box` is in the plain weight."""
    (expert, _, first_out), (_, num_in, num_out) = box.offsets, box.sizes
    num_groups = num_in // _GROUP
    packed, scales = np.empty((num_groups, _BYTES, num_out), np.uint8), np.empty((num_groups, num_out), np.uint8)
    for start, stop in spans(num_groups, STEP // (_GROUP * num_out)):
        values = weight.read(Box((expert, start * _GROUP, first_out), (1, (stop - start) * _GROUP, num_out)))
        groups = as_rounded(values, BFLOAT16).reshape(-1, _GROUP, num_out)
        bits = (largest_in(groups, axis=1) / np.float32(E2M1_MAX)).view(np.uint32)
        exponents = (bits + np.uint32(0x7F_FFFF)) >> np.uint32(23)
        with np.errstate(divide="ignore"):  # e8m0's zero stands for 0 here
            factors = np.where(exponents > 0, np.float32(1) / e8m0_values()[exponents], np.float32(0))
        codes = e2m1_codes(groups * factors[:, None, :])
        packed[start:stop], scales[start:stop] = codes[:, 0::2] | codes[:, 1::2] << 4, exponents
    parts = (packed.reshape(-1, num_out), scales)
    return np.concatenate([part.T.reshape(-1) for part in parts]).data


def _expert_settings(_: Sequence[str]) -> dict[str, Any]:
    """Return the entry of openai/gpt-oss-20b."""
    plain = ["model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head"]
    return {"modules_to_not_convert": plain, "quant_method": NAME}


_UINT8 = BY_NAME["uint8"]
_EXPERTS = re.compile(r"model\.layers\.(?P<layer>\d+)\.mlp\.experts\.(gate_up_proj|down_proj)")
_RULE = (
    "triton_kernels downcast_to_mxfp_torch: the scale is the maximum / 6, rounded up to a power of two, numbers are "
    "rounded to bfloat16 first; ties to even"
)
_QUANTIZER = Quantizer(_packed_experts, _expert_settings, _RULE, (_GROUP, 1), _EXPERTS, frozenset({"gpt_oss"}))
METHOD = Method((NAME,), _mxfp4, unrecorded=lambda: _mxfp4({}), quantizers={NAME: _QUANTIZER})
