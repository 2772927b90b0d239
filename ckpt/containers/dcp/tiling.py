"""Check that items in `.distcp` files follow each other without gaps.

Only this check finds a damaged offset, or one rank's file copied over another. torch writes items back to back (2.1 to
2.13, `filesystem.py`, `_write_item`). Only ties written by ckpt share items, and then all of them.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import accumulate

from ckpt.base.errors import CorruptError
from ckpt.base.text import pluralize
from ckpt.containers.dcp.metadata import ItemPlace, Metadata
from ckpt.containers.sources import is_constant
from ckpt.move.source import open_file, read_at
from ckpt.plan.checkpoint import SourceFile
from ckpt.plan.tensors import Box, Extent

#: Bytes to hash when looking for copies.
_TAIL = 1 << 16
_CHUNK = 1 << 20


class Tiling:
    def __init__(self, metadata: Metadata, owners: Sequence[object]) -> None:
        self._metadata = metadata
        unused = (metadata.places[row] for row, owner in enumerate(owners) if owner is None)
        self._unused = {(place.path, place.offset): place.length for place in unused if place.length}
        self._last = ItemPlace("", 0, 0)
        self._number = -1
        self._ends: dict[str, int] = {}
        self._loose: set[str] = set()
        self._shared: list[tuple[int, int, ItemPlace]] = []

    def is_row(self, path: str, offsets: Sequence[int], lengths: Iterable[int]) -> bool:
        """Return True if a file's items follow each other without gaps."""
        *ends, end = accumulate(lengths, initial=0)
        if is_row := offsets == ends:
            self._ends[path] = end
        return is_row

    def add(self, place: ItemPlace, number: int) -> None:
        end = self._ends.get(place.path, 0)
        if place.offset > end:
            if not self._is_filled(place.path, end, place.offset):
                self._loose.add(place.path)
        elif place.offset < end:
            if place != self._last:
                raise self._overlap(place, number, f"offset {end} or more, after {self._metadata.keys[self._number]}")
            self._shared.append((number, self._number, place))
            return
        self._ends[place.path] = place.offset + place.length
        self._last, self._number = place, number

    def finish(self, files: Mapping[str, SourceFile]) -> None:
        """Check the tensors that share items: an error if bytes lie outside every item."""
        ends = {path: end for path, end in self._ends.items() if path in files}  # other paths hold only empty tensors
        loose = self._loose | {path for path, end in ends.items() if not self._is_filled(path, end, files[path].size)}
        tensors, chunks = self._metadata.entries, self._metadata.chunks
        for one, other, place in self._shared:
            if not (one in tensors and other in tensors) or chunks(one) != chunks(other) or place.path in loose:
                raise self._overlap(place, one, f"its own bytes, not {self._metadata.keys[other]}'s")

    def _is_filled(self, path: str, start: int, stop: int) -> bool:
        while start < stop and (path, start) in self._unused:
            start += self._unused[path, start]
        return start == stop

    def _overlap(self, place: ItemPlace, number: int, expected: str) -> CorruptError:
        return CorruptError(
            "the metadata has overlapping items",
            path=place.path,
            fqn=self._metadata.keys[number],
            expected=expected,
            found=f"{pluralize(place.length, 'byte')} at {place.offset}",
            hint="is .metadata damaged, or of another save than the file?",
        )


def copies(files: Mapping[str, SourceFile]) -> Iterator[tuple[str, str]]:
    """Yield pairs of equal data files, the original first."""
    seen: dict[tuple[int, int], str] = {}
    sizes = Counter(file.size for file in files.values())
    for path, file in sorted(files.items()):
        if sizes[file.size] > 1:
            tail = hash(_read_range(path, max(0, file.size - _TAIL), file.size))
            first = seen.setdefault((file.size, tail), path)
            if first != path and _are_equal(first, path, file.size):
                yield first, path


def note_of_copy(first: str, path: str, held: Mapping[str, Mapping[str, tuple[Box, Extent]]]) -> str | None:
    """Return a note if two equal files hold different parts of a tensor. `held` has each file's parts, by key.

    Replicas and constant tensors get no note.
    """
    for key, (box, extent) in held.get(path, {}).items():
        other = held.get(first, {}).get(key)
        if other is None or other[0] == box or not extent.numel:
            continue
        if not is_constant(path, extent.offset, extent.nbytes, extent.dtype.itemsize):
            names = f"{os.path.basename(path)} and {os.path.basename(first)}"
            return (
                f"{names} are equal byte for byte, but hold different parts of tensors (for example {key}): correct "
                "only if these parts of the model are equal; otherwise one file was copied over the other"
            )
    return None


def _are_equal(one: str, other: str, size: int) -> bool:
    spans = ((start, min(size, start + _CHUNK)) for start in range(0, size, _CHUNK))
    return all(_read_range(one, *span) == _read_range(other, *span) for span in spans)


def _read_range(path: str, start: int, stop: int) -> bytes:
    descriptor = open_file(path)
    try:
        return read_at(descriptor, path, start, stop - start)
    finally:
        os.close(descriptor)
