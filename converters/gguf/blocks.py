"""Values of tensors stored in blocks, with llama.cpp's bits.

Layouts are ggml's (`ggml-common.h`, `ggml-quants.c`). Q8_0 has a float16 scale and 32 int8 values. MXFP4 has an E8M0
scale and 16 bytes; byte j has value j in its low half and value j + 16 in its high half.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from itertools import product
from typing import TYPE_CHECKING

from ckpt.base.errors import CkptError
from ckpt.plan.checkpoint import WEIGHT, StoredBlocks
from ckpt.plan.dtypes import BY_NAME, FLOAT16, FLOAT32
from ckpt.plan.tensors import Box, Extent, FlatRange, Fragment, Pieces, Shape, Tensor, Whole
from converters.gguf.header import TensorInfo
from converters.gguf.types import MXFP4, Q8_0, GgmlType

if TYPE_CHECKING:
    from numpy.typing import NDArray

#: Types with known values, and elements computed at once.
CHUNKS = {Q8_0: 1 << 21, MXFP4: 1 << 18}
#: FP4's values, doubled like in ggml. Minus zero is zero.
_FP4 = (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12)
#: Bytes of the scale, and the byte for numbers that are 1.
_ONES = {Q8_0: (2, 0x01), MXFP4: (1, 0x22)}
_UINT8 = BY_NAME["uint8"]

Computed = dict[str, Callable[[], memoryview]]


def whole_rows(shape: Shape, size: int) -> Iterator[Box]:
    """Yield boxes of whole rows, about `size` elements each, in row-major order."""
    *outer, rows, columns = shape if len(shape) > 1 else (1, *shape)
    step = max(1, size // max(1, columns))
    for lead in product(*map(range, outer)):
        for row in range(0, rows, step):
            box = Box((*lead, row, 0), (*(1,) * len(outer), min(step, rows - row), columns))
            yield box if len(shape) > 1 else Box((0,), shape)


def plain_tensor(entry: TensorInfo, path: str, *, ones: bool = False) -> tuple[Tensor, Computed]:
    """Return the float32 tensor, and functions that compute it.

    With `ones`, all stored numbers are 1: the values are the scales.
    """
    computed: Computed = {}
    pieces, done, start = [], 0, entry.start
    for box in whole_rows(entry.shape, CHUNKS[entry.type]):
        size = box.numel // entry.type.block * entry.type.size
        name = f"gguf{'-scales' * ones}:{path}:{start}"  # the file's path, because two files may be compared
        computed[name] = partial(_values, path, start, size, entry.type, ones)
        extent = Extent.contiguous(name, 0, FLOAT32, (box.numel,))
        pieces.append(Fragment(FlatRange(done, done + box.numel), extent))
        done, start = done + box.numel, start + size
    return Tensor(entry.name, WEIGHT, FLOAT32, entry.shape, Pieces(tuple(pieces))), computed


def unknown_tensor(entry: TensorInfo, path: str, error: CkptError) -> tuple[Tensor, Computed]:
    def refuse() -> memoryview:
        raise error

    name = f"gguf:{path}:{entry.start}"
    extent = Extent.contiguous(name, 0, FLOAT32, entry.shape)
    return Tensor(entry.name, WEIGHT, FLOAT32, entry.shape, Whole(extent)), {name: refuse}


def stored_blocks(entry: TensorInfo, path: str) -> tuple[StoredBlocks, Computed]:
    """Return storage, and functions that compute scales."""
    found = StoredBlocks(entry.type.name, entry.type.nbytes(entry.shape))
    if entry.type not in CHUNKS:
        return found, {}
    scales, computed = plain_tensor(entry, path, ones=True)
    if entry.type == Q8_0:
        return replace(found, scales=scales, scale_dtype=FLOAT16, span=127), computed
    values = tuple(sorted({one / 2 for one in _FP4}))
    return replace(found, scales=scales, scale_dtype=_UINT8, values=values), computed


def _values(path: str, start: int, size: int, kind: GgmlType, ones: bool) -> memoryview:
    import numpy as np

    from ckpt.move.source import opened, read_at

    with opened(path) as descriptor:
        stored = np.frombuffer(read_at(descriptor, path, start, size), np.uint8).reshape(-1, kind.size)
    if ones:
        first, one = _ONES[kind]
        stored = np.pad(stored[:, :first], ((0, 0), (0, kind.size - first)), constant_values=one)
    values = _q8_0(stored) if kind == Q8_0 else _mxfp4(stored)
    content: memoryview = np.ascontiguousarray(values).data.cast("B")
    return content


def _q8_0(blocks: NDArray) -> NDArray:
    import numpy as np

    scales = blocks[:, :2].copy().view("<f2").astype(np.float32)
    return blocks[:, 2:].view(np.int8).astype(np.float32) * scales


def _mxfp4(blocks: NDArray) -> NDArray:
    import numpy as np

    exponents = blocks[:, :1].astype(np.uint32)  # half the scale: the values are doubled
    small = np.uint32(1 << 21) << np.minimum(exponents, 1)
    scales = np.where(exponents < 2, small, (np.maximum(exponents, 1) - 1) << np.uint32(23)).astype(np.uint32)
    scales[exponents == 255] = 0x7FC00000  # NaN in OCP's format; llama.cpp's C code ignores it
    codes = np.concatenate([blocks[:, 1:] & 15, blocks[:, 1:] >> 4], axis=1)
    with np.errstate(over="ignore"):  # infinite in llama.cpp, too
        values: NDArray = np.array(_FP4, np.float32)[codes] * scales.view(np.float32)
    return values
