"""Proof that regions tile a tensor: every element is covered exactly once."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from math import lcm, prod

from ckpt.plan.tensors import (
    Box,
    FlatRange,
    Fragment,
    Region,
    Shape,
    Source,
    Tensor,
    cut_of,
    fits,
    flat_range,
    is_inside,
    region_boxes,
    stepped,
)


@dataclass(frozen=True, slots=True)
class TilingFault:
    """Reason why regions do not tile a tensor: `kind` is `hole`, `overlap`, `outside` or `misfit`.

    A misfit is a `fragment` with an extent of the wrong size or dtype. `copy` numbers the tensor's copies.
    """

    kind: str
    region: Region
    copy: int = 1
    fragment: Fragment | None = None

    def __str__(self) -> str:
        where = f"copy {self.copy}: " if self.copy > 1 else ""
        if self.kind == "misfit":
            return f"{where}what should be {self.region} has another size or dtype"
        return f"{where}{self.kind} at {self.region}"


@dataclass(frozen=True, slots=True)
class Damage:
    fqn: str
    role: str
    faults: tuple[str, ...]


def damaged(tensors: Iterable[Tensor]) -> Iterator[Damage]:
    """Yield the tensors with faults. Tensors with the same partition are tested only once."""
    known: dict[Hashable, tuple[str, ...]] = {}
    for tensor in tensors:
        cuts = [cut_of(source, tensor.shape) for source in (tensor.source, *tensor.replicas)]
        key = tensor.key if None in cuts else (tensor.shape, tensor.dtype, *cuts)
        if key not in known:
            known[key] = tuple(map(str, faults_of(tensor)))
        if known[key]:
            yield Damage(tensor.fqn, tensor.role, known[key])


def faults_of(tensor: Tensor) -> Iterator[TilingFault]:
    for number, source in enumerate((tensor.source, *tensor.replicas), 1):
        yield from copy_faults(tensor, source, number)


def copy_faults(tensor: Tensor, source: Source, copy: int = 1) -> Iterator[TilingFault]:
    """Yield faults in one copy, misfits first."""
    fragments = list(source.fragments(tensor.shape))
    for fragment in fragments:
        if not fits(fragment.extent, fragment.region) or fragment.extent.dtype != tensor.dtype:
            yield TilingFault("misfit", fragment.region, copy, fragment)
    for fault in tiling_faults([fragment.region for fragment in fragments], tensor.shape):
        yield replace(fault, copy=copy)


def check_tiling(regions: Sequence[Region], shape: Shape, *, overlaps: bool = False) -> TilingFault | None:
    """Return the first fault, or None. With `overlaps`, covering an element several times is allowed."""
    if len(regions) == 1 and isinstance(regions[0], Box) and regions[0].is_whole(shape):  # the usual case
        return None
    return next(tiling_faults([*dict.fromkeys(regions)] if overlaps else regions, shape, overlaps=overlaps), None)


def tiling_faults(regions: Sequence[Region], shape: Shape, *, overlaps: bool = False) -> Iterator[TilingFault]:
    """Yield all faults. One hole or overlap may be reported in several parts."""
    total = prod(shape)
    inside = []
    for region in regions:
        if is_inside(region, shape):
            inside.append(region)
        else:
            yield TilingFault("outside", region)
    flat: list[FlatRange] = []
    for region in inside:
        as_flat = region if isinstance(region, FlatRange) else flat_range(region, shape)
        if as_flat is None:
            boxes = [box for region in inside for box in region_boxes(region, shape) if box.numel]
            yield from _sweep(boxes, (), (), shape, overlaps)
            return
        if as_flat.numel:
            flat.append(as_flat)
    flat.sort(key=lambda r: r.start)
    reached = 0
    for r in flat:
        if r.start > reached:
            yield TilingFault("hole", FlatRange(reached, r.start))
        if r.start < reached and not overlaps:
            yield TilingFault("overlap", FlatRange(r.start, min(reached, r.stop)))
        reached = max(reached, r.stop)
    if reached < total:
        yield TilingFault("hole", FlatRange(reached, total))


def _sweep(boxes: list[Box], offsets: Shape, sizes: Shape, shape: Shape, overlaps: bool) -> Iterator[TilingFault]:
    """Cut space into slabs at every edge in the next dim, and check each slab in the remaining dims.

    `offsets` and `sizes` describe the slab so far.
    """
    dim = len(offsets)
    if not boxes:
        yield TilingFault("hole", Box(offsets + (0,) * (len(shape) - dim), sizes + shape[dim:]))
        return
    if dim == len(shape):
        if len(boxes) > 1 and not overlaps:
            yield TilingFault("overlap", Box(offsets, sizes))
        return
    if any(box.steps and box.steps[dim] != 1 for box in boxes):
        yield from _sweep_residues(boxes, offsets, sizes, shape, overlaps)
        return
    edges = sorted({0, shape[dim]} | {e for b in boxes for e in (b.offsets[dim], b.offsets[dim] + b.sizes[dim])})
    is_rest = boxes[0].offsets[dim:] == (0,) * (len(shape) - dim) and boxes[0].sizes[dim:] == shape[dim:]
    if len(boxes) == 1 and is_rest:
        return
    by_start = sorted(boxes, key=lambda b: b.offsets[dim])
    active: list[Box] = []
    upcoming = 0
    for start, stop in pairwise(edges):
        active = [b for b in active if b.offsets[dim] + b.sizes[dim] > start]
        while upcoming < len(by_start) and by_start[upcoming].offsets[dim] <= start:
            active.append(by_start[upcoming])
            upcoming += 1
        yield from _sweep(active, (*offsets, start), (*sizes, stop - start), shape, overlaps)


def _sweep_residues(
    boxes: list[Box], offsets: Shape, sizes: Shape, shape: Shape, overlaps: bool
) -> Iterator[TilingFault]:
    """Split a dim with steps into residue classes without steps."""
    dim = len(offsets)
    step = lcm(*(box.all_steps[dim] for box in boxes))
    for residue in range(min(step, shape[dim])):
        comb = Box((residue,), ((shape[dim] - residue - 1) // step + 1,), (step,))
        inside = []
        for box in boxes:
            common = Box((box.offsets[dim],), (box.sizes[dim],), (box.all_steps[dim],)).intersect(comb)
            if common is not None:
                part = common.relative_to(comb)
                inside.append(_with_dim(box, dim, part.offsets[0], part.sizes[0]))
        for fault in _sweep(inside, offsets, sizes, (*shape[:dim], *comb.sizes, *shape[dim + 1 :]), overlaps):
            assert isinstance(fault.region, Box)
            within = fault.region.offsets[dim] * step + residue, fault.region.sizes[dim], step
            yield replace(fault, region=_with_dim(fault.region, dim, *within))


def _with_dim(box: Box, dim: int, offset: int, size: int, step: int = 1) -> Box:
    def put(values: Shape, value: int) -> Shape:
        return (*values[:dim], value, *values[dim + 1 :])

    return stepped(put(box.offsets, offset), put(box.sizes, size), put(box.all_steps, step))
