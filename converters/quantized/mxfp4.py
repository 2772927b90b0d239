"""MXFP4, used for gpt-oss experts: 4-bit floats (e2m1), with one power of two for each 32.

Source: transformers 5.23 `integrations/mxfp4.py` (`_convert_moe_packed_tensors`). `NAME_blocks`, uint8 [experts, out,
groups, 16], packs two values per byte, the first in the lower half. `NAME_scales`, uint8 [experts, out, groups], holds
exponents with bias 127. The plain `NAME` is [experts, in, out] with `in = 32 * groups`.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache, partial

import numpy as np
from numpy.typing import NDArray

from ckpt.move.casts import cast_bits, storage_dtype
from ckpt.plan.dtypes import BY_NAME, FLOAT32, DType
from ckpt.plan.tensors import Box
from converters.quantized._weight import StoredWeights, Weight, WeightBlock
from converters.quantized.blocks import BLOCK, spans

METHOD = "mxfp4"
BLOCKS, SCALES = "_blocks", "_scales"

_UINT8 = BY_NAME["uint8"]
_BYTES = 16  # per group
_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_BIAS = 127
_NAN = 255  # e8m0 NaN


def find(stored: StoredWeights) -> Iterator[Weight]:
    """Yield every weight stored in MXFP4. Raise CorruptError if one is incomplete."""
    for name, tensor in stored.tensors.items():
        owner = name.removesuffix(SCALES if name.endswith(SCALES) else BLOCKS)
        if owner == name:
            continue
        if name.endswith(SCALES):
            if tensor.dtype == _UINT8:
                stored.part(owner + BLOCKS, owner)
            continue
        scales = stored.part(owner + SCALES, owner)
        if tensor.dtype != _UINT8 or len(tensor.shape) != 4 or tensor.shape[-1] != _BYTES:
            raise stored.corrupt(
                name, f"uint8 [experts, out, groups, {_BYTES}]", f"{tensor.dtype} {list(tensor.shape)}"
            )
        if scales.dtype != _UINT8 or scales.shape != tensor.shape[:-1]:
            raise stored.corrupt(
                owner + SCALES, f"uint8 {list(tensor.shape[:-1])}", f"{scales.dtype} {list(scales.shape)}"
            )
        yield _weight(stored, owner)


def _weight(stored: StoredWeights, owner: str) -> Weight:
    num_experts, num_out, num_groups, _ = stored.tensors[owner + BLOCKS].shape
    group = 2 * _BYTES
    blocks = []
    for expert in range(num_experts):
        for start, stop in spans(num_groups, BLOCK // max(1, group * num_out)):
            region = Box((expert, start * group, 0), (1, (stop - start) * group, num_out))
            blocks.append(WeightBlock(region, partial(_output_groups, stored, owner, expert, start, stop)))
    shape = (num_experts, num_groups * group, num_out)
    return Weight(owner, METHOD, stored.dtype, shape, (owner + BLOCKS, owner + SCALES), tuple(blocks))


def _output_groups(stored: StoredWeights, owner: str, expert: int, start: int, stop: int) -> memoryview:
    """Compute groups `start` to `stop` for all outputs of one expert, as [in, out]."""
    num_out, num_groups = stored.tensors[owner + BLOCKS].shape[1], stop - start
    box = Box((expert, 0, start), (1, num_out, num_groups))
    packed = stored.read(owner + BLOCKS, Box((*box.offsets, 0), (*box.sizes, _BYTES)))
    scales = stored.read(owner + SCALES, box)
    stored.check_finite(owner + SCALES, scales.reshape(-1) != _NAN, box)
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
    values = np.array((*_E2M1, *(-v for v in _E2M1)))
    with np.errstate(over="ignore"):  # 1.5 * 2 ** 128 overflows; exponent 255, the NaN, was rejected
        table = np.ldexp(values[None, :], (np.arange(256) - _BIAS)[:, None]).astype(np.float32)
    bits = table.reshape(-1).view(np.uint32)
    if dtype != FLOAT32:
        bits = cast_bits(bits, FLOAT32, dtype)
    half = bits.view(storage_dtype(dtype)).reshape(256, 16)
    byte = np.arange(256)
    return half[:, byte & 15].reshape(-1), half[:, byte >> 4].reshape(-1)
