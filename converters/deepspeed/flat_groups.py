"""ZeRO's flat groups: the place of a parameter's elements in them, and their optimizer states.

A rule is stored per flat group (or slot offset), never per rank and tensor.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Any

from ckpt.base.errors import CorruptError
from ckpt.containers.sources import RankFile
from ckpt.containers.torchfile.values import Record, StoredTensor
from ckpt.plan.tensors import Extent, FlatRange, Fragment, Rule, Run, Shape, run_fragments
from converters.deepspeed.rank_files import base_state, flat_extent
from converters.optimizers.ranks import different_numbers
from converters.optimizers.states import OptimizerStates
from converters.quantized.states import InBlocks, Quantized, understood


@dataclass(frozen=True, slots=True)
class FlatGroup:
    """Flat buffer cut evenly: rank r holds the elements from `r*partition` on.

    Extents may be shorter than `partition` (stripped padding) or have padding at the end. `ranks` share the buffer.
    """

    extents: Sequence[Extent]
    partition: int
    ranks: Sequence[int] | None = None


@dataclass(frozen=True, slots=True)
class InFlatGroup:
    """Rule for stages 1 and 2: a parameter starts at element `start`, with `behind` padding after it.

    deepspeed/runtime/zero/stage_1_and_2.py: parameters lie end to end (`parameter_alignment` pads between them). The
    buffer is padded to a multiple of twice the world size and cut evenly.
    """

    group: FlatGroup
    start: int
    behind: int = 0

    def fragments(self, shape: Shape) -> Iterator[Fragment]:
        return run_fragments(self.runs(shape, 0, prod(shape)))

    def padding(self, shape: Shape) -> Iterator[Fragment]:
        return run_fragments(self.runs(shape, prod(shape), prod(shape) + self.behind))

    def runs(self, shape: Shape, start: int, stop: int) -> list[Run]:
        """Return stored runs, relative to the parameter's start."""
        found: list[Run] = []
        start, stop, partition = self.start + start, self.start + stop, self.group.partition
        ranks = self.group.ranks
        if start == stop:
            return found
        for rank in range(start // partition, min((stop - 1) // partition + 1, len(self.group.extents))):
            extent = self.group.extents[rank]
            begin = rank * partition
            first, last = max(start, begin), min(stop, begin + min(partition, extent.numel))
            if first < last:
                found.append(
                    (first - self.start, last - self.start, extent, first - begin, ranks[rank] if ranks else rank)
                )
        return found


@dataclass(frozen=True, slots=True)
class InSlots:
    """Rule for stage 3: every rank has a slot of ceil(numel / ranks) elements, at `offset` in its extent.

    deepspeed/runtime/zero/partition_parameters.py, `_partition_param`. The end of the last slots is arbitrary padding.
    """

    extents: Sequence[Extent]
    offset: int

    def fragments(self, shape: Shape) -> Iterator[Fragment]:
        return run_fragments(self.runs(shape, 0, prod(shape)))

    def runs(self, shape: Shape, start: int, stop: int) -> list[Run]:
        found: list[Run] = []
        if start >= stop:
            return found
        slot = slot_size(prod(shape), len(self.extents))
        for rank in range(start // slot, min(-(-stop // slot), len(self.extents))):
            begin = rank * slot
            first, last = max(start, begin), min(stop, begin + slot)
            found.append((first, last, self.extents[rank], self.offset + first - begin, rank))
        return found

    def cut(self, shape: Shape) -> tuple[int, int]:
        slot = slot_size(prod(shape), len(self.extents))
        return len(self.extents), min(slot, self.extents[-1].numel - self.offset)

    def padding(self, shape: Shape) -> Iterator[Fragment]:
        size = prod(shape)
        slot = slot_size(size, len(self.extents))
        for rank, extent in enumerate(self.extents):
            first, last = max(rank * slot, size), rank * slot + min(slot, extent.numel - self.offset)
            if first < last:
                at = self.offset + first - rank * slot
                yield Fragment(FlatRange(first, last), extent.flat(at, at + last - first), rank)


def slot_size(numel: int, num_ranks: int) -> int:
    return -(-numel // num_ranks)


#: Allowed element counts, without or with padding.
Sizes = Collection[int]


@dataclass
class GroupStates:
    """Optimizer states of one flat buffer.

    `buffers` are the ranks' extents of elementwise states: computed plain values for a buffer in `quantized`. `left`
    describes states of no kind.
    """

    buffers: dict[str, list[Extent]] = field(default_factory=dict)
    numbers: dict[str, Any] = field(default_factory=dict)
    quantized: dict[str, list[Quantized]] = field(default_factory=dict)
    left: dict[str, str] = field(default_factory=dict)

    def in_blocks(self, rule: Rule, name: str) -> Rule:
        paths = frozenset(one.path for one in self.quantized.get(name, ()))
        return InBlocks(rule, paths) if paths else rule

    def add_to(self, found: OptimizerStates, fqns: Iterable[str], file: RankFile, who: str = "ranks") -> None:
        """Add the numbers and quantized states for these parameters.

        Raise CorruptError if a parameter already has a different number; the message calls the holders `who`.
        """
        fqns = list(fqns)
        for name, parts in self.quantized.items():
            for one in parts:
                found.computed |= one.blocks()
            found.quantized |= dict.fromkeys(((fqn, name) for fqn in fqns), parts[0].method)
        for name, value in self.numbers.items():
            found.agree(fqns, name, value, who, **file.where)
        for name, what in self.left.items():
            found.unread.add(name, f"it is {what}, and belongs to several parameters", fqns)


def group_states(
    inners: Sequence[RankFile], states: Callable[[RankFile], Mapping[str, Any]], sizes: Sequence[Sizes]
) -> GroupStates:
    """Sort states. `sizes` are the allowed sizes of each rank's part."""
    found = GroupStates()
    ranks = [understood(states(inner)) for inner in inners]
    for name in dict.fromkeys(name for values in ranks for name in values):
        values = [values.get(name) for values in ranks]
        there = [(inner, value) for inner, value in zip(inners, values, strict=True) if value is not None]
        if any(_is_part(value, size) for value, size in zip(values, sizes, strict=True)):
            for inner, value, size in zip(inners, values, sizes, strict=True):
                if value is None:
                    raise CorruptError("a rank lacks an optimizer state", **inner.where, expected=name)
                if isinstance(value, StoredTensor) and len(value.shape) == 1 and value.shape[0] not in size:
                    what = f"{name} does not match the rank part's size"
                    expected = " or ".join(map(str, sorted(size)))
                    raise CorruptError(what, **inner.where, expected=expected, found=value.shape[0])
            found.buffers[name] = [_state_extent(value, inner) for inner, value in there]
            if quantized := [value for value in values if isinstance(value, Quantized)]:
                found.quantized[name] = quantized
        elif there and all(_is_number(value) for _, value in there):
            numbers = different_numbers(name, there)
            if len(numbers) == 1:
                found.numbers[name] = numbers[0]
            else:
                found.left[name] = "a separate number on each rank"
        elif there:
            found.left[name] = f"{_kind_of_state(there[0][1])} on each rank"
    return found


def flat_group_states(inners: Sequence[RankFile], group: int, partition: int) -> GroupStates:
    """Return a stage 1 or 2 group's states.

    DeepSpeed pads states only if they are elastic. Others it loads as they are, and the next step fails.
    """
    sizes: list[Sizes] = []
    for inner in inners:
        kept = flat_extent(inner.need("single_partition_of_fp32_groups")[group], inner).numel
        is_elastic = not isinstance(inner.content.get("base_optimizer_state"), Mapping)
        sizes.append((kept if is_elastic else partition,))
    return group_states(inners, lambda inner: base_state(inner, group), sizes)


def _is_part(value: Any, sizes: Sizes) -> bool:
    """Return True for a rank's part. A single element is a number if the part is longer."""
    if not isinstance(value, StoredTensor | Quantized) or len(value.shape) != 1:
        return False
    return value.shape[0] in sizes and (value.shape[0] > 1 or max(sizes) == 1)


def _state_extent(value: Any, inner: RankFile) -> Extent:
    return value.extent if isinstance(value, Quantized) else flat_extent(value, inner)


def _is_number(value: Any) -> bool:
    return value.shape in ((), (1,)) if isinstance(value, StoredTensor) else isinstance(value, int | float | bool)


def _kind_of_state(value: Any) -> str:
    if isinstance(value, StoredTensor | Quantized):
        return f"a tensor of shape {list(value.shape)}"
    return value.typename if isinstance(value, Record) else f"a {type(value).__name__}"
