"""The proof that regions tile a tensor: every element is covered, and none twice."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from math import lcm, prod

from ckpt.plan.tensors import Box, FlatRange, Region, Shape, flat_range, is_inside, region_boxes, stepped


@dataclass(frozen=True, slots=True)
class TilingFault:
    """Why regions do not tile a tensor: `kind` is `hole`, `overlap` or `outside`."""

    kind: str
    region: Region


def check_tiling(regions: Sequence[Region], shape: Shape, *, overlaps: bool = False) -> TilingFault | None:
    """None if the regions cover every element of `shape` exactly once; otherwise the first fault found.

    With `overlaps`, at least once will do.
    """
    if len(regions) == 1 and isinstance(regions[0], Box) and regions[0].is_whole(shape):  # nearly all there are
        return None
    return next(tiling_faults(regions, shape, overlaps=overlaps), None)


def tiling_faults(regions: Sequence[Region], shape: Shape, *, overlaps: bool = False) -> Iterator[TilingFault]:
    """Every fault that `check_tiling` looks for; a region that lies outside covers nothing.

    One hole or overlap may come in several parts.
    """
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
    """Cut space into slabs at every edge of the next dim and check each slab in the dims that are left.

    `offsets` and `sizes` are the slab so far.
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
    """Check a dim with steps as several dims without: one of every residue."""
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
