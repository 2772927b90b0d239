"""Random tilings of tensors, and a numpy reading of them: files are arrays with one element per item."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from math import prod
from typing import Any

import numpy as np
from hypothesis import strategies as st
from numpy.typing import NDArray

from ckpt.plan.dtypes import FLOAT32, DType
from ckpt.plan.tensors import Box, Extent, FlatRange, Fragment, Pieces, Region, Shape, Tensor, flat_boxes, whole

Store = dict[str, NDArray]


def shapes(max_dims: int = 4, max_size: int = 5, min_size: int = 0) -> st.SearchStrategy[Shape]:
    """Draw shapes with and without dims, elements and size-1 dims."""
    return st.lists(st.integers(min_size, max_size), max_size=max_dims).map(tuple)


@st.composite
def box_tilings(draw: st.DrawFn, outer: Box, max_cuts: int = 6) -> list[Box]:
    """Draw boxes that tile `outer`: repeatedly cut a random box in two."""
    boxes = [outer]
    for _ in range(draw(st.integers(0, max_cuts))):
        index = draw(st.integers(0, len(boxes) - 1))
        box = boxes[index]
        dims = [dim for dim, size in enumerate(box.sizes) if size > 1]
        if not dims:
            continue
        dim = draw(st.sampled_from(dims))
        at = draw(st.integers(1, box.sizes[dim] - 1))
        offsets, low, high = list(box.offsets), list(box.sizes), list(box.sizes)
        low[dim], high[dim] = at, box.sizes[dim] - at
        offsets[dim] += at
        boxes[index : index + 1] = [Box(box.offsets, tuple(low)), Box(tuple(offsets), tuple(high))]
    return boxes


@st.composite
def flat_tilings(draw: st.DrawFn, start: int, stop: int) -> list[FlatRange]:
    """Draw flat ranges that tile `start:stop`: even slots of 1 to 17 ranks, or any cuts; some may be empty."""
    if draw(st.booleans()):
        slot = -(-(stop - start) // draw(st.integers(1, 17)))
        cuts = [*range(start, stop, slot), stop] if slot else [start, stop]
    else:
        cuts = [start, *sorted(draw(st.lists(st.integers(start, stop), max_size=6))), stop]
    return [FlatRange(a, b) for a, b in itertools.pairwise(cuts)]


@st.composite
def tilings(draw: st.DrawFn, shape: Shape) -> list[Region]:
    """Draw regions that tile a tensor, in any order: boxes, flat ranges, or both."""
    total = prod(shape)
    kind = draw(st.sampled_from(["boxes", "flat", "mixed"]))
    if kind == "boxes":
        regions: list[Region] = [*draw(box_tilings(whole(shape)))]
    elif kind == "flat":
        regions = [*draw(flat_tilings(0, total))]
    else:
        middle = draw(st.integers(0, total))
        regions = [*draw(flat_tilings(0, middle))]
        for box in flat_boxes(shape, middle, total):
            regions += draw(box_tilings(box, 3))
    return draw(st.permutations(regions)) if draw(st.booleans()) else regions


@st.composite
def extents(draw: st.DrawFn, region: Region, path: str, dtype: DType = FLOAT32) -> tuple[Extent, int]:
    """Draw an extent for `region` and its file's number of elements; a box may be transposed and have gaps."""
    before = draw(st.integers(0, 3))
    if isinstance(region, FlatRange):
        return Extent.contiguous(path, before * dtype.itemsize, dtype, (region.numel,)), before + region.numel
    strides, step = [0] * len(region.sizes), draw(st.sampled_from([1, 1, 2]))
    for dim in (
        draw(st.permutations(range(len(region.sizes)))) if draw(st.booleans()) else range(len(region.sizes))[::-1]
    ):
        strides[dim] = step
        step *= region.sizes[dim] + draw(st.sampled_from([0, 0, 0, 1]))
    extent = Extent(path, before * dtype.itemsize, dtype, region.sizes, tuple(strides))
    return extent, extent.end // dtype.itemsize


@st.composite
def stored(draw: st.DrawFn, values: NDArray, name: str, store: Store, dtype: DType = FLOAT32) -> list[Fragment]:
    """Write `values` to `store` in random pieces, one file per piece, with -1 everywhere else."""
    fragments = []
    for rank, region in enumerate(draw(tilings(values.shape))):
        path = f"{name}-{rank}"
        extent, length = draw(extents(region, path, dtype))
        store[path] = np.full(length, -1, values.dtype)
        store[path][positions(extent)] = values.reshape(-1)[indices(region, values.shape)]
        fragments.append(Fragment(region, extent, rank))
    return fragments


def tensor_of(
    fqn: str, values: NDArray, fragments: Iterable[Fragment], role: str = "weight", dtype: DType = FLOAT32, **more: Any
) -> Tensor:
    return Tensor(fqn, role, dtype, values.shape, Pieces(tuple(fragments)), **more)


def indices(region: Region, shape: Shape) -> NDArray:
    """Return row-major indices for a region's elements, in its extent's shape."""
    every = np.arange(prod(shape))
    if isinstance(region, FlatRange):
        return every[region.start : region.stop]
    dims = zip(region.offsets, region.sizes, region.all_steps, strict=True)
    return every.reshape(shape)[tuple(slice(a, a + n * step, step) for a, n, step in dims)]


def positions(extent: Extent) -> NDArray:
    """Return each element's file position, in elements and in the extent's shape."""
    assert extent.offset % extent.dtype.itemsize == 0
    found = np.full(extent.shape, extent.offset // extent.dtype.itemsize)
    for dim, (size, stride) in enumerate(zip(extent.shape, extent.strides, strict=True)):
        along = [1] * len(extent.shape)
        along[dim] = size
        found += (np.arange(size) * stride).reshape(along)
    return found


def assembled(fragments: Iterable[Fragment], shape: Shape, store: Store) -> NDArray:
    """Assemble the tensor from its fragments. Raise AssertionError unless they hold every element exactly once."""
    count, values = np.zeros(prod(shape), int), np.full(prod(shape), -2, np.int64)
    for fragment in fragments:
        where = indices(fragment.region, shape)
        assert where.shape == fragment.extent.shape
        np.add.at(count, where.reshape(-1), 1)
        values[where] = store[fragment.extent.path][positions(fragment.extent)]
    assert (count == 1).all()
    return values.reshape(shape)
