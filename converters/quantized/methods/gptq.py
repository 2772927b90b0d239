"""GPTQ: integers packed along the inputs, with a scale and a zero point for every group of inputs.

Sources: gptqmodel 7.7 `nn_modules/qlinear/__init__.py` (`dequantize_weight`), `utils/model.py`
(`convert_gptq_v1_to_v2_format_module`); AutoGPTQ 0.7 `qlinear`. `qweight` is int32 [in * bits / 32, out], `qzeros`
int32 [groups, out * bits / 32], `scales` [groups, out]. `g_idx` has every input's group, in order without `desc_act`.
The plain weight is [out, in]: scale times (integer minus zero point), rounded to the scales' dtype. Format gptq stores
zero points less one, gptq_v2 as they are. In format gptq, a zero point with all bits set is refused: libraries
disagree.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
from numpy.typing import NDArray

from ckpt.plan.tensors import Box
from converters.quantized._weight import StoredWeights, Weight, affine, by_rows, group_index, num_groups, unpacked
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
    optional,
    words,
)

NAME = "gptq"
_FORMAT_KEYS = ("checkpoint_format", "format")
QWEIGHT, QZEROS, SCALES, INDEX = "{m}qweight", "{m}qzeros", "{m}scales", "{m}g_idx"


@dataclass(frozen=True, slots=True)
class _GptqWeight:
    bits: int
    group_size: int
    added: int
    is_reordered: bool

    def __call__(self, stored: StoredWeights, owner: str, parts: Mapping[str, str]) -> Weight:
        num_words, num_out = stored.tensors[parts[QWEIGHT]].shape
        shape = (num_out, num_words * 32 // self.bits)
        index = group_index(shape[1], self.group_size)
        if INDEX in parts:
            recorded = stored.read(parts[INDEX]).view(np.int32)
            count = stored.tensors[parts[SCALES]].shape[0]
            if recorded.size and not 0 <= recorded.min() <= recorded.max() < count:
                raise stored.corrupt(parts[INDEX], f"groups 0 to {count - 1}", f"{recorded.min()} to {recorded.max()}")
            if not self.is_reordered and not np.array_equal(recorded, index):
                found = "groups in another order, although desc_act is not set"
                raise stored.unsupported(parts[INDEX], found=found)
            index = recorded
        compute = partial(self._rows, stored, parts, index)
        return by_rows(stored, NAME, owner, shape, tuple(parts.values()), compute, step=32 // self.bits)

    def _rows(self, stored: StoredWeights, parts: Mapping[str, str], index: NDArray, box: Box) -> memoryview:
        (first, _), (num_rows, _), per = box.offsets, box.sizes, 32 // self.bits
        num_words, groups = stored.tensors[parts[QWEIGHT]].shape[0], stored.tensors[parts[SCALES]].shape[0]
        packed = stored.read(parts[QWEIGHT], Box((0, first), (num_words, num_rows)))
        values = unpacked(packed.T, self.bits).astype(np.float32)
        words = stored.read(parts[QZEROS], Box((0, first // per), (groups, -(-num_rows // per))))
        zeros = unpacked(words, self.bits).T[:num_rows].astype(np.float32)
        if self.added and (zeros == (1 << self.bits) - 1).any():
            found = f"zero points {(1 << self.bits) - 1} in format gptq, which libraries add one to in different ways"
            raise stored.unsupported(parts[QZEROS], found=found)
        zeros += self.added
        return affine(stored, parts[SCALES], first, values, zeros, index)


def _gptq(settings: Settings) -> list[Scheme] | None:
    """Return the scheme. Modules with own bits (`dynamic`) have other shapes."""
    formats = {str(settings.get(key) or NAME) for key in _FORMAT_KEYS}
    if not formats <= {NAME, "gptq_v2"}:
        return None
    bits, group = number(settings, "bits"), number(settings, "group_size")
    index = optional(INT32, lambda plain: [(plain[-1],)])
    if not bits or not group or settings.get("dynamic"):
        parts = {QWEIGHT: Part(INT32), QZEROS: Part(INT32), SCALES: Part(FLOATS)}
        found = "settings per module (dynamic)" if settings.get("dynamic") else "a config without bits and group_size"
        return [Scheme(QWEIGHT, {**parts, INDEX: optional(INT32)}, dequantize=UnknownValues(found))]

    parts = {
        QWEIGHT: Part(INT32),
        QZEROS: Part(INT32, lambda plain: [(num_groups(plain[-1], group), -(-plain[-2] * bits // 32))]),
        SCALES: Part(FLOATS, lambda plain: [(num_groups(plain[-1], group), plain[-2])]),
        INDEX: replace(index, required=bool(settings.get("desc_act"))),
    }
    dequantize = _dequantizer(settings, bits, group)
    scheme = Scheme(QWEIGHT, parts, lambda packed: (packed[-1], packed[0] * 32 // bits), dequantize=dequantize)
    return [replace(scheme, rounding=_rounding(settings, bits))]


def _rounding(settings: Settings, bits: int) -> Rounding:
    """Return GPTQ's rounding: it changes later inputs' weights to make up for an error."""
    one = 1 + _added(settings)
    unit = ((QWEIGHT, one if bits == 8 else one * 0x11), (QZEROS, 0))
    return Rounding(SCALES, unit, unbounded="GPTQ changes weights before it rounds them")


def _added(settings: Settings) -> int:
    return int({str(settings[key]) for key in _FORMAT_KEYS if settings.get(key)} <= {NAME})


def _dequantizer(settings: Settings, bits: int, group: int) -> Dequantizer:
    if bits not in (4, 8):
        return UnknownValues(f"{bits} bits")
    if not str(settings.get("data_type", "int")).startswith("int"):
        return UnknownValues(f"data_type {settings['data_type']!r}")
    if settings.get("is_marlin_format"):
        return UnknownValues("is_marlin_format in the config")
    if settings.get("pack_dtype", "int32") != "int32":
        return UnknownValues(f"pack_dtype {settings['pack_dtype']!r}")
    versions = {str(settings[key]) for key in _FORMAT_KEYS if settings.get(key)} or {NAME}
    if len(versions) > 1:
        return UnknownValues(" and ".join(f"{key} {settings[key]!r}" for key in _FORMAT_KEYS))
    return _GptqWeight(bits, group, _added(settings), bool(settings.get("desc_act")))


#: Those of the second and later lines steer the calibration or the kernels.
_KNOWN = CALIBRATION | words(
    "bits group_size is_marlin_format dynamic "
    "act_group_aware cache_block_outputs disable_exllama exllama_config hyb_act inside_layer_modules max_input_length "
    "model_file_base_name model_name_or_path model_seqlen module_name_preceding_first_block "
    "modules_in_block_to_quantize mse pad_token_id quantizer tokenizer use_cuda_fp16 use_exllama"
)
METHOD = Method((NAME,), _gptq, packages=("optimum", "gptqmodel"), known=_KNOWN)
