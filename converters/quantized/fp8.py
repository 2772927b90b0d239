"""FP8 with a scale per block, for linear layers in DeepSeek-V3 and transformers' fine-grained FP8.

Sources: DeepSeek-V3 `inference/kernel.py` (`weight_dequant`, called by its `fp8_cast_bf16.py`), transformers 5.23
`integrations/finegrained_fp8.py` (`Fp8Dequantize`). `NAME` is float8_e4m3fn [..., out, in]. `NAME_scale_inv` [..., out
blocks, in blocks] is a factor, despite its name, for every block of `weight_block_size` elements; a row's or column's
last block may be shorter. It may also be one factor for the whole tensor. Both are widened to fp32 and multiplied, and
the product is rounded once.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache, partial
from math import prod

import numpy as np
from numpy.typing import NDArray

from ckpt.base.errors import UsageError
from ckpt.plan.dtypes import BY_NAME
from ckpt.plan.precision import CAST_SOURCES
from ckpt.plan.tensors import Box, whole
from converters.quantized._weight import StoredWeights, Weight, WeightBlock, rounded
from converters.quantized.blocks import BLOCK, spans

METHOD = "fp8"
SCALE = "_scale_inv"

_E4M3 = BY_NAME["float8_e4m3fn"]
#: Suffixes for activation scales, not needed with plain weights.
_ACTIVATIONS = ("activation_scale", "input_scale")


def find(stored: StoredWeights) -> Iterator[Weight]:
    """Yield every weight stored with block scales. Raise CorruptError if one is incomplete."""
    for name, scales in stored.tensors.items():
        owner = name.removesuffix(SCALE)
        if owner == name:
            continue
        tensor = stored.part(owner, owner)
        if tensor.dtype != _E4M3 or len(tensor.shape) < 2:
            raise stored.corrupt(owner, f"a {_E4M3} matrix", f"{tensor.dtype} {list(tensor.shape)}")
        if scales.dtype not in CAST_SOURCES:
            raise UsageError(
                "ckpt cannot dequantize scales in this dtype",
                path=stored.checkpoint.path,
                fqn=name,
                expected=" or ".join(sorted(d.name for d in CAST_SOURCES)),
                found=scales.dtype,
            )
        size = _block_size(stored, name, tensor.shape, scales.shape)
        module = owner.rpartition(".")[0]
        unused = tuple(n for n in (f"{module}.{end}" for end in _ACTIVATIONS) if n in stored.tensors)
        yield _weight(stored, owner, size, unused)


def _block_size(stored: StoredWeights, name: str, shape: tuple[int, ...], scales: tuple[int, ...]) -> tuple[int, int]:
    if prod(scales) == 1:
        return shape[-2], shape[-1]
    given = stored.quantization.get("weight_block_size")
    sizes = given if isinstance(given, list) and len(given) == 2 else [0]
    if not all(type(size) is int and size > 0 for size in sizes):
        raise UsageError(
            "the config does not record the block size",
            path=stored.checkpoint.path,
            fqn=name,
            expected="weight_block_size, two sizes, in quantization_config",
            found=repr(given),
        )
    rows, columns = sizes
    expected = (*shape[:-2], -(-shape[-2] // rows), -(-shape[-1] // columns))
    if scales != expected:
        raise stored.corrupt(name, f"shape {list(expected)}, blocks of {rows} by {columns}", f"shape {list(scales)}")
    return rows, columns


def _weight(stored: StoredWeights, owner: str, size: tuple[int, int], unused: tuple[str, ...]) -> Weight:
    shape = stored.tensors[owner].shape
    rows = BLOCK // max(1, shape[-1])
    if size[0] < shape[-2]:  # cut only between blocks
        rows = max(size[0], rows // size[0] * size[0])
    blocks = []
    for lead in np.ndindex(*shape[:-2]):
        for start, stop in spans(shape[-2], rows):
            box = Box((*lead, start, 0), (*(1,) * len(lead), stop - start, shape[-1]))
            blocks.append(WeightBlock(box, partial(_matrix_rows, stored, owner, size, box)))
    return Weight(owner, METHOD, stored.dtype, shape, (owner, owner + SCALE), tuple(blocks), unused)


def _matrix_rows(stored: StoredWeights, owner: str, size: tuple[int, int], box: Box) -> memoryview:
    """Compute some rows of one matrix. The first row starts a block."""
    num_rows, num_columns = box.sizes[-2:]
    values = e4m3_values()[stored.read(owner, box).reshape(num_rows, num_columns)]
    scales = _scales(stored, owner + SCALE, size[0], box)
    for number, (start, stop) in enumerate(spans(num_rows, size[0])):
        values[start:stop] *= np.repeat(scales[number], size[1])[:num_columns]
    return rounded(values, stored.dtype)


def _scales(stored: StoredWeights, name: str, size: int, rows: Box) -> NDArray:
    """Return the fp32 scales for some rows, with shape [blocks of `size` rows, blocks of columns]."""
    tensor = stored.tensors[name]
    box = whole(tensor.shape)
    if tensor.numel != 1:
        *lead, first, _ = rows.offsets
        start, stop = first // size, -(-(first + rows.sizes[-2]) // size)
        box = Box((*lead, start, 0), (*(1,) * len(lead), stop - start, tensor.shape[-1]))
    return stored.scales(name, box).reshape(-1, 1 if tensor.numel == 1 else tensor.shape[-1])


@cache
def e4m3_values() -> NDArray:
    """Return e4m3fn's 256 values: 4 exponent bits with bias 7, no infinities, NaN if all bits are set."""
    byte = np.arange(256)
    exponent, fraction = (byte >> 3) & 15, (byte & 7).astype(np.float64)
    value = np.where(exponent == 0, np.ldexp(fraction, -9), np.ldexp(1 + fraction / 8, exponent - 7))
    value[(byte & 0x7F) == 0x7F] = np.nan
    return np.where(byte >> 7, -value, value).astype(np.float32)
