"""Tensors of a DCP checkpoint."""

from __future__ import annotations

import os
from array import array
from collections.abc import Hashable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ckpt.containers.dcp.items import Items, too_short
from ckpt.containers.dcp.metadata import DATA_FILE, Metadata, TensorEntry
from ckpt.containers.dcp.tiling import Tiling, copies, note_of_copy
from ckpt.containers.torchfile.values import Record
from ckpt.move.listing import names_in
from ckpt.plan.assemble import whole_copies
from ckpt.plan.checkpoint import SourceFile
from ckpt.plan.dtypes import DType
from ckpt.plan.tensors import Box, Extent, Fragment, Pieces, Shape, Source, Whole, whole

Placed = list[tuple[Box, Extent]]


@dataclass(frozen=True, slots=True)
class Chunks:
    """A tensor cut into contiguous boxes in several files.

    For each box, `rows` holds a file number, a byte offset, the box's offsets and sizes: plain numbers, for millions.
    """

    files: list[tuple[str, int | None]]
    dtype: DType
    rows: array[int]

    def fragments(self, shape: Shape) -> Iterator[Fragment]:
        rank = len(shape)
        width = 2 + 2 * rank
        for at in range(0, len(self.rows), width):
            number, offset, *box = self.rows[at : at + width]
            path, writer = self.files[number]
            sizes = tuple(box[rank:])
            extent = Extent.contiguous(path, offset, self.dtype, sizes)
            yield Fragment(Box(tuple(box[:rank]), sizes), extent, writer)

    def cut(self, shape: Shape) -> Hashable:
        width = 2 + 2 * len(shape)
        return id(self.files), *(self.rows[at::width].tobytes() for at in range(width) if at != 1)


@dataclass(slots=True)
class ChunkedTensor:
    """A key's tensor. `wrapped` holds chunks of a tensor subclass that wraps other tensors."""

    entry: TensorEntry
    placed: Placed = field(default_factory=list)
    replicas: Placed = field(default_factory=list)
    number: int | float | bool | None = None
    wrapped: dict[Box, Record] = field(default_factory=dict)


@dataclass
class DataFiles:
    """Data files read so far."""

    files: dict[str, SourceFile] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    ranks: int = 0
    _numbers: dict[str, int] = field(default_factory=dict)
    _names: list[tuple[str, int | None]] = field(default_factory=list)

    def read(self, metadata: Metadata) -> list[Any]:
        """Return the objects in `metadata` by number: a `ChunkedTensor`, or a plain value.

        Raise CorruptError if a file is missing, too short, or holds another object.
        """
        self.add_file(metadata.path)
        found: list[Any] = [None] * len(metadata.keys)
        for tensor, entry in metadata.entries.items():
            found[tensor] = ChunkedTensor(entry)
        numbers, boxes, replicas = metadata.owners()
        tiling = Tiling(metadata, numbers)
        with Items() as items:
            for path, rows in metadata.places.by_file():
                offsets = [*map(metadata.places.offsets.__getitem__, rows)]
                lengths = [*map(metadata.places.lengths.__getitem__, rows)]
                is_row = tiling.is_row(path, offsets, lengths)
                size = -1
                for row, offset, length in zip(rows, offsets, lengths, strict=True):
                    number, box = numbers[row], boxes[row]
                    if number is None:
                        continue
                    key = metadata.keys[number]
                    if size < 0:
                        size = items.open(path, key, box)
                    if offset + length > size:
                        raise too_short(path, size, offset + length, key, box)
                    if box is None:
                        found[number] = items.value(offset, length, key)
                    else:
                        _take(found[number], box, row in replicas, items, offset, length)
                    if not is_row and not items.is_shard(offset):  # a shard's header names its tensors
                        tiling.add(metadata.places[row], number)
            tiling.finish(items.files)
            for pair in copies(items.files):
                held: dict[str, dict[str, tuple[Box, Extent]]] = {path: {} for path in pair}
                for tensor in metadata.entries:
                    for box, extent in found[tensor].placed:
                        if extent.path in held:
                            held[extent.path][metadata.keys[tensor]] = box, extent
                if (note := note_of_copy(*pair, held)) is not None:
                    self.notes.append(note)
            self.files |= items.files
        return found

    def source(self, dtype: DType, shape: Shape, placed: Placed) -> Source:
        if len(placed) == 1 and placed[0][0] == whole(shape):
            return Whole(placed[0][1], writer_of(placed[0][1].path))
        placed = sorted(placed, key=lambda part: part[0].offsets)
        if not all(extent.is_contiguous for _, extent in placed):  # for example channels_last
            return Pieces(tuple(Fragment(box, extent, writer_of(extent.path)) for box, extent in placed))
        rows = array("q")
        for box, extent in placed:
            rows.extend((self._number(extent.path), extent.offset, *box.offsets, *box.sizes))
        return Chunks(self._names, dtype, rows)

    def replicas(self, tensor: ChunkedTensor) -> tuple[Source, ...]:
        """Return complete replicas. A replica's missing boxes come from an earlier copy."""
        held = ((part[0], part) for part in (*tensor.placed, *tensor.replicas))
        dtype, shape = tensor.entry.dtype, tensor.entry.shape
        return tuple(self.source(dtype, shape, copy) for copy in whole_copies(held)[1:])

    def _number(self, path: str) -> int:
        number = self._numbers.setdefault(path, len(self._numbers))
        if number == len(self._names):
            self._names.append((path, writer_of(path)))
        return number

    def add_file(self, path: str) -> None:
        self.files[path] = SourceFile.stat(path)

    def count_ranks(self, folder: Path) -> None:
        """Count the ranks with a file, even an empty one. Call after `read`."""
        left_over = []
        for name in names_in(folder):
            match = DATA_FILE.fullmatch(name)
            if match is None:
                continue
            path = str(folder / name)
            if path in self.files or os.path.getsize(path) == 0:
                self.ranks = max(self.ranks, int(match[1]) + 1)
            else:
                left_over.append(name)
        if left_over:
            self.notes.append(
                f"{folder.name}: .metadata places nothing in {', '.join(sorted(left_over)[:4])}"
                f"{' and others' if len(left_over) > 4 else ''}: left over from an earlier save"
            )


def _take(tensor: ChunkedTensor, box: Box, is_replica: bool, items: Items, offset: int, length: int) -> None:
    extent = items.elements(offset, length, tensor.entry.key, box, tensor.entry.dtype)
    if isinstance(extent, Record):
        tensor.wrapped.setdefault(box, extent)
        return
    (tensor.replicas if is_replica else tensor.placed).append((box, extent))
    if not box.sizes and not is_replica:
        tensor.number = items.number(extent)


def writer_of(path: str) -> int | None:
    match = DATA_FILE.fullmatch(os.path.basename(path))
    return int(match[1]) if match else None
