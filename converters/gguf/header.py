"""Header of a GGUF file: its metadata, and each tensor's type, shape and place.

Format: `docs/gguf.md` in ggml, version 3 (version 2 has the same layout). Magic, version, number of tensors, number of
keys; then keys with values; then tensors with name, dims (innermost first), type and offset; then padding up to the
alignment, and the tensors' bytes. No tensor data is read.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from ckpt.base.errors import CorruptError, LossError, StorageError
from ckpt.base.text import pluralize
from ckpt.move.source import opened, read_up_to
from ckpt.plan.tensors import Shape
from converters.gguf.types import BY_NUMBER, GgmlType

MAGIC = b"GGUF"
#: Default in bytes. The key `general.alignment` changes it.
ALIGNMENT = 32
VERSIONS = (2, 3)
#: Limits for memory use, far above any model's needs.
MAX_TENSORS, MAX_KEYS, MAX_DIMS, MAX_TEXT = 200_000, 100_000, 8, 16 << 20
#: Longer arrays are skipped: the vocabulary, its scores and merges.
MAX_ARRAY = 4096
_WINDOW = 1 << 20

#: Value kinds with a fixed size.
_NUMBERS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9


class Skipped(NamedTuple):
    """A long array in the metadata, only counted."""

    length: int


class TensorInfo(NamedTuple):
    """Tensor, with its shape in torch's order and byte range in the file."""

    name: str
    type: GgmlType
    shape: Shape
    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class GgufHeader:
    entries: tuple[TensorInfo, ...]
    metadata: Mapping[str, Any]


@dataclass(slots=True)
class _Cursor:
    descriptor: int
    path: str
    size: int
    at: int = 0
    _start: int = 0
    _window: bytes = field(default=b"", repr=False)

    def take(self, length: int) -> bytes:
        """Return the next bytes. Raise CorruptError if the file ends before."""
        start = self.at
        self.skip(length)
        if not self._start <= start <= self.at <= self._start + len(self._window):
            self._start, self._window = start, read_up_to(self.descriptor, start, max(length, _WINDOW))
        first = start - self._start
        found = self._window[first : first + length]
        if len(found) != length:
            raise self.fault("the file ends within its header")
        return found

    def number(self, code: str) -> Any:
        return struct.unpack(f"<{code}", self.take(struct.calcsize(f"<{code}")))[0]

    def count(self, what: str, limit: int) -> int:
        found: int = self.number("Q")
        if found > limit:
            raise self.fault(f"the header has too many {what}", expected=f"at most {limit}", found=found)
        return found

    def text(self) -> str:
        length = self.count("bytes in a string", MAX_TEXT)
        try:
            return self.take(length).decode("utf-8")
        except UnicodeDecodeError:
            raise self.fault("a string in the header is not UTF-8") from None

    def value(self, kind: int) -> Any:
        if kind in _NUMBERS:
            return self.number(_NUMBERS[kind])
        if kind == _STRING:
            return self.text()
        if kind != _ARRAY:
            raise self.fault("the header has a value of an unknown kind", expected="0 to 12", found=kind)
        inner, length = self.number("I"), self.number("Q")
        if inner == _ARRAY:
            raise self.fault("the header has an array of arrays")
        if length <= MAX_ARRAY:
            return [self.value(inner) for _ in range(length)]
        if inner in _NUMBERS:
            self.skip(length * struct.calcsize(f"<{_NUMBERS[inner]}"))
        else:
            for _ in range(length):  # ends at the end of the file at the latest
                self.skip(self.number("Q"))
        return Skipped(length)

    def skip(self, length: int) -> None:
        if self.at + length > self.size:
            raise self.fault(
                "the file ends within its header", expected=f"{pluralize(self.at + length, 'byte')} or more"
            )
        self.at += length

    def fault(self, what: str, **more: Any) -> CorruptError:
        return CorruptError(what, path=self.path, **{"found": f"{pluralize(self.size, 'byte')}", **more})


def read_header(path: str | os.PathLike[str]) -> GgufHeader:
    name = os.fspath(path)
    try:
        with opened(name) as descriptor:
            return _parse(_Cursor(descriptor, name, os.fstat(descriptor).st_size))
    except OSError as error:
        raise StorageError(f"the file cannot be read: {error.strerror}", path=name) from error


def _parse(file: _Cursor) -> GgufHeader:
    if (magic := file.take(4)) != MAGIC:
        raise file.fault("this is not a GGUF file", expected=repr(MAGIC), found=repr(magic))
    if (version := file.number("I")) not in VERSIONS:
        if int.from_bytes(version.to_bytes(4, "little"), "big") in VERSIONS:
            raise LossError(
                "big-endian GGUF files are not read",
                path=file.path,
                hint="`gguf-convert-endian FILE little` converts it",
            )
        raise LossError("unknown version of GGUF", path=file.path, expected="2 or 3", found=version)
    num_tensors, num_keys = file.count("tensors", MAX_TENSORS), file.count("keys", MAX_KEYS)
    metadata: dict[str, Any] = {}
    for _ in range(num_keys):
        key = file.text()
        if key in metadata:
            raise file.fault("a key appears twice in the header", found=repr(key))
        metadata[key] = file.value(file.number("I"))
    listed = [_tensor_record(file) for _ in range(num_tensors)]
    alignment = metadata.get("general.alignment", ALIGNMENT)
    if type(alignment) is not int or alignment <= 0 or alignment & (alignment - 1):
        raise file.fault("general.alignment is not a power of two", found=repr(alignment))
    base = aligned(file.at, alignment)
    entries = [_placed(file, base, alignment, *one) for one in listed]
    _check_places(file, entries, base, alignment)
    return GgufHeader(tuple(entries), metadata)


def aligned(offset: int, alignment: int = ALIGNMENT) -> int:
    """Return the next multiple of `alignment`."""
    return -(-offset // alignment) * alignment


def _tensor_record(file: _Cursor) -> tuple[str, Shape, int, int]:
    name, dims = file.text(), file.number("I")
    if dims > MAX_DIMS:
        raise file.fault("a tensor has too many dims", fqn=name, expected=f"at most {MAX_DIMS}", found=dims)
    shape = tuple(file.number("Q") for _ in range(dims))
    return name, shape[::-1], file.number("I"), file.number("Q")


def _placed(file: _Cursor, base: int, alignment: int, name: str, shape: Shape, number: int, offset: int) -> TensorInfo:
    if (kind := BY_NUMBER.get(number)) is None:
        known = ", ".join(one.name for one in BY_NUMBER.values())
        raise LossError("unknown type of a tensor in GGUF", path=file.path, fqn=name, expected=known, found=number)
    if offset % alignment:
        raise file.fault("a tensor is not aligned", fqn=name, expected=f"a multiple of {alignment}", found=offset)
    try:
        return TensorInfo(name, kind, shape, base + offset, base + offset + kind.nbytes(shape))
    except ValueError as error:
        raise file.fault("a row is not a number of whole blocks", fqn=name, expected=str(error), found=shape) from None


def _check_places(file: _Cursor, entries: Iterable[TensorInfo], base: int, alignment: int) -> None:
    names: set[str] = set()
    reached, end = base, base
    for entry in sorted(entries, key=lambda one: (one.start, one.stop)):
        if entry.name in names:
            raise file.fault("a tensor appears twice in the header", fqn=entry.name, found="two entries")
        names.add(entry.name)
        if entry.start != reached:
            what = (
                "the tensors leave a hole in the file" if entry.start > reached else "two tensors overlap in the file"
            )
            raise file.fault(what, fqn=entry.name, expected=f"byte {reached}", found=f"byte {entry.start}")
        end, reached = entry.stop, aligned(entry.stop, alignment)
    if end > file.size:
        raise file.fault(
            "the file is shorter than its header requires",
            expected=f"{pluralize(end, 'byte')}",
            hint="the file is truncated or was not written to the end; fetch or save it again",
        )
    if file.size > reached and names:
        raise file.fault("the file is longer than its header requires", expected=f"{pluralize(reached, 'byte')}")
