"""The safetensors container: a strict header parser, and a writer for the official library's header.

Format: https://github.com/huggingface/safetensors (README, `safetensors/src/tensor.rs`, 0.8.0). Eight bytes hold the
header's length N, little endian. N bytes of JSON follow, then the tensors' bytes without gaps. The header maps each
name to dtype, shape and `data_offsets` (relative to the header's end). `__metadata__` maps strings to strings.

The header is parsed entry by entry: a hostile one fails at its first fault instead of filling the memory.
"""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from json.encoder import encode_basestring
from math import prod
from operator import itemgetter
from typing import NamedTuple

from ckpt.base.errors import CkptError, CorruptError, LossError, StorageError
from ckpt.base.text import pluralize, show_size
from ckpt.base.words import Message
from ckpt.move.source import opened, read_up_to
from ckpt.plan.dtypes import BY_TAG, DType
from ckpt.plan.tensors import Shape

#: The safetensors library's own limit.
MAX_HEADER = 100_000_000
#: Limits for memory use, far above any model's needs.
MAX_TENSORS = 200_000
MAX_METADATA = 100_000
MAX_DIMS = 64
MAX_ESCAPES = 10_000_000

#: The safetensors library's dtype order: widest first, so that all are aligned.
WRITE_ORDER = (
    *("U64", "I64", "F64", "C64", "F32", "U32", "I32", "BF16", "F16", "U16", "I16"),
    *("F8_E5M2FNUZ", "F8_E4M3FNUZ", "F8_E8M0", "F8_E4M3", "F8_E5M2", "I8", "U8", "F4", "BOOL"),
)
_RANK = {tag: rank for rank, tag in enumerate(WRITE_ORDER)}

_WITHOUT_TORCH = ("F6_E2M3", "F6_E3M2")
_PACKED = "F4"  # two elements per byte: the header counts elements, torch counts bytes

# Possessive since Python 3.11: an unclosed 100 MB string then fails without backtracking.
_ANY = rb"*+" if sys.version_info >= (3, 11) else rb"*"
_PLAIN = rb'[^"\\\x00-\x1f]' + _ANY
_STRING = rb'"(' + _PLAIN + rb"(?:\\." + _PLAIN + rb")" + _ANY + rb')"'
_KEY = re.compile(rb"[ \t\r\n]*" + _STRING + rb"[ \t\r\n]*:[ \t\r\n]*(\{)?")
_FIELD = re.compile(
    rb'[ \t\r\n]*"(dtype|shape|data_offsets)"[ \t\r\n]*:[ \t\r\n]*'
    rb'(?:"(\w{1,32})"|\[([^\[\]{}":]{0,2048})\])[ \t\r\n]*([,}])'
)
#: The safetensors library's own spelling. Numbers with 18 digits do not overflow.
_USUAL = re.compile(
    rb'"(?!__metadata__")(' + _PLAIN + rb')":\{"dtype":"(\w{1,32})",'
    rb'"shape":\[((?:(?:0|[1-9][0-9]{0,17})(?:,(?=[0-9])|(?=\]))){0,64})\],'
    rb'"data_offsets":\[(0|[1-9][0-9]{0,17}),(0|[1-9][0-9]{0,17})\]\}([,}])'
)
_VALUE = re.compile(_STRING + rb"[ \t\r\n]*([,}])")
_NUMBER = re.compile(rb"[ \t\r\n]*(0|[1-9][0-9]{0,19})[ \t\r\n]*")
_EMPTY = re.compile(rb"[ \t\r\n]*\}")
_NEXT = re.compile(rb"[ \t\r\n]*([,}])")


class HeaderEntry(NamedTuple):
    """One tensor: its shape in torch's count, and its byte range in the file."""

    name: str
    dtype: DType
    shape: Shape
    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class Header:
    entries: tuple[HeaderEntry, ...]
    metadata: Mapping[str, str]


def read_header(path: str | os.PathLike[str]) -> Header:
    """Raise CorruptError if the file breaks a rule of the format."""
    name = os.fspath(path)
    try:
        with opened(name) as descriptor:
            size = os.fstat(descriptor).st_size
            length = _header_length(read_up_to(descriptor, 0, 8), size, name)
            header = read_up_to(descriptor, 8, length)
    except OSError as error:
        raise StorageError(f"the file cannot be read: {error.strerror}", path=name) from error
    if len(header) != length:
        raise CorruptError(
            "the file ends within its header", path=name, expected=f"{pluralize(length + 8, 'byte')} or more"
        )
    return parse_header(header, size, name)


def _header_length(first: bytes, size: int, path: str) -> int:
    length, found = int.from_bytes(first, "little"), f"{pluralize(size, 'byte')}"
    if len(first) < 8:
        what, expected = "the file is too short for a safetensors header", "8 bytes or more"
    elif length > MAX_HEADER:
        what, expected, found = "the header is too long", f"at most {show_size(MAX_HEADER)}", show_size(length)
    elif length + 8 > size:
        what, expected = "the file ends within its header", f"{pluralize(length + 8, 'byte')} or more"
    else:
        return length
    raise CorruptError(what, path=path, expected=expected, found=found)


def parse_header(text: bytes, size: int, path: str) -> Header:
    if text.count(b"\\") > MAX_ESCAPES:
        raise CorruptError("the header has too many escapes", path=path, expected=f"at most {MAX_ESCAPES}")
    if text.count(b'"data_offsets"') > MAX_TENSORS:  # inside text, the quotes would be escaped
        raise CorruptError("the header lists too many tensors", path=path, expected=f"at most {MAX_TENSORS}")
    base = 8 + len(text)
    entries: dict[str, HeaderEntry] = {}
    metadata: dict[str, str] | None = None
    for name, value in _Entries(text, base, path):
        if name in entries:
            raise CorruptError("the name appears twice in the header", path=path, fqn=name)
        if isinstance(value, HeaderEntry):
            entries[name] = value
        elif metadata is not None:
            raise CorruptError("__metadata__ appears twice in the header", path=path)
        else:
            metadata = value
    _check_offsets(entries.values(), base, size, path)
    return Header(tuple(entries.values()), metadata or {})


@dataclass(slots=True)
class _Entries:
    text: bytes
    base: int
    path: str
    at: int = 0

    def fault(self, what: str, fqn: str | None = None) -> CorruptError:
        found = self.text[self.at : self.at + 60].decode("utf-8", "backslashreplace")
        return CorruptError(what, path=self.path, fqn=fqn, found=f"{found!r} at byte {8 + self.at}")

    def __iter__(self) -> Iterator[tuple[str, HeaderEntry | dict[str, str]]]:
        if not self.text.startswith(b"{"):
            raise self.fault("the header does not begin with '{'")
        self.at = 1
        empty = _EMPTY.match(self.text, 1)
        if empty:
            self.at = empty.end()
        has_more = not empty
        while has_more:
            usual = _USUAL.match(self.text, self.at)
            if usual:
                raw, tag, shape, start, stop, following = usual.groups()
                self.at, name = usual.end(), self.string(raw)
                yield name, self.entry(name, tag, _usual_shape(shape), int(start), int(stop))
                has_more = following == b","
                continue
            key = _KEY.match(self.text, self.at)
            if key is None:
                raise self.fault("the header is not valid safetensors JSON: a name was expected")
            name = self.string(key[1])
            self.at = key.end()
            if name == "__metadata__" and self.text.startswith(b"null", self.at):  # MLX writes null
                self.at += len(b"null")
            elif key[2] is None:
                raise self.fault("the header's value for this name is not an object", name)
            else:
                yield name, self.metadata() if name == "__metadata__" else self.entry(name, *self.fields(name))
            after = _NEXT.match(self.text, self.at)
            if after is None:
                raise self.fault("the header is not JSON: ',' or '}' was expected", name)
            self.at = after.end()
            has_more = after[1] == b","
        if self.text[self.at :].strip(b" \t\r\n"):
            raise self.fault("something follows the header's JSON")

    def string(self, raw: bytes) -> str:
        try:
            if b"\\" not in raw:
                return raw.decode("utf-8")
            text: str = json.loads(b'"' + raw + b'"')
            text.encode("utf-8")  # an escaped lone surrogate is not valid text
        except ValueError:
            raise self.fault("a header string is not UTF-8") from None
        return text

    def metadata(self) -> dict[str, str]:
        found: dict[str, str] = {}
        empty = _EMPTY.match(self.text, self.at)
        if empty:
            self.at = empty.end()
            return found
        while True:
            key = _KEY.match(self.text, self.at)
            value = key and not key[2] and _VALUE.match(self.text, key.end())
            if not key or not value:
                raise self.fault("__metadata__ does not map strings to strings")
            name = self.string(key[1])
            if name in found:
                raise self.fault(f"the key {name!r} appears twice in __metadata__")
            found[name] = self.string(value[1])
            if len(found) > MAX_METADATA:
                raise self.fault("__metadata__ has too many keys")
            self.at = value.end()
            if value[2] == b"}":
                return found

    def fields(self, name: str) -> tuple[bytes, Shape, int, int]:
        tag: bytes | None = None
        lists: dict[bytes, tuple[int, ...]] = {}
        while True:
            field = _FIELD.match(self.text, self.at)
            if field is None:
                raise self.fault("the header's entry has something else than dtype, shape and data_offsets", name)
            if field[1] in lists or (field[1] == b"dtype" and tag is not None):
                raise self.fault(f"{field[1].decode()} appears twice in the header's entry", name)
            if (field[2] is None) == (field[1] == b"dtype"):
                raise self.fault(f"{field[1].decode()} is of the wrong kind", name)
            if field[1] == b"dtype":
                tag = field[2]
            else:
                lists[field[1]] = self.numbers(field[3], field[1].decode(), name)
            self.at = field.end()
            if field[4] == b"}":
                break
        if tag is None or len(lists) != 2:
            raise self.fault("the header entry lacks one of dtype, shape, data_offsets", name)
        offsets = lists[b"data_offsets"]
        if len(offsets) != 2:
            raise self.fault("data_offsets are not two numbers", name)
        return tag, lists[b"shape"], *offsets

    def entry(self, name: str, tag: bytes, listed: Shape, start: int, stop: int) -> HeaderEntry:
        try:
            dtype, shape, nbytes = _torch_view(tag, listed)
        except CkptError as error:
            error.path, error.fqn = self.path, name
            raise
        if stop - start != nbytes:
            raise CorruptError(
                "the offsets do not fit the shape and dtype",
                path=self.path,
                fqn=name,
                expected=f"{pluralize(nbytes, 'byte')} for {dtype} {list(shape)}",
                found=f"{pluralize(stop - start, 'byte')}, offsets [{start}, {stop}]",
            )
        return HeaderEntry(name, dtype, shape, self.base + start, self.base + stop)

    def numbers(self, raw: bytes, field: str, name: str) -> tuple[int, ...]:
        if not raw.strip(b" \t\r\n"):
            return ()
        parts = raw.split(b",")
        if len(parts) > MAX_DIMS:
            raise self.fault(f"{field} has too many numbers", name)
        values = []
        for part in parts:
            number = _NUMBER.fullmatch(part)
            if number is None:
                kind = "is negative" if part.strip().startswith(b"-") else "is not a list of whole numbers"
                raise self.fault(f"{field} {kind}", name)
            values.append(int(number[1]))
        if max(values) >= 1 << 63:
            raise self.fault(f"{field} overflows", name)
        return tuple(values)


@lru_cache(4096)  # few tensors in a model have a unique shape
def _usual_shape(raw: bytes) -> Shape:
    return tuple(map(int, raw.split(b","))) if raw else ()


@lru_cache(4096)
def _torch_view(raw: bytes, shape: Shape) -> tuple[DType, Shape, int]:
    """Return dtype and shape in torch's count, and the number of bytes."""
    tag = raw.decode()
    if tag in _WITHOUT_TORCH:
        raise LossError(f"torch has no dtype for safetensors' {tag}")
    dtype = BY_TAG.get(tag)
    if dtype is None:
        raise CorruptError("the dtype is unknown", expected=" ".join(BY_TAG), found=tag)
    if tag == _PACKED:
        if not shape or shape[-1] % 2:
            raise CorruptError("two F4 elements share a byte, so the last dim must be even", found=list(shape))
        shape = (*shape[:-1], shape[-1] // 2)
    nbytes = prod(shape) * dtype.itemsize
    if nbytes >= 1 << 63:
        raise CorruptError("the shape overflows", found=list(shape))
    return dtype, shape, nbytes


def _check_offsets(entries: Iterable[HeaderEntry], base: int, size: int, path: str) -> None:
    reached = base
    for entry in sorted(entries, key=itemgetter(3, 4)):  # by start and stop
        if entry.start != reached:
            raise CorruptError(
                "the tensors leave a hole in the file" if entry.start > reached else "two tensors overlap in the file",
                path=path,
                fqn=entry.name,
                expected=f"a start at byte {reached}",
                found=f"byte {entry.start}",
            )
        reached = entry.stop
    if reached != size:
        raise CorruptError(
            "the file is shorter than its header requires"
            if reached > size
            else "the file is longer than its header requires",
            path=path,
            expected=f"{pluralize(reached, 'byte')}",
            found=f"{pluralize(size, 'byte')}",
            hint="the file is truncated or was not written to the end; fetch or save it again",
        )


class Planned(NamedTuple):
    """A tensor to write. Its shape is in torch's count."""

    name: str
    dtype: DType
    shape: Shape

    @property
    def nbytes(self) -> int:
        return prod(self.shape) * self.dtype.itemsize


def _is_text(name: str) -> bool:
    try:
        name.encode()
    except UnicodeEncodeError:
        return False
    return True


def build_header(tensors: Iterable[Planned], metadata: Mapping[str, str]) -> tuple[bytes, list[tuple[Planned, int]]]:
    """Return the header, and each tensor with its offset in the file.

    The bytes equal `safetensors.torch.save_file` (0.8.0) with one metadata key. That writer's order of several keys is
    random; here they are sorted.
    """
    ordered = sorted(tensors, key=lambda t: (_RANK[_tag(t)], t.name))
    members = [f'"__metadata__":{_to_json(dict(sorted(metadata.items())))}'] if metadata else []
    offsets, at = [], 0
    for name, dtype, shape in ordered:
        if name == "__metadata__" or not (name.isascii() or _is_text(name)):
            raise LossError("safetensors can't store a tensor with this name", fqn=name)
        described, nbytes = _dtype_and_shape(dtype, shape)
        stop = at + nbytes
        members.append(f'{encode_basestring(name)}:{{{described},"data_offsets":[{at},{stop}]}}')
        offsets.append(at)
        at = stop
    text = f"{{{','.join(members)}}}".encode()
    text += b" " * (-len(text) % 8)
    if len(text) > MAX_HEADER:
        raise LossError(
            "the tensors' names are too many for one safetensors file", hint=Message("give a smaller {max_shard_size}")
        )
    base = 8 + len(text)
    placed = [(tensor, base + offset) for tensor, offset in zip(ordered, offsets, strict=True)]
    return len(text).to_bytes(8, "little") + text, placed


_to_json = json.JSONEncoder(ensure_ascii=False, separators=(",", ":")).encode


@lru_cache(4096)
def _dtype_and_shape(dtype: DType, shape: Shape) -> tuple[str, int]:
    """Return dtype and shape as JSON members, and the number of bytes."""
    listed = (*shape[:-1], shape[-1] * 2) if dtype.tag == _PACKED else shape
    return f'"dtype":"{dtype.tag}","shape":{_to_json(listed)}', prod(shape) * dtype.itemsize


def _tag(tensor: Planned) -> str:
    tag = tensor.dtype.tag
    if tag is None:
        raise LossError(f"safetensors has no {tensor.dtype}", fqn=tensor.name)
    return tag
