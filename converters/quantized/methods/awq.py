"""AWQ: 4-bit integers packed along the outputs, with a scale and a zero point for every group of inputs.

Source: AutoAWQ 0.2.9 `utils/packing_utils.py` (`dequantize_gemm`), `modules/linear/gemm.py`. `qweight` is int32 [in,
out / 8], `qzeros` int32 [groups, out / 8], `scales` [groups, out]. A word has eight outputs in the order 0, 2, 4, 6, 1,
3, 5, 7, the lowest bits first. The plain weight is [out, in]: scale times (integer minus zero point), rounded to the
scales' dtype.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
from numpy.typing import NDArray

from ckpt.plan.tensors import Box
from converters.quantized._weight import StoredWeights, Weight, affine, by_rows, group_index, num_groups, unpacked
from converters.quantized.module_names import matches_parts_of_names
from converters.quantized.scheme import (
    CALIBRATION,
    FLOATS,
    INT32,
    Dequantizer,
    Method,
    Part,
    Rounding,
    Scheme,
    Settings,
    UnknownValues,
    number,
    words,
)

NAME = "awq"
QWEIGHT, QZEROS, SCALES = "{m}qweight", "{m}qzeros", "{m}scales"

_BITS, _PER_WORD = 4, 8
_WHY = "AWQ scales a weight's inputs before it rounds them"
_ROUNDING = Rounding(SCALES, ((QWEIGHT, 0x11), (QZEROS, 0)), unbounded=_WHY)
#: Position in a word, by output.
_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)


@dataclass(frozen=True, slots=True)
class _AwqWeight:
    group_size: int

    def __call__(self, stored: StoredWeights, owner: str, parts: Mapping[str, str]) -> Weight:
        num_in, num_words = stored.tensors[parts[QWEIGHT]].shape
        if self.group_size > 0 and num_in % self.group_size:
            raise stored.unsupported(owner, expected=f"inputs in groups of {self.group_size}", found=num_in)
        index = group_index(num_in, self.group_size)
        compute = partial(self._rows, stored, parts, index)
        shape = (num_words * _PER_WORD, num_in)
        return by_rows(stored, NAME, owner, shape, tuple(parts.values()), compute, step=_PER_WORD)

    def _rows(self, stored: StoredWeights, parts: Mapping[str, str], index: NDArray, box: Box) -> memoryview:
        (first, num_in), (num_rows, _) = (box.offsets[0], box.sizes[1]), box.sizes
        groups = stored.tensors[parts[SCALES]].shape[0]
        words = (first // _PER_WORD, num_rows // _PER_WORD)
        values = _outputs(stored.read(parts[QWEIGHT], Box((0, words[0]), (num_in, words[1]))))
        zeros = _outputs(stored.read(parts[QZEROS], Box((0, words[0]), (groups, words[1]))))
        return affine(stored, parts[SCALES], first, values, zeros, index)


def _outputs(words: NDArray) -> NDArray:
    """Return the integers in `words`, [inputs, words], as [outputs, inputs]."""
    values = unpacked(words, _BITS).reshape(len(words), -1, _PER_WORD)[:, :, _ORDER]
    return np.ascontiguousarray(values.reshape(len(words), -1).T, np.float32)


def _awq(settings: Settings) -> list[Scheme] | None:
    """Return the scheme for `gemm`. Other versions have other shapes."""
    version = str(next(filter(None, map(settings.get, ("version", "format", "checkpoint_format"))), "gemm")).lower()
    bits, group = number(settings, "bits", "w_bit") or _BITS, number(settings, "group_size", "q_group_size")
    if version not in ("gemm", "gemv"):
        return None
    if version == "gemv" or not group:
        parts = {QWEIGHT: Part(INT32), QZEROS: Part(INT32), SCALES: Part(FLOATS)}
        found = f"version {version}" if group else "a config without group_size"
        return [Scheme(QWEIGHT, parts, dequantize=UnknownValues(found))]

    parts = {
        QWEIGHT: Part(INT32),
        QZEROS: Part(INT32, lambda plain: [(num_groups(plain[-1], group), -(-plain[-2] * bits // 32))]),
        SCALES: Part(FLOATS, lambda plain: [(num_groups(plain[-1], group), plain[-2])]),
    }
    dequantize = _dequantizer(settings, bits, group)
    scheme = Scheme(QWEIGHT, parts, lambda packed: (packed[-1] * 32 // bits, packed[0]), dequantize=dequantize)
    return [replace(scheme, rounding=_ROUNDING)]


def _dequantizer(settings: Settings, bits: int, group: int) -> Dequantizer:
    if bits != _BITS:
        return UnknownValues(f"{bits} bits")
    if settings.get("zero_point", True) is not True:
        return UnknownValues("a config without zero_point")
    if not str(settings.get("data_type", "int")).startswith("int"):
        return UnknownValues(f"data_type {settings['data_type']!r}")
    if settings.get("backend") not in (None, "auto", "autoawq"):
        return UnknownValues(f"backend {settings['backend']!r}")
    return _AwqWeight(group)


_KNOWN = CALIBRATION | words(
    "bits w_bit group_size q_group_size zero_point version do_fuse modules_to_fuse fuse_max_seq_len exllama_config"
)
METHOD = Method((NAME,), _awq, packages=("gptqmodel",), matches=matches_parts_of_names, known=_KNOWN)
