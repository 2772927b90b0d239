"""Shares of a plan's remaining work, by process."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from ckpt.move.filehash import between
from ckpt.plan.checkpoint import Slot, TargetFile
from ckpt.plan.planner import Copy, Plan
from ckpt.plan.spans import Piece, Spans

Pieces = Mapping[str, Sequence[Piece]]


@dataclass(frozen=True)
class Share:
    """One process's share of a target file: the pieces in `todo`, and all bytes outside pieces if `is_owner`.

    A merged piece also holds known bytes. The process that writes its tensors writes and hashes them.

    `pieces` None means no hashing: fill the whole file.
    """

    file: TargetFile
    pieces: Sequence[Piece] | None
    todo: Collection[Piece] = ()
    is_owner: bool = True

    @cached_property
    def is_whole(self) -> bool:
        """True if this process writes every piece."""
        return {*self.todo}.issuperset(self.pieces or ())

    @cached_property
    def ranges(self) -> list[tuple[int, int]]:
        """Ranges (start, stop) that this process writes, in order."""
        others = between(self.file.size, self.pieces or ()) if self.is_owner else ()
        return _merged([*self.todo, *others])

    @cached_property
    def _is_todo(self) -> list[bool]:
        todo = {*self.todo}
        return [piece in todo for piece in self.pieces or ()]

    @cached_property
    def _starts(self) -> list[int]:
        return [offset for offset, _ in self.pieces or ()]

    def literals(self) -> Iterator[tuple[int, memoryview]]:
        for offset, data in self.file.literals:
            if self.is_whole and self.is_owner:
                yield offset, memoryview(data)
                continue
            for start, length in self._mine(offset, len(data)):
                yield start, memoryview(data)[start - offset : start - offset + length]

    def zeros(self) -> Iterator[Piece]:
        for offset, length in self.file.zeros:
            yield from self._mine(offset, length)

    def _mine(self, offset: int, length: int) -> Iterator[Piece]:
        end = offset + length
        first = max(0, bisect_right(self.ranges, (offset, self.file.size)) - 1)
        for start, stop in self.ranges[first : bisect_left(self.ranges, (end,))]:
            if stop > offset:
                yield max(start, offset), min(stop, end) - max(start, offset)

    def spans(self, plan: Plan) -> Iterator[Spans]:
        for spans in plan.spans(self.file):
            if self.is_whole:
                yield spans
                continue
            place = np.searchsorted(self._starts, spans.target, side="right") - 1
            found = spans.take(np.flatnonzero(np.array(self._is_todo)[place]))
            if len(found):
                yield found

    def copies(self, plan: Plan) -> Iterator[tuple[Slot, list[Copy]]]:
        return plan.copies(self.file, self._wants)

    def computed_copies(self, plan: Plan) -> dict[str, list[Copy]]:
        return plan.computed_copies(self.file, self._wants)

    def _wants(self, slot: Slot) -> bool:
        return self.is_whole or self._is_todo[bisect_right(self._starts, slot.extent.offset) - 1]


def deal(
    files: Sequence[TargetFile],
    pieces: Pieces,
    todo: Mapping[str, Collection[Piece]],
    nodes: Sequence[Hashable],
    rank: int,
) -> list[Share]:
    """Return the shares of process `rank`. `nodes` holds each process's node, by rank.

    A node gets whole files: two nodes writing to one page of a file would overwrite each other's bytes (NFS). Processes
    of one node share a page cache, and each gets a contiguous range. A coherent cluster file system counts as one node.
    """
    if len(nodes) == 1:
        return [Share(file, pieces[file.name], todo[file.name]) for file in files]
    sizes = {file.name: _own_size(file, pieces) + sum(length for _, length in todo[file.name]) for file in files}
    members: dict[Hashable, list[int]] = {}
    for number, node in enumerate(nodes):
        members.setdefault(node, []).append(number)
    loads = dict.fromkeys(members, 0)
    taken: dict[Hashable, set[str]] = {node: set() for node in members}
    for file in sorted(files, key=lambda file: -sizes[file.name]):
        node = min(loads, key=lambda node: (loads[node] + sizes[file.name]) / len(members[node]))
        loads[node] += sizes[file.name]
        taken[node].add(file.name)
    mine = nodes[rank]
    place, count, total, reached, found = members[mine].index(rank), len(members[mine]), max(1, loads[mine]), 0, []

    def is_mine(size: int) -> bool:
        nonlocal reached
        reached += size
        return min(count - 1, (2 * reached - size) * count // (2 * total)) == place

    for file in files:
        if file.name in taken[mine]:
            is_owner = is_mine(_own_size(file, pieces))
            wanted = [p for p in pieces[file.name] if p in todo[file.name] and is_mine(p[1])]
            if is_owner or wanted:
                found.append(Share(file, pieces[file.name], set(wanted), is_owner))
    return found


def _merged(pieces: Iterable[Piece]) -> list[tuple[int, int]]:
    """Return sorted ranges (start, stop), joined if they touch."""
    found: list[tuple[int, int]] = []
    for start, length in sorted(pieces):
        if found and found[-1][1] == start:
            found[-1] = found[-1][0], start + length
        else:
            found.append((start, start + length))
    return found


def _own_size(file: TargetFile, pieces: Pieces) -> int:
    return file.size - sum(length for _, length in pieces[file.name])
