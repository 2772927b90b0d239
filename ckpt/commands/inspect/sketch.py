"""Drawing of a tensor: slices as patches of a rectangle.

Elements run from left to right in row-major order, so along the first dim. If another dim is sharded, as in a
row-parallel layer, it runs from top to bottom.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise, product
from math import prod
from typing import Literal

from ckpt.commands.inspect.overview import ranks_text
from ckpt.plan.tensors import (
    Box,
    FlatRange,
    Fragment,
    Padded,
    Region,
    Shape,
    Tensor,
    cut_of,
    flat_range,
    is_inside,
    region_boxes,
)
from ckpt.plan.tiling import TilingFault, faults_of

#: A rank or, if no rank is known, a file.
Holder = int | str
#: `several`: different holders' slices, too narrow to draw separately.
Kind = Literal["held", "several", "padding", "hole", "overlap"]


@dataclass(frozen=True, slots=True)
class Patch:
    """A rectangle in a row, with edges as fractions of width and height."""

    kind: Kind
    left: float
    top: float
    right: float
    bottom: float
    holders: tuple[Holder, ...] = ()
    region: str = ""


@dataclass(frozen=True, slots=True)
class Sketch:
    """`across` and `down` name the horizontal and vertical dims. `bands` counts slices from top to bottom."""

    patches: tuple[Patch, ...]
    across: str
    down: str = ""
    bands: int = 1
    copies: int = 1
    padding: int = 0
    faults: tuple[str, ...] = ()
    remarks: tuple[str, ...] = ()


def holder_text(holders: Iterable[Holder]) -> str:
    """Return `ranks 0-3`, `rank 2`, or file names."""
    every = list(holders)
    ranks = [holder for holder in every if isinstance(holder, int)]
    texts = [f"rank{'s' if len(ranks) > 1 else ''} {ranks_text(ranks)}"] if ranks else []
    return ", ".join([*texts, *(holder for holder in every if isinstance(holder, str))])


class Sketcher:
    """Draws equally sharded tensors once, and counts each holder's bytes by role."""

    def __init__(self, name: Callable[[Fragment], Holder]) -> None:
        self._name = name
        self._known: dict[object, tuple[Sketch, Mapping[Holder, int]]] = {}
        self._times: Counter[tuple[object, str]] = Counter()

    def sketch(self, tensor: Tensor, padding: Box | None) -> Sketch:
        cuts = [cut_of(source, tensor.shape) for source in (tensor.source, *tensor.replicas)]
        parts = (*self._parts(tensor), tuple(faults_of(tensor))) if None in cuts else None
        key: object = (tensor.shape, padding, parts or (tensor.dtype, *cuts))
        if key not in self._known:
            copies, padding_parts, faults = parts or (*self._parts(tensor), tuple(faults_of(tensor)))
            by_holder: dict[Holder, int] = dict.fromkeys((part.holder for part in padding_parts), 0)
            for part in (part for copy in copies for part in copy):
                by_holder[part.holder] = by_holder.get(part.holder, 0) + part.nbytes
            self._known[key] = _sketch(tensor.shape, padding, copies[0], copies[1:], padding_parts, faults), by_holder
        self._times[key, tensor.role] += 1
        return self._known[key][0]

    @property
    def by_role(self) -> dict[Holder, Counter[str]]:
        """Bytes by holder and role. Holders with nothing but padding have no roles."""
        found: dict[Holder, Counter[str]] = {}
        for (key, role), times in self._times.items():
            for holder, nbytes in self._known[key][1].items():
                counts = found.setdefault(holder, Counter())
                if nbytes:
                    counts[role] += nbytes * times
        return found

    def _parts(self, tensor: Tensor) -> tuple[tuple[tuple[_Part, ...], ...], tuple[_Part, ...]]:
        copies = tuple(
            tuple(
                _Part(fragment.region, self._name(fragment), fragment.extent.nbytes)
                for fragment in source.fragments(tensor.shape)
            )
            for source in (tensor.source, *tensor.replicas)
        )
        return copies, tuple(_Part(part.region, self._name(part), 0) for part in _padding_fragments(tensor))


@dataclass(frozen=True, slots=True)
class _Part:
    region: Region
    holder: Holder
    nbytes: int


def _padding_fragments(tensor: Tensor) -> Iterable[Fragment]:
    return tensor.source.padding(tensor.shape) if isinstance(tensor.source, Padded) else ()


def _sketch(
    shape: Shape,
    padding: Box | None,
    parts: tuple[_Part, ...],
    copies: tuple[tuple[_Part, ...], ...],
    padding_parts: tuple[_Part, ...],
    faults: tuple[TilingFault, ...],
) -> Sketch:
    parts, *inside = (tuple(part for part in copy if is_inside(part.region, shape)) for copy in (parts, *copies))
    copies = tuple(inside)
    marked = [padding] if padding is not None and is_inside(padding, shape) else []
    num_behind = sum(part.region.numel for part in padding_parts)
    plane = _Plane.of([part.region for copy in (parts, *copies) for part in copy], marked, shape, num_behind)

    def patches() -> Iterator[Patch]:
        copied: dict[Region, list[Holder]] = {}
        for copy in copies:
            for part in copy:
                copied.setdefault(_place(part.region, shape), []).append(part.holder)
        for part in parts:
            others = copied.get(_place(part.region, shape), ())
            yield from plane.patches("held", part.region, tuple(dict.fromkeys((part.holder, *others))))
        for part in padding_parts:
            yield from plane.patches("padding", part.region, (part.holder,))
        for box in marked:
            yield from plane.patches("padding", box, ())
        for fault in faults:
            if fault.kind in ("hole", "overlap"):
                yield from plane.patches("hole" if fault.kind == "hole" else "overlap", fault.region, ())

    drawn = tuple(patches())
    return Sketch(
        drawn,
        "elements" if plane.across is None else f"dim {plane.across}",
        ", then ".join(f"dim {dim}" for dim in plane.down),
        len({patch.top for patch in drawn}) or 1,
        len(copies) + 1,
        num_behind + sum(box.numel for box in marked),
        tuple(map(str, faults)),
        tuple(_cut_otherwise(parts, copies, shape)),
    )


def _place(region: Region, shape: Shape) -> Region:
    """Return the same region for equal parts, whatever their description."""
    return region if isinstance(region, FlatRange) else flat_range(region, shape) or region


def _cut_otherwise(parts: Sequence[_Part], copies: Sequence[Sequence[_Part]], shape: Shape) -> Iterator[str]:
    """Note copies with different slices."""
    drawn = {_place(part.region, shape) for part in parts}
    for number, copy in enumerate(copies, 2):
        others = [part.holder for part in copy if _place(part.region, shape) not in drawn]
        if others:
            yield f"copy {number} is cut otherwise: {holder_text(dict.fromkeys(others))}"


@dataclass(frozen=True, slots=True)
class _Plane:
    """Coordinates for drawing a tensor's elements.

    Either all `numel` elements run from left to right in row-major order. Or dim `across` runs from left to right and
    the dims `down` from top to bottom, later ones nested in the parts (`edges`) of earlier ones.
    """

    shape: Shape
    numel: int
    across: int | None = None
    down: tuple[int, ...] = ()
    edges: tuple[tuple[int, ...], ...] = ()

    @classmethod
    def of(cls, regions: Sequence[Region], marked: Sequence[Box], shape: Shape, padding_parts: int) -> _Plane:
        if all(isinstance(_place(region, shape), FlatRange) for region in [*regions, *marked]):
            return cls(shape, prod(shape) + padding_parts)
        boxes = [box for region in [*regions, *marked] for box in region_boxes(region, shape)]
        cut = [dim for dim, size in enumerate(shape) if any(box.sizes[dim] != size for box in boxes)]
        across, down = (cut[0], cut[1:]) if len(cut) > 1 else (0, [dim for dim in cut if dim])
        edges = tuple(
            tuple(sorted({0, shape[dim]} | {edge for box in boxes for edge in (box.offsets[dim], box.ends[dim])}))
            for dim in down
        )
        return cls(shape, prod(shape), across, tuple(down), edges)

    def patches(self, kind: Kind, region: Region, holders: tuple[Holder, ...]) -> Iterator[Patch]:
        if not region.numel or not self.numel:
            return
        if self.across is None:
            flat = _place(region, self.shape)
            assert isinstance(flat, FlatRange)
            yield Patch(kind, flat.start / self.numel, 0.0, flat.stop / self.numel, 1.0, holders, str(flat))
            return
        text = str(region)
        for box in region_boxes(region, self.shape):
            columns, rows = self._runs(box, self.across), list(self._rows(box, 0))
            for (left, right), (top, bottom) in product(columns, rows):
                yield Patch(kind, left, top, right, bottom, holders, text)

    def _runs(self, box: Box, dim: int) -> list[tuple[float, float]]:
        """Return fractions: one run, or one per element for a strided box."""
        size, start, step = self.shape[dim], box.offsets[dim], box.all_steps[dim]
        if step == 1:
            return [(start / size, (start + box.sizes[dim]) / size)]
        return [((start + i * step) / size, (start + i * step + 1) / size) for i in range(box.sizes[dim])]

    def _rows(self, box: Box, level: int) -> Iterator[tuple[float, float]]:
        if level == len(self.down):
            yield 0.0, 1.0
            return
        runs = self._runs(box, self.down[level])
        if level == len(self.down) - 1:
            yield from runs
            return
        inner = list(self._rows(box, level + 1))
        size = self.shape[self.down[level]]
        for first, last in runs:
            for start, stop in pairwise(edge / size for edge in self.edges[level]):
                if first <= start and stop <= last:
                    yield from ((start + (stop - start) * a, start + (stop - start) * b) for a, b in inner)
