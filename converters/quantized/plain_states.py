"""Plain values for quantized optimizer states: see `converters.quantized.states`."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from ckpt.move.reading import read_box
from ckpt.plan.tensors import Box, Extent, Tensor, Whole
from converters.quantized.floats import e4m3_values


def compute(
    codes: Extent, factors: Extent, values: Extent | None, num_bits: int, block_size: int, start: int, stop: int
) -> memoryview:
    """Compute elements `start` to `stop` of a `Quantized` as fp32 bytes. `start` must be at a block's start."""
    per_byte = 8 // num_bits
    numbers = _read_values(codes, start // per_byte, -(-stop // per_byte))
    if per_byte == 2:
        numbers = np.stack([numbers >> 4, numbers & 15], axis=-1).reshape(-1)[: stop - start]
    of_blocks = _read_values(factors, start // block_size, -(-stop // block_size)).view(np.float32)
    table = e4m3_values() if values is None else _read_values(values, 0, values.numel).view(np.float32)
    plain = table[numbers]
    plain *= np.repeat(of_blocks, block_size)[: stop - start]
    content: memoryview = plain.view(np.uint8).data
    return content


def _read_values(extent: Extent, start: int, stop: int) -> NDArray:
    part = extent.flat(start, stop)
    return read_box(Tensor("", "", part.dtype, part.shape, Whole(part)), Box((0,), part.shape), {})
