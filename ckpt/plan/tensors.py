"""Boxes, extents, fragments and logical tensors: pure arithmetic, no I/O, no torch.

To convert, compare or reshard is to intersect two descriptions (`overlay`), with the proof that neither has holes or
overlaps (`ckpt.plan.tiling`).
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import gcd, prod
from operator import add
from typing import NamedTuple, Protocol, cast, runtime_checkable

from ckpt.plan.dtypes import DType

Shape = tuple[int, ...]


#: Source for padding that is not stored.
ZEROS = "/dev/zero"


class Box(NamedTuple):
    """`sizes` elements from `offsets` on, in every dim of a tensor. A scalar has the empty box `Box((), ())`.

    `steps` is empty if the elements are neighbours. Otherwise it gives their distance in each dim: rows 1, 3, 5 have
    offset 1, size 3, step 2.
    """

    offsets: Shape
    sizes: Shape
    steps: Shape = ()

    @property
    def numel(self) -> int:
        return prod(self.sizes)

    def intersect(self, other: Box) -> Box | None:
        if self.steps or other.steps:
            return _intersect_steps(self, other)
        offsets, sizes = [], []
        for a, n, b, m in zip(self.offsets, self.sizes, other.offsets, other.sizes, strict=True):
            start, stop = max(a, b), min(a + n, b + m)
            if start >= stop:
                return None
            offsets.append(start)
            sizes.append(stop - start)
        return Box(tuple(offsets), tuple(sizes))

    def relative_to(self, outer: Box) -> Box:
        """Return this box in the coordinates of a tensor with only `outer`."""
        offsets = tuple(a - b for a, b in zip(self.offsets, outer.offsets, strict=True))
        if not (self.steps or outer.steps):
            return Box(offsets, self.sizes)
        steps = outer.all_steps
        inner = tuple(s // t for s, t in zip(self.all_steps, steps, strict=True))
        return stepped(tuple(o // t for o, t in zip(offsets, steps, strict=True)), self.sizes, inner)

    def inside(self, inner: Box) -> Box:
        """Return `inner`, in this box's coordinates, in the outer tensor's coordinates."""
        steps = self.all_steps
        offsets = tuple(a + b * t for a, b, t in zip(self.offsets, inner.offsets, steps, strict=True))
        if not (self.steps or inner.steps):
            return Box(offsets, inner.sizes)
        return stepped(offsets, inner.sizes, tuple(s * t for s, t in zip(inner.all_steps, steps, strict=True)))

    def is_whole(self, shape: Shape) -> bool:
        return self.sizes == shape and not self.steps and not any(self.offsets)

    @property
    def all_steps(self) -> Shape:
        return self.steps or (1,) * len(self.sizes)

    @property
    def ends(self) -> Shape:
        """End of the box in every dim, exclusive."""
        if not self.steps:
            return tuple(map(add, self.offsets, self.sizes))
        return tuple(a + (n - 1) * s + 1 for a, n, s in zip(self.offsets, self.sizes, self.steps, strict=True))

    def __str__(self) -> str:
        parts = zip(self.offsets, self.ends, self.all_steps, strict=True)
        return "[" + ", ".join(f"{a}:{b}" + (f":{s}" if s != 1 else "") for a, b, s in parts) + "]"


def stepped(offsets: Shape, sizes: Shape, steps: Shape) -> Box:
    """Return the box. Steps in dims with one element are dropped, so that equal boxes compare equal."""
    steps = tuple(step if size > 1 else 1 for size, step in zip(sizes, steps, strict=True))
    return Box(offsets, sizes, steps if any(step != 1 for step in steps) else ())


def _intersect_steps(one: Box, other: Box) -> Box | None:
    """Intersect dim by dim."""
    offsets, sizes, steps = [], [], []
    dims = zip(one.offsets, one.sizes, one.all_steps, other.offsets, other.sizes, other.all_steps, strict=True)
    for a, n, s, b, m, t in dims:
        common = gcd(s, t)
        if (b - a) % common or not n or not m:
            return None
        step = s // common * t
        first = a + (b - a) // common * pow(s // common, -1, t // common) % (t // common) * s
        start = max(a, b)
        first += -((first - start) // step) * step
        stop = min(a + (n - 1) * s, b + (m - 1) * t) + 1
        if first >= stop:
            return None
        offsets.append(first)
        sizes.append((stop - 1 - first) // step + 1)
        steps.append(step)
    return stepped(tuple(offsets), tuple(sizes), tuple(steps))


class FlatRange(NamedTuple):
    """Elements `start` to `stop` of a tensor in row-major order.

    A flat range is at most 2*ndim - 1 boxes (`flat_boxes`), but only one copy.
    """

    start: int
    stop: int

    @property
    def numel(self) -> int:
        return self.stop - self.start

    def __str__(self) -> str:
        return f"elements {self.start}:{self.stop}"


Region = Box | FlatRange


@lru_cache(4096)  # few tensors in a model have a unique shape
def whole(shape: Shape) -> Box:
    return Box((0,) * len(shape), shape)


@lru_cache(4096)
def contiguous_strides(shape: Shape) -> Shape:
    strides, step = [], 1
    for size in reversed(shape):
        strides.append(step)
        step *= size
    return tuple(reversed(strides))


@lru_cache(4096)
def is_contiguous(shape: Shape, strides: Shape) -> bool:
    """Return True if the elements are contiguous in row-major order. Dims of size 1 are ignored."""
    step = 1
    for size, stride in zip(reversed(shape), reversed(strides), strict=True):
        if size != 1 and stride != step:
            return size == 0 or 0 in shape
        step *= size
    return True


@lru_cache(1 << 14)  # a model's layers are cut alike
def flat_range(box: Box, shape: Shape) -> FlatRange | None:
    """Return `box` as a flat range, or None: leading dims of size 1, then one dim cut freely, then only whole dims."""
    numel = prod(box.sizes)
    if numel == 0 or box.is_whole(shape):
        return FlatRange(0, numel)
    if box.steps:
        return None
    start, step, cut = 0, 1, False
    for offset, size, full in zip(reversed(box.offsets), reversed(box.sizes), reversed(shape), strict=True):
        if cut and size != 1:
            return None
        cut = cut or size != full
        start += offset * step
        step *= full
    return FlatRange(start, start + numel)


def flat_boxes(shape: Shape, start: int, stop: int) -> Iterator[Box]:
    """Yield the flat range `start:stop` as disjoint boxes, in row-major order.

    Each dim has a ragged head and tail around one block of whole rows.
    """
    if start >= stop:
        return
    if not shape:
        yield Box((), ())
        return
    if len(shape) == 1:
        yield Box((start,), (stop - start,))
        return
    row = prod(shape[1:])
    first, head = divmod(start, row)
    last, tail = divmod(stop, row)

    def partial(index: int, a: int, b: int) -> Iterator[Box]:
        for box in flat_boxes(shape[1:], a, b):
            yield Box((index, *box.offsets), (1, *box.sizes))

    if first == last:
        yield from partial(first, head, tail)
        return
    if head:
        yield from partial(first, head, row)
        first += 1
    if first < last:
        yield Box((first, *(0,) * (len(shape) - 1)), (last - first, *shape[1:]))
    if tail:
        yield from partial(last, 0, tail)


def flat_regions(boxes: Iterable[Box], shape: Shape, start: int, stop: int) -> Iterator[tuple[Region, int]]:
    """Yield elements `start:stop` of concatenated `boxes` as regions, each with its start in the concatenation."""
    begin = 0
    for box in boxes:
        first, last = max(start - begin, 0), min(stop - begin, box.numel)
        if first < last and (flat := flat_range(box, shape)):
            yield FlatRange(flat.start + first, flat.start + last), begin + first
        else:
            for inner in flat_boxes(box.sizes, first, last):
                yield box.inside(inner), begin + first
                first += inner.numel
        begin += box.numel


class Extent(NamedTuple):
    """A strided array in a file: `offset` in bytes, `strides` in elements."""

    path: str
    offset: int
    dtype: DType
    shape: Shape
    strides: Shape

    @classmethod
    def contiguous(cls, path: str, offset: int, dtype: DType, shape: Shape) -> Extent:
        return cls(path, offset, dtype, shape, contiguous_strides(shape))

    @property
    def numel(self) -> int:
        return prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Size of the elements in bytes, without gaps."""
        return prod(self.shape) * self.dtype.itemsize

    @property
    def end(self) -> int:
        if is_contiguous(self.shape, self.strides):
            return self.offset + self.nbytes
        if 0 in self.shape:
            return self.offset
        reach = sum((size - 1) * stride for size, stride in zip(self.shape, self.strides, strict=True))
        return self.offset + (reach + 1) * self.dtype.itemsize

    @property
    def is_contiguous(self) -> bool:
        return is_contiguous(self.shape, self.strides)

    def narrow(self, box: Box) -> Extent:
        """Return the part inside `box`."""
        skip = sum(offset * stride for offset, stride in zip(box.offsets, self.strides, strict=True))
        strides = self.strides
        if box.steps:
            strides = tuple(stride * step for stride, step in zip(strides, box.steps, strict=True))
        return Extent(self.path, self.offset + skip * self.dtype.itemsize, self.dtype, box.sizes, strides)

    def flat(self, start: int, stop: int) -> Extent:
        """Return elements `start:stop` of a contiguous array as a 1-d extent."""
        offset = self.offset + start * self.dtype.itemsize
        return Extent(self.path, offset, self.dtype, (stop - start,), (1,))

    def holding(self, region: Region, at: int) -> Extent:
        """Return the extent for `region`, with elements from `at` on in this contiguous array."""
        part = self.flat(at, at + region.numel)
        return part.reshape(region.sizes) if isinstance(region, Box) else part

    def reshape(self, shape: Shape) -> Extent:
        return Extent(self.path, self.offset, self.dtype, shape, contiguous_strides(shape))


class Fragment(NamedTuple):
    """A region in a tensor and the extent that holds it.

    With a `Box`, the extent's shape is the box's sizes. With a `FlatRange`, it is 1-d and contiguous.
    """

    region: Region
    extent: Extent
    rank: int | None = None


#: Elements `start:stop` of a tensor are in a contiguous extent from element `at` on. A plain tuple, because a large
#: plan has millions.
Run = tuple[int, int, Extent, int, int | None]


def run_fragments(runs: Iterable[Run]) -> Iterator[Fragment]:
    for start, stop, extent, at, rank in runs:
        yield Fragment(FlatRange(start, stop), extent.flat(at, at + stop - start), rank)


class Source(Protocol):
    """A rule that produces fragments on demand. With 1,024 ranks, lists would be too large."""

    def fragments(self, shape: Shape) -> Iterator[Fragment]:
        """Yield fragments that tile the tensor, flat ones in ascending order."""


class Rule(Source, Protocol):
    """A source that can locate a part without listing every fragment.

    It must agree with its own `fragments`: a plan uses one or the other.
    """

    def runs(self, shape: Shape, start: int, stop: int) -> Sequence[Run] | None:
        """Return the places of elements `start:stop` in ascending order, or None if some are in no contiguous run."""


def runs_of(source: Source, shape: Shape, start: int, stop: int) -> Sequence[Run] | None:
    if hasattr(source, "runs"):
        return cast(Rule, source).runs(shape, start, stop)
    found: list[Run] = []
    for fragment in source.fragments(shape):
        region, extent = fragment.region, fragment.extent
        flat = region if isinstance(region, FlatRange) else flat_range(region, shape)
        sizes = (region.numel,) if isinstance(region, FlatRange) else region.sizes
        if flat is None or not (is_inside(region, shape) and extent.shape == sizes and extent.is_contiguous):
            return None
        first, last = max(start, flat.start), min(stop, flat.stop)
        if first < last:
            found.append((first, last, extent, first - flat.start, fragment.rank))
    return sorted(found, key=lambda run: run[:2])


class Alike(Source, Protocol):
    """A source with a comparable partition."""

    def cut(self, shape: Shape) -> Hashable:
        """Return a key, equal if two sources in a checkpoint have the same regions and padding on the same ranks."""


def cut_of(source: Source, shape: Shape) -> Hashable:
    return cast(Alike, source).cut(shape) if hasattr(source, "cut") else None


@runtime_checkable
class Padded(Protocol):
    """A source whose format stores padding after the tensor's elements."""

    def padding(self, shape: Shape) -> Iterator[Fragment]:
        """Yield the padding as flat ranges after the last element."""


class Whole(NamedTuple):
    """A tensor stored in one place."""

    extent: Extent
    rank: int | None = None

    def fragments(self, shape: Shape) -> Iterator[Fragment]:
        yield Fragment(whole(shape), self.extent, self.rank)

    def runs(self, shape: Shape, start: int, stop: int) -> Sequence[Run] | None:
        extent = self.extent
        if extent.shape != shape or not is_contiguous(shape, extent.strides):
            return None
        return [(start, stop, extent, start, self.rank)] if start < stop else []


@dataclass(frozen=True, slots=True)
class TiedCopy:
    """A copy under another name. It belongs to no rank, so no rank can be chosen for it."""

    source: Source

    def fragments(self, shape: Shape) -> Iterator[Fragment]:
        return (fragment._replace(rank=None) for fragment in self.source.fragments(shape))

    def runs(self, shape: Shape, start: int, stop: int) -> Sequence[Run] | None:
        found = runs_of(self.source, shape, start, stop)
        return found and [(*run[:4], None) for run in found]


@dataclass(frozen=True, slots=True)
class Pieces:
    pieces: tuple[Fragment, ...]

    def fragments(self, shape: Shape) -> Iterator[Fragment]:
        yield from self.pieces


class Tensor(NamedTuple):
    """A logical tensor: one fqn in one role (`weight`, `master`, `buffer`, or an optimizer state's name).

    `native` is the model's own dtype, if it differs: an fp32 master in a bf16 model has `dtype` float32 and `native`
    bfloat16. `replicas` hold the same elements again. `rank_copies` are other ranks' values that may differ, for
    example BatchNorm's running statistics.
    """

    fqn: str
    role: str
    dtype: DType
    shape: Shape
    source: Source
    native: DType | None = None
    replicas: tuple[Source, ...] = ()
    rank_copies: tuple[Source, ...] = ()

    @property
    def key(self) -> tuple[str, str]:
        return self[:2]

    @property
    def numel(self) -> int:
        return prod(self.shape)

    @property
    def nbytes(self) -> int:
        return self.numel * self.dtype.itemsize

    def fragments(self) -> Iterator[Fragment]:
        return self.source.fragments(self.shape)

    def runs(self) -> Sequence[Run] | None:
        """Return all elements in ascending order, or None if some are in no contiguous run."""
        return runs_of(self.source, self.shape, 0, self.numel)

    def renamed(self, fqn: str) -> Tensor:
        return Tensor(fqn, self.role, self.dtype, self.shape, self.source, self.native, self.replicas, self.rank_copies)

    def rank_local(self) -> Tensor:
        """Return the first rank's values."""
        return self._replace(replicas=(), rank_copies=self.replicas)


@dataclass(frozen=True, slots=True)
class Overlap:
    """Common part of two descriptions."""

    region: Region
    a: Extent
    b: Extent
    a_rank: int | None = None
    b_rank: int | None = None


def _as_flat(fragment: Fragment, shape: Shape) -> Fragment | None:
    if isinstance(fragment.region, FlatRange):
        return fragment
    if not fragment.extent.is_contiguous:
        return None
    flat = flat_range(fragment.region, shape)
    if flat is None:
        return None
    return Fragment(flat, fragment.extent.reshape((flat.numel,)), fragment.rank)


def _all_flat(fragments: list[Fragment], shape: Shape) -> list[Fragment] | None:
    found = []
    for fragment in fragments:
        flat = _as_flat(fragment, shape)
        if flat is None:
            return None
        found.append(flat)
    return found


def as_boxes(fragment: Fragment, shape: Shape) -> Iterator[Fragment]:
    region = fragment.region
    if isinstance(region, Box):
        yield fragment
        return
    done = 0
    for box in flat_boxes(shape, region.start, region.stop):
        extent = fragment.extent.flat(done, done + box.numel).reshape(box.sizes)
        yield Fragment(box, extent, fragment.rank)
        done += box.numel


def overlay(a: Iterable[Fragment], b: Iterable[Fragment], shape: Shape) -> Iterator[Overlap]:
    """Yield the common regions of fragments in `a` and `b`, with both extents narrowed to them."""
    a, b = list(a), list(b)
    flat_b = _all_flat(b, shape)
    flat_a = None if flat_b is None else _all_flat(a, shape)
    if flat_a is not None and flat_b is not None:
        yield from _overlay_flat(flat_a, flat_b)
    else:
        boxes_b = sorted((g for f in b for g in as_boxes(f, shape)), key=_first_offset)
        for fragment in a:
            for piece in as_boxes(fragment, shape):
                yield from _overlay_boxes(piece, boxes_b)


def is_inside(region: Region, shape: Shape) -> bool:
    if isinstance(region, FlatRange):
        return 0 <= region.start <= region.stop <= prod(shape)
    if not len(region.offsets) == len(region.sizes) == len(shape):
        return False
    for start, size, end, full in zip(region.offsets, region.sizes, region.ends, shape, strict=True):
        if start < 0 or size < 0 or end > full:
            return False
    return True


def fits(extent: Extent, region: Region) -> bool:
    if isinstance(region, Box):
        return extent.shape == region.sizes
    return extent.shape == (region.numel,) and extent.is_contiguous


def region_boxes(region: Region, shape: tuple[int, ...]) -> Iterator[Box]:
    if isinstance(region, Box):
        yield region
    else:
        yield from flat_boxes(shape, region.start, region.stop)


def _first_offset(fragment: Fragment) -> int:
    assert isinstance(fragment.region, Box)
    return fragment.region.offsets[0] if fragment.region.offsets else 0


def _overlay_boxes(piece: Fragment, others: list[Fragment]) -> Iterator[Overlap]:
    assert isinstance(piece.region, Box)
    end = piece.region.ends[0] if piece.region.sizes else 1
    for other in others:
        assert isinstance(other.region, Box)
        if _first_offset(other) >= end:
            break
        common = piece.region.intersect(other.region)
        if common is None:
            continue
        yield Overlap(
            common,
            piece.extent.narrow(common.relative_to(piece.region)),
            other.extent.narrow(common.relative_to(other.region)),
            piece.rank,
            other.rank,
        )


def _flat_start(fragment: Fragment) -> int:
    assert isinstance(fragment.region, FlatRange)
    return fragment.region.start


def _overlay_flat(a: list[Fragment], b: list[Fragment]) -> Iterator[Overlap]:
    a.sort(key=_flat_start)
    b.sort(key=_flat_start)
    j = 0
    for f in a:
        assert isinstance(f.region, FlatRange)
        while j < len(b) and b[j].region.stop <= f.region.start:  # type: ignore[union-attr]
            j += 1
        k = j
        while k < len(b) and b[k].region.start < f.region.stop:  # type: ignore[union-attr]
            g = b[k]
            assert isinstance(g.region, FlatRange)
            start, stop = max(f.region.start, g.region.start), min(f.region.stop, g.region.stop)
            if start < stop:
                yield Overlap(
                    FlatRange(start, stop),
                    f.extent.flat(start - f.region.start, stop - f.region.start),
                    g.extent.flat(start - g.region.start, stop - g.region.start),
                    f.rank,
                    g.rank,
                )
            k += 1
