"""Weight to quantize, and its parts."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from threading import Lock

import numpy as np
from numpy.typing import NDArray

from ckpt.base.errors import LossError, UsageError
from ckpt.base.words import Message
from ckpt.move.files import OpenFiles
from ckpt.move.finite import as_finite_values, chosen_bits, finite_values
from ckpt.move.reading import Computed
from ckpt.plan.dtypes import BFLOAT16, DType
from ckpt.plan.precision import Choice
from ckpt.plan.tensors import Box, Shape
from converters.quantized._weight import StoredWeights
from converters.quantized.blocks import spans

#: Elements computed at a time, in steps.
ELEMENTS = 1 << 21
#: With smaller steps, threads wait for the interpreter's lock.
STEP = 1 << 19


@dataclass(frozen=True, slots=True)
class PlainWeight:
    """Weight in the dtype in which it would be written plain.

    `fused` are the weights that servers fuse with this one. `stored` has its parts in a model to imitate.
    """

    fqn: str
    choice: Choice
    computed: Computed
    path: str
    fused: FusedWeights = field(default_factory=lambda: FusedWeights(()), compare=False)
    stored: StoredParts | None = None

    @property
    def shape(self) -> Shape:
        return self.choice.tensor.shape

    def read(self, box: Box) -> NDArray:
        """Return fp32 values, rounded to the weight's dtype. Raise CorruptError for NaN or infinity."""
        return finite_values(self.choice, box, self.computed, self.path)

    def row_boxes(self, size: int, step: int = 1) -> list[Box]:
        """Return boxes of whole rows: `size` elements and a multiple of `step` rows."""
        shape = self.shape
        rows = max(step, size // max(1, shape[-1]) // step * step)
        return [
            Box((*lead, start, 0), (*(1 for _ in lead), stop - start, shape[-1]))
            for lead in np.ndindex(*shape[:-2])
            for start, stop in spans(shape[-2], rows)
        ]

    def check_dtype(self, method: str, *dtypes: DType) -> None:
        if self.choice.dtype not in dtypes:
            raise UsageError(
                Message("{quantize} can't quantize weights in {}", self.choice.dtype, quantize=method),
                path=self.path,
                fqn=self.fqn,
                expected=" or ".join(map(str, dtypes)),
                found=self.choice.dtype,
                hint=Message("add {dtype=bf16}"),
            )

    def refused(self, why: str, found: object) -> LossError:
        return LossError(why, path=self.path, fqn=self.fqn, found=found)


class FusedWeights:
    def __init__(self, members: Sequence[PlainWeight]) -> None:
        self._members, self._lock, self._largest = members, Lock(), np.float32(-1)

    def largest(self) -> np.float32:
        with self._lock:
            if self._largest < 0:
                found = [np.float32(0)]
                for one, box in [(member, box) for member in self._members for box in member.row_boxes(STEP)]:
                    values = one.read(box)
                    found.append(max(values.max(initial=0), -values.min(initial=0)))
                self._largest = max(found)
            return self._largest


@dataclass(frozen=True, slots=True)
class PackedPart:
    """Part with one element for every `rows` by `columns` plain ones. None is the whole row."""

    dtype: DType
    rows: int = 1
    columns: int | None = 1

    def box(self, box: Box) -> Box:
        *lead, first, _ = box.offsets
        *ones, num_rows, num_columns = box.sizes
        columns = 1 if self.columns is None else -(-num_columns // self.columns)
        return Box((*lead, first // self.rows, 0), (*ones, -(-num_rows // self.rows), columns))

    def shape(self, plain: Shape) -> Shape:
        return self.box(Box((0,) * len(plain), plain)).sizes


@dataclass(frozen=True, slots=True)
class PackedBlock:
    """A box in each part, and a function that computes all bytes.

    `plain` is the box in the plain weight; None means that all rows share the parts. `is_transposed` if the parts' rows
    are its columns. `step` rows share scales.
    """

    boxes: tuple[Box, ...]
    content: Callable[[], memoryview]
    plain: Box | None = None
    is_transposed: bool = False
    step: int = 1


@dataclass(frozen=True, slots=True)
class PackedParts:
    """Parts of a quantized weight by name template, and blocks that tile them."""

    parts: Mapping[str, tuple[DType, Shape]]
    blocks: tuple[PackedBlock, ...]


@dataclass(frozen=True, slots=True)
class StoredParts:
    weights: StoredWeights
    names: Mapping[str, str]

    def content(self, parts: PackedParts, block: PackedBlock) -> memoryview:
        boxes = zip((self.names[template] for template in parts.parts), block.boxes, strict=True)
        found = [self.weights.read(name, box).reshape(-1).view(np.uint8) for name, box in boxes]
        return np.concatenate(found).data

    def scales(self, template: str) -> NDArray:
        return self.weights.scales(self.names[template])


def largest_in(values: NDArray, axis: int) -> NDArray:
    found: NDArray = np.abs(np.maximum(values.max(axis=axis), -values.min(axis=axis)))  # zero may have a sign
    return found


def largest_in_groups(values: NDArray, size: int) -> NDArray:
    """Return largest absolute values in groups along the last dim."""
    found: NDArray = np.maximum.reduceat(np.abs(values).reshape(-1), np.arange(0, values.size, size))
    return found.reshape(*values.shape[:-1], -1)


Computation = Callable[[PlainWeight, NDArray], Sequence[NDArray]]
BitComputation = Callable[[NDArray], Sequence[NDArray] | None]


def packed_by_rows(
    weight: PlainWeight,
    parts: Mapping[str, PackedPart],
    compute: Computation,
    compute_bits: BitComputation = lambda _: None,
) -> PackedParts:
    """Return parts computed some rows at a time. `compute` takes fp32 rows.

    `compute_bits` takes bfloat16 rows. It is faster, and returns None if it can't give the same bits.
    """
    kinds, step = tuple(parts.values()), max(part.rows for part in parts.values())
    blocks = (
        PackedBlock(
            tuple(part.box(box) for part in kinds),
            partial(_content_of_rows, weight, box, kinds, compute, compute_bits),
            box,
            step=step,
        )
        for box in weight.row_boxes(ELEMENTS, step)
    )
    return PackedParts({name: (part.dtype, part.shape(weight.shape)) for name, part in parts.items()}, tuple(blocks))


def _content_of_rows(
    weight: PlainWeight, box: Box, parts: Sequence[PackedPart], compute: Computation, compute_bits: BitComputation
) -> memoryview:
    """Compute all parts' bytes for some rows."""
    *lead, first, _ = box.offsets
    *ones, num_rows, num_columns = box.sizes
    step = max(part.rows for part in parts)
    ends = np.cumsum([part.box(box).numel * part.dtype.itemsize for part in parts])
    content = np.empty(ends[-1], np.uint8)
    places = [0, *ends[:-1]]
    with OpenFiles() as sources:
        for start, stop in spans(num_rows, max(step, STEP // num_columns // step * step)):
            rows = Box((*lead, first + start, 0), (*ones, stop - start, num_columns))
            bits = chosen_bits(weight.choice, rows, weight.computed, sources).reshape(stop - start, num_columns)
            found = compute_bits(bits) if weight.choice.dtype == BFLOAT16 else None
            if found is None:
                values = as_finite_values(bits.reshape(rows.sizes), weight.choice, rows, weight.computed, weight.path)
                found = compute(weight, values.reshape(bits.shape))
            for number, one in enumerate(found):
                content[places[number] : places[number] + one.nbytes] = np.ravel(one).view(np.uint8)
                places[number] += one.nbytes
    return content.data
