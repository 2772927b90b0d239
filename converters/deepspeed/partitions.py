"""ZeRO's rules for the place of a parameter's elements.

A rule is stored per flat group (or slot offset), never per rank and tensor.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import prod

from ckpt.plan.tensors import Extent, FlatRange, Fragment, Run, Shape, run_fragments


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
