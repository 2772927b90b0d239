"""Plans: the copies from a checkpoint to a target, with the proof that every byte is covered exactly once.

Pure: no I/O, no torch. `ckpt.move.run` executes a plan.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from math import prod
from operator import itemgetter

from ckpt.base.errors import CorruptError, LossError, UsageError
from ckpt.base.text import pluralize
from ckpt.base.words import Message
from ckpt.plan.checkpoint import BUFFER, MASTER, WEIGHT, Checkpoint, Key, Slot, SourceFile, Target, TargetFile
from ckpt.plan.dtypes import CASTABLE, FLOAT64, UINT8, DType
from ckpt.plan.spans import Rows, Spans
from ckpt.plan.tensors import (
    Box,
    Extent,
    FlatRange,
    Fragment,
    Region,
    Run,
    Shape,
    Source,
    Tensor,
    fits,
    flat_range,
    is_inside,
    overlay,
    whole,
)
from ckpt.plan.tiling import check_tiling, copy_faults

_start = itemgetter(0)  # of a run
_CASTABLE = frozenset(CASTABLE.values()) | {FLOAT64}


@dataclass(frozen=True, slots=True)
class Copy:
    """Elements to copy, with a cast if the dtypes differ. `target.path` is relative to the target folder."""

    source: Extent
    target: Extent

    @property
    def is_span(self) -> bool:
        """True for a plain byte range on both sides, without a cast."""
        return self.source.dtype == self.target.dtype and self.is_flat

    @property
    def is_flat(self) -> bool:
        return self.source.is_contiguous and self.target.is_contiguous


@dataclass(frozen=True, slots=True)
class Cast:
    source: DType
    target: DType
    num_tensors: int
    nbytes: int


@dataclass(frozen=True)
class Plan:
    """A proved conversion, made by `make_plan`.

    Example:
        plan = make_plan(checkpoint, format.lay_out(checkpoint, Layout()))
        plan.total_bytes, plan.casts
    """

    checkpoint: Checkpoint
    target: Target
    num_copies: int
    span_bytes: int
    buffered_bytes: int
    casts: tuple[Cast, ...]
    computed_bytes: int = 0
    #: Bytes in the largest computed content.
    largest_computed: int = 0
    _spans: Mapping[str, tuple[Spans, ...]] = field(default_factory=dict, repr=False)
    #: Slots with copies outside `_spans`, by target file.
    _others: Mapping[str, Sequence[Slot]] = field(default_factory=dict, repr=False)

    @property
    def total_bytes(self) -> int:
        return sum(file.size for file in self.target.files)

    @property
    def sources(self) -> tuple[SourceFile, ...]:
        """The files to read."""
        copied = (file.copied for file in self.target.files if file.copied is not None)
        return (*self.checkpoint.files, *copied)

    @property
    def moved_bytes(self) -> int:
        """Tensor data to write, in bytes."""
        return self.span_bytes + self.buffered_bytes

    def spans(self, file: TargetFile) -> tuple[Spans, ...]:
        """Return the contiguous copies to `file`: one `Spans` per pair of dtypes."""
        return self._spans.get(file.name, ())

    def slots(self, file: TargetFile) -> Sequence[Slot]:
        return self._others.get(file.name, ())

    def slot_copies(self, slot: Slot) -> Iterator[Copy]:
        """Yield a slot's copies outside `spans`: computed ones, and ones with gaps."""
        tensor = self.checkpoint.tensors[slot.key]
        for copy in _slot_copies(tensor.fragments(), tensor.shape, slot):
            if copy.source.path in self.checkpoint.computed or not copy.is_flat:
                yield copy

    def copies(
        self, file: TargetFile, wanted: Callable[[Slot], bool] = lambda _: True
    ) -> Iterator[tuple[Slot, list[Copy]]]:
        """Yield the `wanted` slots, and their file copies outside `spans`."""
        computed = self.checkpoint.computed
        for slot in filter(wanted, self.slots(file)):
            yield slot, [copy for copy in self.slot_copies(slot) if copy.source.path not in computed]

    def computed_copies(
        self, file: TargetFile, wanted: Callable[[Slot], bool] = lambda _: True
    ) -> dict[str, list[Copy]]:
        """Return copies of computed content, by name in `Checkpoint.computed`."""
        found: dict[str, list[Copy]] = {}
        if self.checkpoint.computed:
            for copy in (copy for slot in filter(wanted, self.slots(file)) for copy in self.slot_copies(slot)):
                if copy.source.path in self.checkpoint.computed:
                    found.setdefault(copy.source.path, []).append(copy)
        return found


def make_plan(checkpoint: Checkpoint, target: Target, *, carries_optimizer: bool = True) -> Plan:
    """Prove that `target` can be made from `checkpoint`, and find its copies.

    Raise CorruptError if a tensor's fragments leave a hole or overlap, LossError if a target range stays unfilled, a
    tensor has no place, or a cast is unsupported.
    """
    found = _CopyTable(checkpoint)
    wanted: dict[Key, list[tuple[TargetFile, Slot]]] = {}
    for file in target.files:
        _check_file_cover(file)
        found.copy(file)
        for slot in file.slots:
            wanted.setdefault(slot.key, []).append((file, slot))
    casts: dict[tuple[DType, DType], dict[Key, int]] = {}
    regions: dict[Key, list[Region]] = {}
    for key, places in wanted.items():
        tensor = checkpoint.tensors.get(key)
        if tensor is None:
            raise LossError(
                f"the source lacks a tensor's {key[1]}, and the target needs it",
                path=places[0][0].name,
                fqn=key[0],
            )
        for file, slot in places:
            assert fits(slot.extent, slot.region), f"{file.name}: a slot of {slot.key} has another shape"
            if slot.extent.dtype != tensor.dtype:
                if not {tensor.dtype, slot.extent.dtype} <= _CASTABLE:
                    raise LossError(f"casting {tensor.dtype} to {slot.extent.dtype} is not supported", fqn=tensor.fqn)
                per_key = casts.setdefault((tensor.dtype, slot.extent.dtype), {})
                per_key[key] = per_key.get(key, 0) + slot.extent.nbytes
        found.fill(tensor, places)
        regions[key] = [slot.region for _, slot in places]
    _prove_nothing_is_lost(checkpoint, target, regions, carries_optimizer)
    pluralize = tuple(Cast(a, b, len(keys), sum(keys.values())) for (a, b), keys in casts.items())
    spans = {name: rows.spans() for name, rows in found.rows.items()}
    moved = (found.num_copies, found.span_bytes, found.buffered_bytes)
    computed = (found.computed_bytes, found.largest_computed)
    return Plan(checkpoint, target, *moved, pluralize, *computed, spans, found.others)


@dataclass
class _CopyTable:
    checkpoint: Checkpoint
    rows: dict[str, Rows] = field(default_factory=lambda: defaultdict(Rows))
    others: dict[str, list[Slot]] = field(default_factory=dict)
    num_copies: int = 0
    span_bytes: int = 0
    buffered_bytes: int = 0
    computed_bytes: int = 0
    largest_computed: int = 0

    def copy(self, file: TargetFile) -> None:
        if file.copied is not None and file.size:
            rows = self.rows[file.name]
            rows.of(UINT8, UINT8).extend((0, rows.path(file.copied.path), 0, file.size))
            self.num_copies += 1
            self.span_bytes += file.size

    def fill(self, tensor: Tensor, places: list[tuple[TargetFile, Slot]]) -> None:
        runs, computed = tensor.runs(), self.checkpoint.computed
        if runs is None or not _tile(runs, tensor):
            check_source(tensor)
            runs = None
        elif computed and any(extent.path in computed for _, _, extent, _, _ in runs):
            runs = None
        fragments: list[Fragment] = []
        for file, slot in places:
            region, filled = _flat_slot(slot, tensor.shape), 0
            if runs is not None and region is not None:
                filled = self._by_runs(runs, region, slot.extent, self.rows[file.name])
            else:
                fragments = fragments or list(tensor.fragments())
                filled = self._by_overlay(fragments, tensor.shape, file, slot)
            if filled != slot.extent.numel:
                raise LossError(
                    "nothing fills a part of the target",
                    path=file.name,
                    fqn=tensor.fqn,
                    expected=f"{pluralize(slot.extent.numel, 'element')}",
                    found=f"{pluralize(filled, 'element')}",
                )

    def _by_runs(self, runs: Sequence[Run], region: FlatRange, slot: Extent, rows: Rows) -> int:
        """Return the number of elements filled."""
        begin, end, filled = region.start, region.stop, 0
        if begin >= end or not runs:
            return 0
        dtype = runs[0][2].dtype  # the same for all runs
        found, size, target_size = rows.of(dtype, slot.dtype), dtype.itemsize, slot.dtype.itemsize
        at_first = max(0, bisect_right(runs, begin, key=_start) - 1) if len(runs) > 1 else 0
        for number in range(at_first, len(runs)):
            start, stop, extent, at, _ = runs[number]
            first, last = max(start, begin), min(stop, end)
            if first < last:
                to, source = slot.offset + (first - begin) * target_size, extent.offset + (at + first - start) * size
                found.extend((to, rows.path(extent.path), source, last - first))
                self.num_copies += 1
                filled += last - first
            if stop >= end:
                break
        if dtype == slot.dtype:
            self.span_bytes += filled * target_size
        else:
            self.buffered_bytes += filled * target_size
        return filled

    def _by_overlay(self, fragments: list[Fragment], shape: Shape, file: TargetFile, slot: Slot) -> int:
        """Return the number of elements filled."""
        filled, has_others = 0, False
        for copy in _slot_copies(fragments, shape, slot):
            self.num_copies += 1
            filled += copy.target.numel
            is_computed = copy.source.path in self.checkpoint.computed
            if is_computed:
                self.computed_bytes += copy.target.nbytes
                self.largest_computed = max(self.largest_computed, copy.source.end)
            if copy.is_span and not is_computed:
                self.span_bytes += copy.target.nbytes
            else:
                self.buffered_bytes += copy.target.nbytes
            if is_computed or not copy.is_flat:
                has_others = True
            else:
                rows, source, target = self.rows[file.name], copy.source, copy.target
                row = (target.offset, rows.path(source.path), source.offset, target.numel)
                rows.of(source.dtype, target.dtype).extend(row)
        if has_others:
            self.others.setdefault(file.name, []).append(slot)
        return filled


def _flat_slot(slot: Slot, shape: Shape) -> FlatRange | None:
    if not isinstance(slot.region, Box):
        return slot.region
    return flat_range(slot.region, shape) if slot.extent.is_contiguous else None


def _tile(runs: Sequence[Run], tensor: Tensor) -> bool:
    """Return True if the runs hold every element exactly once, inside their extents."""
    reached, dtype = 0, tensor.dtype
    for start, stop, extent, at, _ in runs:
        if start != reached or start >= stop or at < 0 or at + stop - start > extent.numel or extent.dtype != dtype:
            return False
        reached = stop
    return reached == tensor.numel


def check_source(tensor: Tensor) -> None:
    """Raise CorruptError unless the tensor's fragments tile it and fit their extents."""
    runs = tensor.runs()
    if runs is not None and _tile(runs, tensor):
        return
    fault = next(copy_faults(tensor, tensor.source), None)
    if fault is None:
        return
    if fault.fragment is not None:
        extent = fault.fragment.extent
        raise CorruptError(
            "a fragment does not fit its part of the tensor",
            path=extent.path,
            rank=fault.fragment.rank,
            fqn=tensor.fqn,
            expected=f"{tensor.dtype} for {fault.region}",
            found=f"{extent.dtype} of shape {list(extent.shape)}",
        )
    words = {
        "hole": "part of a tensor is stored nowhere",
        "overlap": "part of a tensor is stored twice",
        "outside": "a stored part exceeds its tensor",
    }
    raise CorruptError(
        words[fault.kind],
        path=_file_of(tensor, fault.region),
        fqn=tensor.fqn,
        expected=f"fragments that tile shape {list(tensor.shape)}",
        found=str(fault),
    )


def _file_of(tensor: Tensor, region: Region) -> str | None:
    fragments = list(tensor.fragments())
    touching = [fragment for fragment in fragments if fragment.region == region]
    return next((fragment.extent.path for fragment in touching or fragments), None)


def _slot_copies(fragments: Iterable[Fragment], shape: Shape, slot: Slot) -> Iterator[Copy]:
    fragments, region = list(fragments), slot.region
    pairs: Iterable[tuple[Extent, Extent]]
    if _lies_in_one(fragments, shape, region):
        assert isinstance(region, Box)
        pairs = [(fragments[0].extent.narrow(region), slot.extent)]
    else:
        pairs = ((common.a, common.b) for common in overlay(fragments, [Fragment(region, slot.extent)], shape))
    for source, target in pairs:
        if source.is_contiguous and target.is_contiguous:
            source, target = source.reshape((source.numel,)), target.reshape((target.numel,))
        yield Copy(source, target)


def _lies_in_one(fragments: list[Fragment], shape: Shape, region: Region) -> bool:
    """Return True for a box without gaps in a single-box tensor."""
    if len(fragments) != 1 or not isinstance(region, Box) or region.steps or not region.numel:
        return False
    first = fragments[0].region
    return isinstance(first, Box) and first.is_whole(shape) and is_inside(region, shape)


def _check_file_cover(file: TargetFile) -> None:
    """Check that one literal or slot gives each byte."""
    spans = [(offset, offset + len(data)) for offset, data in file.literals]
    spans += [(offset, offset + length) for offset, length in file.zeros]
    strided, outside = 0, False
    for extent in file.filled:
        start, size = extent.offset, extent.nbytes
        if extent.is_contiguous:
            end = start + size
            spans += [(start, end)] if size else ()
        else:
            end = extent.end
            strided += size
        outside = outside or start < 0 or end > file.size
    covered = strided + sum([stop - start for start, stop in spans])
    spans.sort()
    overlapping = any(stop > start for (_, stop), (start, _) in pairwise(spans))
    if covered != file.size or overlapping or outside or (spans and not 0 <= spans[0][0] <= spans[-1][1] <= file.size):
        raise AssertionError(f"{file.name}: literals and slots cover {covered} of {pluralize(file.size, 'byte')}")


def _prove_nothing_is_lost(
    checkpoint: Checkpoint, target: Target, regions: Mapping[Key, Sequence[Region]], carries_optimizer: bool
) -> None:
    """Raise LossError unless everything in the source is placed or left out with a reason.

    Only slots count: zeros and literals prove nothing.
    """
    assert all(target.left_out.values()), "a tensor is left out without a reason"
    placed = {fqn for fqn, role in regions if role in (WEIGHT, MASTER)}
    for key, tensor in checkpoint.tensors.items():
        fqn, role = key
        if key in regions:
            # A target may hold a master, and the same element rounded as a weight.
            fault = check_tiling(regions[key], tensor.shape, overlaps=True)
            if fault is not None:
                found = f"{fault.kind} at {fault.region}"
                raise LossError("part of a tensor would not be written", fqn=fqn, found=found)
            continue
        is_proved = fqn in placed if role in (WEIGHT, MASTER) else role != BUFFER and not carries_optimizer
        if not is_proved and key not in target.left_out:
            raise LossError("a source tensor goes nowhere in the target", fqn=fqn, found=f"role {role}")


def choose_replica(checkpoint: Checkpoint, rank: int) -> Checkpoint:
    """Return `checkpoint` with replicated tensors taken from `rank`. Copies without a rank are still compared.

    Raise UsageError if no tensor is replicated.
    """
    chosen: dict[Key, Tensor] = {}
    for key, tensor in checkpoint.tensors.items():
        copies = tuple(source for source in tensor.replicas if _is_without_rank(source, tensor.shape))
        of_ranks = (*(source for source in tensor.replicas if source not in copies), *tensor.rank_copies)
        for source in (tensor.source, *of_ranks) if of_ranks else ():
            if any(fragment.rank == rank for fragment in source.fragments(tensor.shape)):
                chosen[key] = tensor._replace(source=source, replicas=copies, rank_copies=())
                break
        else:
            if of_ranks:
                raise LossError(f"rank {rank} holds no replica of this tensor", fqn=tensor.fqn)
    if not chosen:
        raise UsageError(
            Message("{replica} chooses nothing: no tensor is stored by several ranks"),
            path=checkpoint.path,
            hint=Message("leave {replica} out"),
        )
    return replace(checkpoint, tensors={**checkpoint.tensors, **chosen})


def _is_without_rank(source: Source, shape: Shape) -> bool:
    first = next(iter(source.fragments(shape)), None)
    return first is not None and first.rank is None


def first_index(region: Region, shape: tuple[int, ...], position: int) -> tuple[int, ...]:
    if isinstance(region, FlatRange):
        position += region.start
        region = whole(shape)
    index = []
    for dim, (offset, step) in enumerate(zip(region.offsets, region.all_steps, strict=True)):
        inner = prod(region.sizes[dim + 1 :])
        index.append(offset + position // inner * step)
        position %= inner
    return tuple(index)
