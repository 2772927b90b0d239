"""Items in a DCP checkpoint's data files.

Facts from torch's `distributed/checkpoint/filesystem.py` (2.13): a data file is a sequence of items without padding,
each from its own `torch.save`. With `SerializationFormat.SAFETENSORS`, a file has the values first, then one
safetensors file with all tensors, and the metadata places each tensor at its start.

A checkpoint has one item per tensor and rank. Items with one dtype, shape and torch version differ only in the
elements, their checksums and an id. The first one is read in full, later ones are compared with it.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from operator import itemgetter
from typing import Any

from ckpt.base.errors import CorruptError, NotFoundError, UnsafeError
from ckpt.base.text import pluralize
from ckpt.containers import safetensors as st
from ckpt.containers.dcp.metadata import ItemPlace
from ckpt.containers.dcp.shards import saved_offsets
from ckpt.containers.torchfile import read as torchfile
from ckpt.containers.torchfile.scalars import scalar_from_bytes
from ckpt.containers.torchfile.values import Record, StoredTensor
from ckpt.move.source import open_file, read_up_to
from ckpt.plan.checkpoint import SourceFile
from ckpt.plan.dtypes import DType
from ckpt.plan.tensors import Box, Extent, Shape

#: Varying bytes: checksums after records and in the directory, and the id.
_VARYING = re.compile(rb"PK\x07\x08(.{4})|PK\x01\x02.{12}(.{4})|/\.data/serialization_idFB..Z*([0-9]{40})", re.DOTALL)
_SMALL = 8 << 10  # bytes
_AHEAD = 64 << 10  # bytes read ahead after the last item
_MAX_TAIL = 4 << 10
_MAX_ALIKE = 8  # cached forms
_MAX_SHARED = 16 << 10  # maximum item size for caching its value
_TELLING = slice(64, 192)  # the cache key, inside the pickle
_UNKNOWN = None, None


@dataclass(frozen=True, slots=True)
class _Kind:
    head_size: int
    tail_size: int
    same: Callable[[bytes], Any]
    parts: Any
    extent: Extent  # offset relative to the item's start

    def fits(self, item: bytes) -> bool:
        return bool(self.same(item) == self.parts)


class Items:
    """Reader of items, one file after the other, fastest in offset order."""

    def __init__(self) -> None:
        self.files: dict[str, SourceFile] = {}
        self._path = ""
        self._fd = -1
        self._reached = -1  # end of the last read
        self._ahead: tuple[int, bytes] = 0, b""
        self._kinds: dict[tuple[int, DType, Shape], list[_Kind]] = {}
        self._values: dict[bytes, tuple[bytes, Any]] = {}  # by pickle bytes: item and value
        self._shards: dict[tuple[str, int], dict[str, tuple[Shape, st.HeaderEntry]]] = {}

    def __enter__(self) -> Items:
        return self

    def __exit__(self, *exc: object) -> None:
        self._close()

    def _close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
        self._fd, self._path, self._reached, self._ahead = -1, "", -1, (0, b"")

    def open(self, path: str, key: str, box: Box | None) -> int:
        """`key` and `box` describe the file's first item, for errors."""
        self._close()
        if path not in self.files:
            self.files[path] = _stat(path, key, box)
        self._fd, self._path = open_file(path), path
        return self.files[path].size

    def _read(self, offset: int, length: int) -> bytes:
        start, data = self._ahead
        if offset < start or offset + length > start + len(data):
            if offset != self._reached:
                self._reached = offset + length
                return read_up_to(self._fd, offset, length)
            start, data = self._ahead = offset, read_up_to(self._fd, offset, max(length, _AHEAD))
        if self._reached < offset + length:
            self._reached = offset + length
        return data[offset - start : offset - start + length]

    def elements(self, offset: int, length: int, key: str, box: Box, dtype: DType) -> Extent | Record:
        """Return a chunk's extent, or the record of a tensor subclass. Raise CorruptError for any other item."""
        known = self._kinds.setdefault((length, dtype, box.sizes), [])
        for kind in known:
            if self._is_alike(offset, length, kind):
                extent = kind.extent
                return Extent(self._path, offset + extent.offset, extent.dtype, extent.shape, extent.strides)
        if (in_shard := self._in_shard(offset, key, box, dtype)) is not None:
            return in_shard
        place = ItemPlace(self._path, offset, length)
        with _about(key, box, place):
            found = torchfile.read(*place)
        stored = found.root
        if isinstance(stored, Record):
            return stored
        if not isinstance(stored, StoredTensor):
            raise _other(self._path, key, box, dtype, type(stored).__name__)
        if stored.dtype != dtype or stored.shape != box.sizes:
            raise _other(self._path, key, box, dtype, f"{stored.dtype} of shape {list(stored.shape)}")
        if len(known) < _MAX_ALIKE and (kind_ := self._kind(place, found, stored.extent)):
            known.append(kind_)
        return stored.extent

    def is_shard(self, offset: int) -> bool:
        """Return True if a safetensors file begins at `offset`. Call after `elements`."""
        return (self._path, offset) in self._shards

    def _in_shard(self, offset: int, key: str, box: Box, dtype: DType) -> Extent | None:
        where = self._path, offset
        if where not in self._shards:
            head = read_up_to(self._fd, offset, 9)
            length, size = int.from_bytes(head[:8], "little"), self.files[self._path].size - offset
            if head[8:] != b"{" or length + 8 > min(size, st.MAX_HEADER):
                return None
            header = st.parse_header(read_up_to(self._fd, offset + 8, length), size, self._path)
            begin = saved_offsets(header, self._path)
            self._shards[where] = {one.name: (begin.get(one.name, ()), one) for one in header.entries}
        begins, entry = self._shards[where].get(key, ((), None))
        if entry is None or (begins, entry.shape, entry.dtype) != (box.offsets, box.sizes, dtype):
            found = (
                "no such tensor" if entry is None else f"{entry.dtype} of shape {list(entry.shape)} at {list(begins)}"
            )
            raise _other(self._path, key, box, dtype, found)
        return Extent.contiguous(self._path, offset + entry.start, dtype, box.sizes)

    def _is_alike(self, offset: int, length: int, kind: _Kind) -> bool:
        if length <= _SMALL:
            item = self._read(offset, length)
            return len(item) == length and kind.fits(item)
        tail_size = kind.tail_size
        ends = [
            read_up_to(self._fd, offset, kind.head_size),
            read_up_to(self._fd, offset + length - tail_size, tail_size),
        ]
        return kind.fits(b"".join(ends))

    def _kind(self, place: ItemPlace, found: torchfile.TorchFile, extent: Extent) -> _Kind | None:
        """Return None if the item has no own elements or is unusual."""
        records = [record for name, record in found.records.items() if name.startswith("data/")]
        if found.container != "zip" or len(records) != 1 or records[0].offset != extent.offset:
            return None
        end = records[0].offset + records[0].size
        tail_size = place.offset + place.length - end
        if tail_size > _MAX_TAIL or extent.offset - place.offset > _MAX_TAIL:
            return None
        head = read_up_to(self._fd, place.offset, extent.offset - place.offset)
        tail = read_up_to(self._fd, end, tail_size)
        if len(tail) != tail_size:
            return None
        same = itemgetter(slice(0, len(head)), *_between(tail))
        moved = Extent(extent.path, len(head), extent.dtype, extent.shape, extent.strides)
        return _Kind(len(head), tail_size, same, same(head + tail), moved)

    def number(self, extent: Extent) -> int | float | bool:
        data = self._read(extent.offset, extent.dtype.itemsize)
        if len(data) != extent.dtype.itemsize:
            raise CorruptError("the file ends inside a tensor", path=extent.path)
        return scalar_from_bytes(data, extent.dtype)

    def value(self, offset: int, length: int, key: str) -> Any:
        """Return a plain value. Equal values are one shared object: do not change it."""
        item = self._read(offset, length) if length <= _MAX_SHARED else b""
        known, value = self._values.get(item[_TELLING], _UNKNOWN)
        if known == item:
            return value
        place = ItemPlace(self._path, offset, length)
        with _about(key, None, place):
            found = torchfile.read(*place)
        if item and len(item) == length and not any(name.startswith("data/") for name in found.records):
            self._values[item[_TELLING]] = item, found.root
        return found.root


def _stat(path: str, key: str, box: Box | None) -> SourceFile:
    try:
        return SourceFile.stat(path)
    except (FileNotFoundError, NotADirectoryError):
        raise CorruptError(
            "a data file is missing",
            path=path,
            fqn=key,
            expected=f"the file, with data{_for(box)}" if box else "the file",
            found="no file",
            hint="was the folder copied completely? every rank writes its own file",
        ) from None


def too_short(path: str, size: int, end: int, key: str, box: Box | None) -> CorruptError:
    return CorruptError(
        "the file ends before the data listed in the metadata",
        path=path,
        fqn=key,
        expected=f"{pluralize(end, 'byte')} or more{_for(box)}",
        found=f"{pluralize(size, 'byte')}",
        hint="the file is truncated, or of another save than .metadata",
    )


def _for(box: Box | None) -> str:
    return f" for {box}" if box is not None else ""


@contextlib.contextmanager
def _about(key: str, box: Box | None, place: ItemPlace) -> Iterator[None]:
    where = f"item of {pluralize(place.length, 'byte')} at {place.offset}{_for(box)}"
    try:
        yield
    except NotFoundError as error:
        raise CorruptError(
            f"an item of the file is damaged: {error.what}",
            path=place.path,
            fqn=key,
            expected="a tensor or value written by torch.save",
            found=where,
        ) from error
    except (CorruptError, UnsafeError) as error:
        error.fqn = error.fqn or key
        error.found = f"{error.found}; {where}" if error.found is not None else where
        if isinstance(error, CorruptError) or torchfile.NOT_READ in error.what:  # the metadata gives an item's bounds
            error.hint = error.hint or "is this another rank's file, or from another save than .metadata?"
        raise


def _other(path: str, key: str, box: Box, dtype: DType, found: str) -> CorruptError:
    return CorruptError(
        "an item contradicts the metadata",
        path=path,
        fqn=key,
        expected=f"{dtype} of shape {list(box.sizes)} for {box}",
        found=found,
        hint="the file is of another save than .metadata",
    )


def _between(tail: bytes) -> Iterator[slice]:
    reached, size = 0, len(tail)
    for match in _VARYING.finditer(tail):
        group = match.lastindex or 0
        yield slice(reached - size, match.start(group) - size)
        reached = match.end(group)
    yield slice(reached - size, None)
