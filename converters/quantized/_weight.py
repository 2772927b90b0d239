"""Computation of a quantized weight's plain values."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property, partial
from math import prod
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ckpt.base.errors import CorruptError, UsageError
from ckpt.base.text import pluralize
from ckpt.move.casts import cast_bits, storage_dtype
from ckpt.move.reading import read_box
from ckpt.plan import services
from ckpt.plan.checkpoint import Checkpoint
from ckpt.plan.dtypes import BFLOAT16, BY_NAME, CASTABLE, FLOAT32, DType
from ckpt.plan.namespace import config_parts
from ckpt.plan.tensors import Box, Region, Shape, Tensor, whole
from converters.quantized.blocks import BLOCK, spans
from converters.quantized.floats import e2m1_pairs, e4m3_values, e8m0_values
from converters.quantized.headers import file_metadata

#: Elements per step, fitting the processor's cache.
_CACHE_SIZED = 1 << 18
#: Dtypes for exponents.
_EXPONENTS = (BY_NAME["float8_e8m0fnu"], BY_NAME["uint8"])
E4M3 = BY_NAME["float8_e4m3fn"]
#: Models with Conv1D layers, for use without transformers.
_CONV1D_MODELS = ("clvp", "decision_transformer", "gpt2", "imagegpt", "openai-gpt")


@dataclass(frozen=True, slots=True)
class WeightBlock:
    """Region in a plain tensor, computed in row-major order.

    If `transposed`, the elements are in the transposed matrix's order.
    """

    region: Region
    content: Callable[[], memoryview]
    transposed: bool = False


@dataclass(frozen=True, slots=True)
class Weight:
    """Quantized weight with its plain name, dtype and shape, and blocks that tile it.

    `rows` computes a box of whole rows, or of a transposed weight's whole columns.
    """

    fqn: str
    method: str
    dtype: DType
    shape: Shape
    parts: tuple[str, ...]
    blocks: tuple[WeightBlock, ...]
    rows: Callable[[Box], memoryview] | None = None


@dataclass(frozen=True)
class StoredWeights:
    """Tensors to search for quantized weights. `dtype` is the target's."""

    checkpoint: Checkpoint
    tensors: Mapping[str, Tensor]
    dtype: DType

    def read(self, fqn: str, box: Box | None = None) -> NDArray:
        tensor = self.tensors[fqn]
        return read_box(tensor, whole(tensor.shape) if box is None else box, self.checkpoint.computed)

    @cached_property
    def header(self) -> Callable[[str], Mapping[str, str]]:
        return file_metadata(self.tensors)

    def scales(self, fqn: str, box: Box | None = None) -> NDArray:
        """Return a scale's values in fp32, flat. Bytes are exponents. Raise CorruptError for NaN or infinity."""
        bits, dtype = self.read(fqn, box).reshape(-1), self.tensors[fqn].dtype
        if dtype in _EXPONENTS:
            values = e8m0_values()[bits.view(np.uint8)]
        elif dtype == E4M3:
            values = e4m3_values()[bits.view(np.uint8)]
        else:
            values = cast_bits(bits, dtype, FLOAT32).view(np.float32).reshape(-1)
        self.check_finite(fqn, np.isfinite(values), box)
        return values

    def check_finite(self, fqn: str, is_finite: NDArray, box: Box | None = None) -> None:
        """Raise CorruptError for the first scale that is not finite. `box` is the part read."""
        if is_finite.all():
            return
        box = whole(self.tensors[fqn].shape) if box is None else box
        inner = np.unravel_index(int(np.argmin(is_finite)), box.sizes) if box.sizes else ()
        index = [int(offset) + int(i) for offset, i in zip(box.offsets, inner, strict=True)]
        raise CorruptError(
            "a quantized weight has a NaN or infinite scale, so the plain weight would be too",
            path=self.checkpoint.path,
            fqn=fqn,
            expected="finite scales",
            found=f"element {index}; {pluralize(int((~is_finite).sum()), 'such scale')} in the part read here",
            hint="use `ckpt check --values` to find all of them; download or copy the folder again",
        )

    @cached_property
    def conv1d(self) -> frozenset[str]:
        """Conv1D modules from transformers, whose weight is [in, out]."""
        config = self.checkpoint.config
        known = services.modules.has_conv1d(config)
        if known is None and (config or {}).get("model_type") not in _CONV1D_MODELS:
            known = False
        if known is False:
            return frozenset()
        modules = services.modules.describe(config, {fqn: tensor.shape for fqn, tensor in self.tensors.items()}, None)
        if modules is None:
            raise UsageError(
                "some layers may store transposed weights, and only the model's class can tell",
                path=self.checkpoint.path,
                hint="pip install 'transformers>=5' torch",
            )
        return frozenset(name for name, module in modules.items() if module.is_conv1d)

    def unsupported(self, fqn: str, *, expected: object = None, found: object) -> UsageError:
        return UsageError(
            "ckpt cannot dequantize this weight",
            path=self.checkpoint.path,
            fqn=fqn,
            expected=expected,
            found=found,
            hint="take the full-precision model from before quantization",
        )

    def corrupt(self, fqn: str, expected: object, found: object) -> CorruptError:
        return CorruptError(
            "a part is wrong in a quantized weight",
            path=self.checkpoint.path,
            fqn=fqn,
            expected=expected,
            found=found,
        )


def as_rounded(values: NDArray, dtype: DType) -> NDArray:
    """Round fp32 `values` to `dtype`, still in fp32."""
    if dtype == FLOAT32:
        return values
    bits = cast_bits(np.ascontiguousarray(values).reshape(-1).view(np.uint32), FLOAT32, dtype)
    return cast_bits(bits, dtype, FLOAT32).view(np.float32).reshape(values.shape)


def as_bits(values: NDArray, dtype: DType) -> NDArray:
    return np.frombuffer(rounded(values, dtype), storage_dtype(dtype)).reshape(values.shape)


def read_e4m3(stored: StoredWeights, fqn: str, box: Box) -> NDArray:
    return e4m3_values()[stored.read(fqn, box).view(np.uint8).reshape(box.sizes[-2:])]


def read_e2m1(stored: StoredWeights, fqn: str, box: Box) -> NDArray:
    """Return fp32 rows. `box` is in the plain matrix; a byte packs two columns."""
    packed = stored.read(fqn, Box(box.offsets, (*box.sizes[:-1], box.sizes[-1] // 2)))
    return e2m1_pairs()[packed.view(np.uint8)].reshape(box.sizes[-2:])


def unpacked(words: NDArray, bits: int) -> NDArray:
    """Unpack 4-bit or 8-bit unsigned integers along the rows of 32-bit words, lowest bits first."""
    packed = np.ascontiguousarray(words).view(np.uint8)
    return packed if bits == 8 else np.stack([packed & 15, packed >> 4], axis=-1).reshape(len(packed), -1)


def grouped(operate: np.ufunc, values: NDArray, numbers: NDArray, index: NDArray) -> None:
    """Combine [rows, columns] with [rows, groups], in place. `index` has every column's group."""
    for start, stop in spans(len(values), _CACHE_SIZED // max(1, values.shape[1])):
        with np.errstate(over="ignore"):
            operate(values[start:stop], numbers[start:stop, index], out=values[start:stop])


def model_dtype(config: Mapping[str, Any] | None) -> DType:
    """Return the config's dtype, or bfloat16, the usual dtype for quantized models."""
    for part in config_parts(config):
        name = str(part.get("dtype") or part.get("torch_dtype")).removeprefix("torch.")
        for dtype in CASTABLE.values():
            if dtype.name == name:
                return dtype
    return BFLOAT16


def rounded(values: NDArray, *dtypes: DType) -> memoryview:
    """Round fp32 `values` to each dtype in turn, and return bytes."""
    bits, now = np.ascontiguousarray(values, np.float32).reshape(-1).view(np.uint32), FLOAT32
    for dtype in dtypes:
        if dtype != now:
            bits, now = cast_bits(bits, now, dtype), dtype
    return bits.view(np.uint8).data


def num_groups(num_in: int, size: int) -> int:
    """Count groups. A `size` of -1 means one for all."""
    return 1 if size <= 0 else -(-num_in // size)


def group_index(num_in: int, size: int) -> NDArray:
    return np.arange(num_in) // (size if size > 0 else max(1, num_in))


def affine(
    stored: StoredWeights, scales: str, first: int, integers: NDArray, zeros: NDArray, index: NDArray
) -> memoryview:
    """Return (integer minus zero point) times scale, for the outputs from `first` on, rounded to the scales' dtype.

    `integers` is [outputs, inputs] in fp32 and is overwritten, `zeros` is [outputs, groups], and the stored `scales`
    are [groups, outputs]. `index` has each input's group.
    """
    groups, num_rows = stored.tensors[scales].shape[0], len(integers)
    factors = stored.scales(scales, Box((0, first), (groups, num_rows))).reshape(groups, num_rows).T
    grouped(np.subtract, integers, zeros, index)
    grouped(np.multiply, integers, factors, index)
    return rounded(integers, stored.tensors[scales].dtype, stored.dtype)


@dataclass(frozen=True, slots=True)
class ScaleGrid:
    """Numbers for blocks of `rows` by `columns` elements. None is the whole dim."""

    rows: int | None = None
    columns: int | None = None

    def scales(self, stored: StoredWeights, fqn: str, box: Box) -> NDArray:
        """Return fp32 scales, [blocks of rows, blocks of columns]. `box` starts at a block's start."""
        part, count = self._part(stored.tensors[fqn].shape, box)
        return stored.scales(fqn, part).reshape(count, -1)

    def bits(self, stored: StoredWeights, fqn: str, box: Box) -> NDArray:
        part, count = self._part(stored.tensors[fqn].shape, box)
        return stored.read(fqn, part).reshape(count, -1)

    def _part(self, shape: Shape, box: Box) -> tuple[Box, int]:
        """Return the box and its blocks of rows. Dims of size 1 may differ."""
        *lead, first, _ = box.offsets
        start, stop = (0, 1) if self.rows is None else (first // self.rows, -(-(first + box.sizes[-2]) // self.rows))
        inner = shape[len(lead) :]
        if len(shape) < len(lead) or prod(shape) == 1:
            return whole(shape), 1
        if not inner:
            return Box(tuple(lead), (1,) * len(lead)), 1
        offsets = (*lead, start, *(0 for _ in inner[1:]))
        return Box(offsets, (*(1 for _ in lead), stop - start, *inner[1:])), stop - start

    def apply(self, operate: np.ufunc, values: NDArray, numbers: NDArray) -> None:
        num_rows, num_columns = values.shape
        height = max(1, num_rows) if self.rows is None else self.rows
        for start, stop in spans(num_rows, _CACHE_SIZED // max(1, num_columns)):
            first = start // height
            some = numbers[first : -(-stop // height)]
            if self.columns is not None and some.shape[1] > 1:
                some = np.repeat(some, self.columns, axis=1)[:, :num_columns]
            if some.shape[0] > 1 and height > 1:
                some = np.repeat(some, height, axis=0)[start - first * height : stop - first * height]
            with np.errstate(over="ignore", invalid="ignore"):  # out of range, like in the library
                operate(values[start:stop], some, out=values[start:stop])


def by_rows(
    stored: StoredWeights,
    method: str,
    owner: str,
    shape: Shape,
    parts: tuple[str, ...],
    compute: Callable[[Box], memoryview],
    *,
    step: int = 1,
) -> Weight:
    """Compute some rows at a time: a multiple of `step`."""
    rows = max(step, BLOCK // max(1, shape[-1]) // step * step)
    boxes = (
        Box((*lead, start, 0), (*(1 for _ in lead), stop - start, shape[-1]))
        for lead in np.ndindex(*shape[:-2])
        for start, stop in spans(shape[-2], rows)
    )
    blocks = tuple(WeightBlock(box, partial(compute, box)) for box in boxes)
    return Weight(owner, method, stored.dtype, shape, parts, blocks, compute)
