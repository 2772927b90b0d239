"""bitsandbytes in transformers' format: 4 bits (nf4, fp4) with block scales, and LLM.int8's int8 rows.

Sources: bitsandbytes 0.50.2 `functional.py` (`QuantState.as_dict`, `dequantize_4bit`, `get_4bit_type`), `nn/modules.py`
(`_save_to_state_dict`), `backends/default/ops.py`; transformers 5.23 `integrations/bitsandbytes.py`.

4 bits: `NAME`, stored in the dtype `bnb_4bit_quant_storage`, packs two values of the flattened weight per byte, the
first in the upper half. `NAME.absmax` has one fp32 factor per `blocksize` values. With double quantization it is uint8:
indices into `NAME.nested_quant_map`, multiplied by `NAME.nested_absmax` and shifted by `nested_offset`.
`NAME.quant_map` has the 16 values. `NAME.quant_state.bitsandbytes__nf4` is JSON in bytes: shape, dtype, block sizes.
Everything is fp32 until the product is rounded to the recorded dtype, and then to the model's dtype.

8 bits: `NAME`, int8, with `SCB` [out]: value times SCB times 1/127, in fp32, in this order.

bitsandbytes takes the 16 values from its own tables, so the file must match them. Its AVX-512 code (0.50.2) uses wrong
factors if the block size does not divide the rows; here the result is its other code's. Its code disagrees with itself
on fp4's negative zero; here it is 0.0, as in the table.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from math import prod

import numpy as np
from numpy.typing import NDArray

from ckpt.base.errors import UsageError
from ckpt.plan.dtypes import BY_NAME, FLOAT32, DType
from ckpt.plan.tensors import Box, FlatRange, Shape, whole
from converters.quantized._weight import StoredWeights, Weight, WeightBlock, rounded
from converters.quantized.blocks import BLOCK, spans
from converters.quantized.four_bits import FourBitState, parse_state
from converters.quantized.scheme import (
    BYTES,
    F32,
    FLOATS,
    FOUR_BITS,
    INT8,
    WEIGHT,
    Method,
    Part,
    Rounding,
    Scheme,
    Settings,
    optional,
    per_output,
    words,
)

NAME = "bitsandbytes"
ABSMAX, MAP, NESTED_ABSMAX, NESTED_MAP = ".absmax", ".quant_map", ".nested_absmax", ".nested_quant_map"
SCB, FORMAT = "SCB", "weight_format"

_STATE = "{w}.quant_state.bitsandbytes__"
_ROW_MAJOR = 0
_PER_127 = np.float32(7.874015718698502e-3)
_THIRDS = (0.0, 0.0625, 8.0, 12.0, 4.0, 6.0, 2.0, 3.0)
_VALUES = {
    # normal distribution quantiles
    "nf4": np.array(
        [
            *(-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635),
            *(-0.18477343022823334, -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725),
            *(0.24611230194568634, 0.33791524171829224, 0.44070982933044434, 0.5626170039176941),
            *(0.7229568362236023, 1.0),
        ],
        np.float32,
    ),
    "fp4": np.array([*_THIRDS, *(-v for v in _THIRDS)], np.float32) / np.float32(12) + np.float32(0),  # no -0.0
}

#: Byte with twice the value 1.0.
_ONES = {"nf4": 0xFF, "fp4": 0x33}
_NESTED_WHY = "double quantization rounds the scales after the values"


@dataclass(frozen=True, slots=True)
class _Nested:
    block_size: int
    offset: np.float32
    values: NDArray
    factors: NDArray


@dataclass(frozen=True, slots=True)
class _State:
    kind: str
    block_size: int
    dtype: DType
    nested: _Nested | None


def _four_bits(stored: StoredWeights, owner: str, parts: Mapping[str, str]) -> Weight:
    kind, name = next((kind, parts[_STATE + kind]) for kind in _VALUES if _STATE + kind in parts)
    recorded = parse_state(stored.read(name).tobytes(), kind)
    packed, numel = stored.tensors[owner], prod(recorded.shape)
    if packed.shape[:1] != (packed.numel,):
        raise stored.corrupt(owner, "one column", f"{packed.dtype} {list(packed.shape)}")
    _check_values(stored, owner, kind)
    state = _State(kind, recorded.block_size, BY_NAME[recorded.dtype], _read_nested(stored, owner, recorded))
    transposed = _is_conv1d(stored, owner)
    step = BLOCK if not transposed else max(1, numel)  # block sizes divide it
    blocks = tuple(
        WeightBlock(FlatRange(start, stop), partial(_four_bit_values, stored, owner, state, start, stop))
        for start, stop in spans(numel, step)
    )
    return _oriented(Weight(owner, NAME, stored.dtype, recorded.shape, tuple(parts.values()), blocks), transposed)


def _check_values(stored: StoredWeights, owner: str, kind: str) -> None:
    tensor = stored.tensors[owner + MAP]
    if tensor.dtype == FLOAT32 and tensor.numel == 16:
        values = stored.read(owner + MAP).view(np.float32).reshape(-1)
        if np.array_equal(values, _VALUES[kind]):
            return
    raise UsageError(
        f"the weight's 16 values differ from bitsandbytes' values for {kind}",
        path=stored.checkpoint.path,
        fqn=owner + MAP,
        hint="load it with the original bitsandbytes version, dequantize it and save it",
    )


def _read_nested(stored: StoredWeights, owner: str, recorded: FourBitState) -> _Nested | None:
    if recorded.nested is None:
        return None
    read = [stored.read(part).view(np.float32).reshape(-1) for part in (owner + NESTED_MAP, owner + NESTED_ABSMAX)]
    return _Nested(recorded.nested.block_size, np.float32(recorded.nested.offset), *read)


def _four_bit_values(stored: StoredWeights, owner: str, state: _State, start: int, stop: int) -> memoryview:
    """Compute elements from a block's start."""
    numel, size = stop - start, state.block_size
    values = _pairs(state.kind)[_bytes(stored, owner, start // 2, -(-stop // 2))].reshape(-1)[:numel]
    factors = _factors(stored, owner, state, start // size, -(-stop // size))
    full = numel // size * size
    values[:full].reshape(-1, size)[...] *= factors[: full // size, None]
    values[full:] *= factors[-1]
    return rounded(values, state.dtype, stored.dtype)


def _bytes(stored: StoredWeights, owner: str, first: int, last: int) -> NDArray:
    item = stored.tensors[owner].dtype.itemsize
    raw = _elements(stored, owner, first // item, -(-last // item)).view(np.uint8)
    return raw[first % item :][: last - first]


def _factors(stored: StoredWeights, owner: str, state: _State, first: int, last: int) -> NDArray:
    nested, found = state.nested, _elements(stored, owner + ABSMAX, first, last)
    if nested is None:
        factors: NDArray = found.view(np.float32)
    else:
        blocks = np.arange(first, last) // nested.block_size
        factors = nested.values[found] * nested.factors[blocks] + nested.offset
    stored.check_finite(owner + ABSMAX, np.isfinite(factors), _rows(stored, owner + ABSMAX, first, last))
    return factors


def _elements(stored: StoredWeights, fqn: str, start: int, stop: int) -> NDArray:
    return stored.read(fqn, _rows(stored, fqn, start, stop)).reshape(-1)


def _rows(stored: StoredWeights, fqn: str, start: int, stop: int) -> Box:
    column = stored.tensors[fqn].shape[1:]
    return Box((start, *(0,) * len(column)), (stop - start, *column))


def _pairs(kind: str) -> NDArray:
    byte = np.arange(256)
    return np.stack([_VALUES[kind][byte >> 4], _VALUES[kind][byte & 15]], axis=1)


def _eight_bits(stored: StoredWeights, owner: str, parts: Mapping[str, str]) -> Weight:
    name, scales, layout = parts[WEIGHT], parts["{m}" + SCB], parts.get("{m}" + FORMAT)
    num_out, num_in = stored.tensors[name].shape
    if layout and (found := stored.read(layout).reshape(-1).tolist()) != [_ROW_MAJOR]:
        raise UsageError(
            "the weight uses a GPU-specific layout, and only that GPU can convert it",
            path=stored.checkpoint.path,
            fqn=layout,
            expected=f"{_ROW_MAJOR}, row-major",
            found=found,
        )
    transposed = _is_conv1d(stored, owner)
    rows = BLOCK // max(1, num_in) if not transposed else num_out
    boxes = [Box((start, 0), (stop - start, num_in)) for start, stop in spans(num_out, rows)]
    blocks = tuple(WeightBlock(box, partial(_eight_bit_values, stored, name, scales, box)) for box in boxes)
    weight = Weight(owner, NAME, stored.dtype, (num_out, num_in), tuple(parts.values()), blocks)
    return _oriented(weight, transposed)


def _eight_bit_values(stored: StoredWeights, name: str, scales_name: str, rows: Box) -> memoryview:
    scales = stored.scales(scales_name)[rows.offsets[0] : rows.ends[0]]
    values = stored.read(name, rows).view(np.int8).astype(np.float32)
    with np.errstate(over="ignore"):  # infinite in the library, too
        values *= scales[:, None]
    values *= _PER_127
    return rounded(values, stored.dtype)


def _is_conv1d(stored: StoredWeights, owner: str) -> bool:
    """Return True for [in, out]: transformers transposes a Conv1D's weight to quantize it."""
    module = "." + owner.rpartition(".")[0]
    return any(f".{name}".endswith(module) for name in stored.conv1d)


def _oriented(weight: Weight, transposed: bool) -> Weight:
    """Make a transposed weight a single block."""
    if not transposed:
        return weight
    shape = weight.shape[::-1]
    blocks = tuple(WeightBlock(whole(shape), block.content, transposed=True) for block in weight.blocks)
    return Weight(weight.fqn, weight.method, weight.dtype, shape, weight.parts, blocks)


def _per_block(plain: Shape) -> list[Shape]:
    return [(-(-prod(plain) // size),) for size in (64, 32, *(2**power for power in range(7, 13)))]


def _bitsandbytes(_: Settings) -> list[Scheme]:
    found: list[Scheme] = []
    for kind in _VALUES:
        state = {_STATE + kind: Part(BYTES), "{w}.quant_map": Part(F32)}
        packed = {WEIGHT: Part((*FLOATS, *FOUR_BITS)), **state}
        nested = {"{w}.nested_absmax": Part(F32), "{w}.nested_quant_map": Part(F32)}
        kinds = ({"{w}.absmax": Part(F32, _per_block)}, {"{w}.absmax": Part(BYTES, _per_block), **nested})
        for factors, unbounded in zip(kinds, ("", _NESTED_WHY), strict=True):
            values = tuple(np.unique(_VALUES[kind]).tolist())
            rounding = Rounding("{w}" + ABSMAX, ((WEIGHT, _ONES[kind]),), values, unbounded=unbounded)
            found.append(Scheme(WEIGHT, {**packed, **factors}, bits=4, dequantize=_four_bits, rounding=rounding))
    rows = {WEIGHT: Part(INT8), "{m}SCB": Part(F32, per_output), "{m}weight_format": optional(BYTES)}
    rounding = Rounding("{m}" + SCB, ((WEIGHT, 0x01),), span=128, epsilon=2.0**-11)  # weights become fp16 first
    return [*found, Scheme(WEIGHT, rows, tuple, may_transpose=True, dequantize=_eight_bits, rounding=rounding)]


_KNOWN = words(
    "load_in_4bit load_in_8bit _load_in_4bit _load_in_8bit bnb_4bit_compute_dtype bnb_4bit_quant_type "
    "bnb_4bit_quant_storage bnb_4bit_use_double_quant llm_int8_enable_fp32_cpu_offload llm_int8_has_fp16_weight "
    "llm_int8_threshold"
)
METHOD = Method(
    (NAME,), _bitsandbytes, unrecorded=lambda: _bitsandbytes({}), takes_plain=True, packages=(NAME,), known=_KNOWN
)
