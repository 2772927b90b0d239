"""DeepSpeed's order and offsets of parameters in flat buffers, for any number of ranks."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import gcd
from typing import TypeVar

from converters.deepspeed.flat_groups import slot_size

T = TypeVar("T")

#: stage_1_and_2.py, `nccl_start_alignment_factor`: groups are padded to a multiple of this times the ranks.
START_ALIGNMENT = 2
#: runtime/zero/config.py, `sub_group_size`.
SUB_GROUP_SIZE = 1_000_000_000


@dataclass(frozen=True, slots=True)
class FlatPart:
    index: int
    start: int
    stop: int
    at: int

    @property
    def numel(self) -> int:
        return self.stop - self.start


@dataclass(frozen=True, slots=True)
class FlatLayout:
    """Param group in stages 1 and 2: one flat buffer, cut evenly over the ranks.

    `paddings` follow each parameter. Every rank has `partition` elements.
    """

    starts: tuple[int, ...]
    numels: tuple[int, ...]
    paddings: tuple[int, ...]
    used: int
    partition: int

    def padding(self, rank: int) -> int:
        """Return the padding at the partition's end. Several last ranks may have some."""
        return min(self.partition, max(0, (rank + 1) * self.partition - self.used))

    def parts(self, rank: int) -> Iterator[FlatPart]:
        first, last = rank * self.partition, (rank + 1) * self.partition
        for index in range(max(0, bisect_right(self.starts, first) - 1), len(self.starts)):
            begin, end = self.starts[index], self.starts[index] + self.numels[index]
            if begin >= last:
                return
            start, stop = max(begin, first), min(end, last)
            if start < stop:
                yield FlatPart(index, start - begin, stop - begin, start - first)


def flat_layout(numels: Sequence[int], num_ranks: int, alignment: int = 1) -> FlatLayout:
    """Lay out a group like stage_1_and_2.py, `__init__` and `flatten_dense_tensors_aligned`.

    `alignment` is in elements. The last parameter has no padding.
    """
    starts, paddings = [], []
    position = 0
    for index, numel in enumerate(numels):
        starts.append(position)
        position += numel
        padding = -position % alignment if index < len(numels) - 1 else 0
        paddings.append(padding)
        position += padding
    whole = START_ALIGNMENT * num_ranks
    padded = -(-position // whole) * whole
    return FlatLayout(tuple(starts), tuple(numels), tuple(paddings), position, padded // num_ranks)


def parameter_alignment(itemsize: int) -> int:
    """Return `parameter_alignment` in elements: 16 bytes in the model's dtype."""
    return 16 // gcd(16, itemsize)


@dataclass(frozen=True, slots=True)
class SlotLayout:
    """Sub-group in stage 3: every rank has a slot per parameter, at `offsets` in its buffer of `length`."""

    offsets: tuple[int, ...]
    numels: tuple[int, ...]
    length: int
    num_ranks: int

    def parts(self, rank: int) -> Iterator[FlatPart]:
        for index, (offset, numel) in enumerate(zip(self.offsets, self.numels, strict=True)):
            slot = slot_size(numel, self.num_ranks)
            start, stop = min(rank * slot, numel), min((rank + 1) * slot, numel)
            if start < stop:
                yield FlatPart(index, start, stop, offset)


def slot_layout(numels: Sequence[int], num_ranks: int) -> SlotLayout:
    """Lay out a sub-group's slots.

    partition_parameters.py, `_partition_param`; stage3.py, `_create_fp16_partitions_with_defragmentation`.
    """
    offsets, position = [], 0
    for numel in numels:
        offsets.append(position)
        position += slot_size(numel, num_ranks)
    return SlotLayout(tuple(offsets), tuple(numels), position, num_ranks)


def sub_groups(numels: Sequence[int], num_ranks: int, size: int = SUB_GROUP_SIZE) -> list[range]:
    """Follow stage3.py, `_create_fp16_sub_groups`.

    A sub-group ends with the parameter that fills it. Sizes are one rank's slots.
    """
    found, first, filled = [], 0, 0
    for index, numel in enumerate(numels):
        filled += slot_size(numel, num_ranks)
        if filled >= size:
            found.append(range(first, index + 1))
            first, filled = index + 1, 0
    if first < len(numels):
        found.append(range(first, len(numels)))
    return found


def dealt(items: Sequence[T], num_ranks: int) -> list[T]:
    """Return the flattening order of `round_robin_gradients`: stage_1_and_2.py, `_round_robin_reorder`."""
    return [item for first in range(num_ranks) for item in items[first::num_ranks]]


def before_dealing(items: Sequence[T], num_ranks: int) -> list[T]:
    """Undo `dealt`."""
    places = dealt(range(len(items)), num_ranks)
    return [item for _, item in sorted(zip(places, items, strict=True), key=lambda pair: pair[0])]
