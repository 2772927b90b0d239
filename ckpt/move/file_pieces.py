"""Pieces of target files: their digests, to show where a file has changed, and their shares among processes."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from types import MappingProxyType

import numpy as np
from xxhash import xxh3_128

from ckpt.base.errors import CorruptError
from ckpt.move.files import translate_os_errors
from ckpt.move.source import GAP, read_into
from ckpt.plan.checkpoint import Slot, TargetFile
from ckpt.plan.planner import Copy, Plan
from ckpt.plan.spans import Piece, Spans

CHUNK = 1 << 20  # fits the processor's cache
_JOB = 32 << 20  # bytes of small pieces in one batch
_MAX_PIECES = 4096  # per file and for all files
_MAX_PIECES_TOGETHER = 1_000_000
_COMPUTING = 6  # a computed byte takes as long as so many copied ones


@dataclass(frozen=True, slots=True)
class FileDigest:
    """A file's size in bytes, each piece's xxh3-128, and the digest of the other bytes in order."""

    size: int
    pieces: dict[Piece, str]
    rest: str


def max_pieces(num_files: int) -> int:
    return max(1, min(_MAX_PIECES, _MAX_PIECES_TOGETHER // max(1, num_files)))


def pieces_of(file: TargetFile, at_most: int) -> list[Piece]:
    """Return a target file's pieces: one per filled range, merged if ranges interleave or are more than `at_most`."""
    spans = sorted((extent.offset, extent.end) for extent in file.filled if extent.numel)
    least = file.size // at_most if len(spans) > at_most else 0
    pieces: list[Piece] = []
    start = stop = 0
    for low, high in spans:
        if pieces and (low < stop or stop - start < least):
            pieces.pop()
            stop = max(stop, high)
        else:
            start, stop = low, high
        pieces.append((start, stop - start))
    return pieces


def digest_of_bytes(content: bytes) -> FileDigest:
    return FileDigest(len(content), {}, xxh3_128(content).hexdigest())


def jobs(pieces: Iterable[Piece]) -> Iterator[list[Piece] | None]:
    """Yield hashing jobs for several threads: lists of pieces, or None for the file's other bytes."""
    job: list[Piece] = []
    size = 0
    for piece in pieces:
        job.append(piece)
        size += piece[1]
        if size >= _JOB:
            yield job
            job, size = [], 0
    if job:
        yield job
    yield None


class Hasher:
    """Hasher for one thread. `advance` gets the number of bytes read."""

    def __init__(self, chunk: int = CHUNK, advance: Callable[[int], None] = lambda _: None) -> None:
        self._buffer = memoryview(bytearray(chunk))
        self._advance = advance

    def pieces(self, descriptor: int, path: str, pieces: Iterable[Piece]) -> dict[Piece, str]:
        hashers = {piece: xxh3_128() for piece in pieces}
        for piece, part in self._parts(descriptor, path, [*hashers]):
            hashers[piece].update(part)
        return {piece: hasher.hexdigest() for piece, hasher in hashers.items()}

    def rest(self, descriptor: int, path: str, size: int, pieces: Iterable[Piece]) -> str:
        """Return the digest of all bytes outside `pieces` (sorted)."""
        hasher = xxh3_128()
        for _, part in self._parts(descriptor, path, [*between(size, pieces)]):
            hasher.update(part)
        return hasher.hexdigest()

    def _parts(self, descriptor: int, path: str, ranges: Sequence[Piece]) -> Iterator[tuple[Piece, memoryview]]:
        """Yield each range's bytes in parts, in order. Ranges close together share a read."""
        start = end = 0  # range in the buffer
        for number, piece in enumerate(ranges):
            offset, stop = piece[0], sum(piece)
            while offset < stop:
                if not start <= offset < end:
                    reach = min(stop, offset + len(self._buffer))
                    for low, length in map(ranges.__getitem__, range(number + 1, len(ranges))):
                        if not reach <= low <= reach + GAP or low + length > offset + len(self._buffer):
                            break
                        reach = low + length
                    with translate_os_errors(path):
                        count = read_into(descriptor, offset, self._buffer[: reach - offset])
                    if not count:
                        raise CorruptError("the file ends while it is being read", path=path, found=f"at byte {offset}")
                    start, end = offset, offset + count
                part = self._buffer[offset - start : min(stop, end) - start]
                yield piece, part
                self._advance(len(part))
                offset += len(part)


def between(size: int, pieces: Iterable[Piece]) -> Iterator[Piece]:
    """Yield the ranges outside `pieces` (sorted)."""
    end = 0
    for offset, length in (*pieces, (size, 0)):
        if offset > end:
            yield end, offset - end
        end = offset + length


Pieces = Mapping[str, Sequence[Piece]]


@dataclass(frozen=True, slots=True)
class Unit:
    """Pieces for one process, which would else compute the same content as another one."""

    pieces: Sequence[Piece]
    is_computed: bool = False

    def part(self, todo: Collection[Piece]) -> tuple[int, list[Piece]]:
        """Return the pieces in `todo`, and their cost."""
        found = [piece for piece in self.pieces if piece in todo]
        return sum(length for _, length in found) * (_COMPUTING if self.is_computed else 1), found


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
    units: Mapping[str, Sequence[Unit]] = MappingProxyType({}),
) -> list[Share]:
    """Return the shares of process `rank`. `nodes` holds each process's node, by rank.

    A node gets whole files: two nodes writing to one page of a file would overwrite each other's bytes (NFS). Processes
    of one node share a page cache, and each gets a contiguous range. A coherent cluster file system counts as one node.
    """
    if len(nodes) == 1:
        return [Share(file, pieces[file.name], todo[file.name]) for file in files]
    parts = {
        name: [unit.part(todo[name]) for unit in units[name]]
        if name in units
        else [(piece[1], [piece]) for piece in inside if piece in todo[name]]
        for name, inside in pieces.items()
    }
    sizes = {file.name: _own_size(file, pieces) + sum(cost for cost, _ in parts[file.name]) for file in files}
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
            wanted = {piece for cost, part in parts[file.name] if is_mine(cost) for piece in part}
            if is_owner or wanted:
                found.append(Share(file, pieces[file.name], wanted, is_owner))
    return found


def units_of(plan: Plan, pieces: Pieces) -> dict[str, list[Unit]]:
    """Return each file's pieces, together if they have a computation in common. The largest one gives the order."""
    found = {}
    for file in plan.target.files if plan.computed_bytes else ():
        own = pieces[file.name]
        starts, members = [offset for offset, _ in own], dict[Piece, set[Piece]]()
        for copies in plan.computed_copies(file).values():
            places = {own[bisect_right(starts, copy.target.offset) - 1] for copy in copies}
            unit = places.union(*(members.get(piece, ()) for piece in places))
            members |= dict.fromkeys(unit, unit)
        found[file.name] = [
            Unit(sorted(unit), piece in members)
            for piece, unit in ((piece, members.get(piece, {piece})) for piece in own)
            if piece == max(unit, key=lambda one: (one[1], one[0]))
        ]
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
