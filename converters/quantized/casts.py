"""`--quantize nvfp4a16` of compressed-tensors' MXFP4: scales in another format, and unchanged values.

A power of two between 2^-9 and 2^8 is an e4m3 number. The global scale moves the largest scale to 2^8, and each scale
is stored twice, for 16 numbers each. The packed numbers stay as they are.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property, partial

import numpy as np
from numpy.typing import NDArray

from ckpt.base.errors import LossError
from ckpt.base.words import Message
from ckpt.plan.dtypes import FLOAT32
from ckpt.plan.tensors import Box
from converters.quantized._packed_weight import PackedBlock, PackedParts
from converters.quantized._weight import E4M3, StoredWeights
from converters.quantized.blocks import BLOCK, spans
from converters.quantized.floats import E8M0_BIAS, E8M0_NAN
from converters.quantized.methods.compressed_tensors import GLOBAL, METHOD, NAME, PACKED, SCALE
from converters.quantized.parts import QuantizedWeights

RULE = "cast from MXFP4: the numbers are unchanged, and the scales have equal values"

_LEAST, _LARGEST = -9, 8  # exponents of e4m3's powers of two
_IS_NUMBER = 0x77  # bits other than the signs of two e2m1 numbers


def can_cast(weights: QuantizedWeights, method: str) -> bool:
    if method != "nvfp4a16" or not weights.owners or weights.quantization is None:
        return False
    known = {scheme.dequantize for scheme in METHOD.schemes(METHOD.quantizers["mxfp4"].settings(())) or ()}
    return weights.quantization.method == NAME and all(
        parts.keys() == {PACKED, SCALE} and known & {scheme.dequantize for scheme in weights.schemes[owner]}
        for owner, parts in weights.owners.items()
    )


class SharedFactor:
    """Global scale of fused weights: a power of two."""

    def __init__(self, stored: StoredWeights, scales: Sequence[str]) -> None:
        self._stored, self._scales = stored, scales

    @cached_property
    def exponent(self) -> int:
        largest = 0
        for name in self._scales:
            found = self._stored.read(name)
            self._stored.check_finite(name, found.reshape(-1) != E8M0_NAN)
            largest = max(largest, int(found.max(initial=0)))
        return min(_LARGEST - (largest - E8M0_BIAS), E8M0_BIAS)

    def content(self) -> memoryview:
        return np.array([2.0**self.exponent], np.float32).view(np.uint8).data


def cast_parts(stored: StoredWeights, parts: Mapping[str, str], factor: SharedFactor) -> list[PackedParts]:
    rows, groups = stored.tensors[parts[SCALE]].shape
    boxes = [Box((start, 0), (stop - start, groups)) for start, stop in spans(rows, max(1, BLOCK // max(1, groups)))]
    blocks = tuple(
        PackedBlock((Box(box.offsets, (box.sizes[0], 2 * groups)),), partial(_scales, stored, parts, factor, box))
        for box in boxes
    )
    scales = PackedParts({SCALE: (E4M3, (rows, 2 * groups))}, blocks)
    return [scales, PackedParts({GLOBAL: (FLOAT32, (1,))}, (PackedBlock((Box((0,), (1,)),), factor.content),))]


def _scales(stored: StoredWeights, parts: Mapping[str, str], factor: SharedFactor, box: Box) -> memoryview:
    (start, _), (rows, groups) = box.offsets, box.sizes
    powers = stored.read(parts[SCALE], box).astype(np.int32) - E8M0_BIAS + factor.exponent
    if (powers < _LEAST).any():
        packed = stored.read(parts[PACKED], Box((start, 0), (rows, 16 * groups)))
        is_used: NDArray = (packed.reshape(rows, groups, 16) & _IS_NUMBER).max(axis=-1) > 0
        _check_range(stored, parts[SCALE], powers, is_used, factor.exponent, start)
        powers = np.maximum(powers, _LEAST)
    normal, small = (powers + 7) << 3, np.left_shift(1, np.maximum(powers - _LEAST, 0))
    content: NDArray = np.repeat(np.where(powers < -6, small, normal).astype(np.uint8), 2, axis=1)
    return content.reshape(-1).data


def _check_range(stored: StoredWeights, fqn: str, powers: NDArray, is_used: NDArray, exponent: int, start: int) -> None:
    is_small = is_used & (powers < _LEAST)
    if not is_small.any():
        return
    row, group = (int(i) for i in np.argwhere(is_small)[0])
    raise LossError(
        "a block's scale is too small for NVFP4, next to the largest one",
        path=stored.checkpoint.path,
        fqn=fqn,
        expected=f"scales from 2^{_LEAST - exponent} to 2^{_LARGEST - exponent}, with those of fused weights",
        found=f"2^{int(powers[row, group]) - exponent} at [{row + start}, {group}]",
        hint=Message("add {dequantize=True} to round the values instead"),
    )
