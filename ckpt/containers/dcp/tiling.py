"""Whether the places that DCP's `.metadata` names can be those of its items: nothing else checks a damaged offset.

torch writes item behind item, with nothing between them (2.1 to 2.13, `distributed/checkpoint/filesystem.py`,
`_write_item`).  Only ties that were written here share items, and then all of them.
"""

from __future__ import annotations

from collections.abc import Mapping

from ckpt.containers.dcp.metadata import Metadata, Place
from ckpt.errors import CorruptError
from ckpt.plan.checkpoint import SourceFile


class Tiling:
    """Takes the places of all items by file and offset, and raises CorruptError for one that cannot be."""

    def __init__(self, metadata: Metadata) -> None:
        self._entries = metadata.entries
        self._unused = {(place.path, place.offset): place.length for place in metadata.unused if place.length}
        self._last = Place("", 0, 0)
        self._key = ""
        self._ends: dict[str, int] = {}
        self._loose: set[str] = set()
        self._shared: list[tuple[str, str, Place]] = []

    def add(self, place: Place, key: str) -> None:
        end = self._ends.get(place.path, 0)
        if place.offset > end:
            if not self._is_filled(place.path, end, place.offset):
                self._loose.add(place.path)
        elif place.offset < end:
            if place != self._last:
                raise _overlap(place, key, f"offset {end} or more, behind {self._key}")
            self._shared.append((key, self._key, place))
            return
        self._ends[place.path] = place.offset + place.length
        self._last, self._key = place, key

    def finish(self, files: Mapping[str, SourceFile]) -> None:
        """Check what shares items; `files` are the data files.

        Where bytes of a file are of no item, it is a damaged offset that makes two tensors look like one.
        """
        ends = {path: end for path, end in self._ends.items() if not self._is_filled(path, end, files[path].size)}
        loose = self._loose | ends.keys()
        for key, other, place in self._shared:
            mine, its = self._entries.get(key), self._entries.get(other)
            if mine is None or its is None or mine.chunks != its.chunks or place.path in loose:
                raise _overlap(place, key, f"bytes of its own, not those of {other}")

    def _is_filled(self, path: str, start: int, stop: int) -> bool:
        """Whether items without elements stand there."""
        while start < stop and (path, start) in self._unused:
            start += self._unused[path, start]
        return start == stop


def _overlap(place: Place, key: str, expected: str) -> CorruptError:
    return CorruptError(
        "the metadata places an item in the bytes of another one",
        path=place.path,
        fqn=key,
        expected=expected,
        found=f"{place.length} bytes at {place.offset}",
        hint="is .metadata damaged, or of another save than the file?",
    )
