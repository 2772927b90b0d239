"""Files for torch.load, laid out without tensor data: headers now, elements when the plan runs.

Known bytes become literals. Tensor elements become slots, filled by `ckpt.move.run`.

    torch_file("model.pt", {"model": {"w": NewTensor(FLOAT32, (2, 3), (FromSource(("w", "weight"), whole((2, 3))),))}})

The container equals torch 2.13's `torch.save` (`caffe2/serialize/inline_container.cc`, miniz) byte for byte, except for
checksums. Records in order: data.pkl, .format_version, .storage_alignment, byteorder, data/0 ..., version,
.data/serialization_id. Elements start at multiples of 64 bytes, padded by an extra field `FB`.

The directory is written before the elements are moved, so a storage filled from the source gets the CRC-32 0, like with
`torch.serialization.set_crc32_options(False)`. No torch version that reads this container by default compares
checksums: its build sets `MINIZ_DISABLE_ZIP_READER_CRC32_CHECKS` (cmake/Dependencies.cmake, since pytorch#28858 in
2019). `unzip -t` and Python's `zipfile` do compare, and complain.
"""

from __future__ import annotations

import os
import struct
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import prod
from typing import Any, NamedTuple

from ckpt.base.errors import CorruptError, LossError
from ckpt.base.text import pluralize, show_size
from ckpt.containers.torchfile.pickler import TensorRef, dumps
from ckpt.containers.torchfile.scalars import scalar_to_bytes
from ckpt.containers.torchfile.values import StoredTensor
from ckpt.move.source import opened, read_at
from ckpt.plan.checkpoint import Key, OneElement, Slot, TargetFile
from ckpt.plan.dtypes import FLOAT32, DType
from ckpt.plan.tensors import Extent, FlatRange, Region, Tensor, contiguous_strides, whole

#: Maximum tensor size inside training state.
MAX_CARRIED = 1 << 26


# --- content -------------------------------------------------------------------------------------------------


class FromSource(NamedTuple):
    """`region` of the source tensor `key` in row-major order, at element `start` in the storage."""

    key: Key
    region: Region
    start: int = 0

    @property
    def numel(self) -> int:
        return self.region.numel


@dataclass(frozen=True, slots=True)
class Bytes:
    """Known little-endian elements, at element `start` in the storage."""

    data: bytes
    start: int = 0


@dataclass(frozen=True, slots=True)
class Zeros:
    """Padding, at element `start` in the storage."""

    numel: int
    start: int = 0


Part = FromSource | Bytes | Zeros


@dataclass(frozen=True, slots=True, eq=False)
class NewStorage:
    """A shared storage, tiled by the parts in `fill`, or by those of `fill_of` a rank (`Pickled.of_rank`)."""

    dtype: DType
    numel: int
    fill: tuple[Part, ...]
    fill_of: Callable[[int], tuple[Part, ...]] | None = None


@dataclass(frozen=True, slots=True, eq=False)
class NewTensor:
    """A tensor to write.

    It has either its own storage, tiled by `fill` (or `fill_of`) in row-major order, or a view of `storage` with
    `offset` and `strides` (in elements; None: contiguous). One NewTensor at two places in the tree is one tensor after
    loading.
    """

    dtype: DType
    shape: tuple[int, ...]
    fill: tuple[Part, ...] = ()
    requires_grad: bool = False
    attributes: Mapping[str, Any] | None = None
    storage: NewStorage | None = None
    offset: int = 0
    strides: tuple[int, ...] | None = None
    parameter: bool = False
    fill_of: Callable[[int], tuple[Part, ...]] | None = None

    @property
    def numel(self) -> int:
        return prod(self.shape)


def copy_of(tensor: Tensor, dtype: DType | None = None, **options: Any) -> NewTensor:
    fill = (FromSource(tensor.key, whole(tensor.shape)),)
    return NewTensor(dtype or tensor.dtype, tensor.shape, fill, **options)


def number(value: float, dtype: DType = FLOAT32) -> NewTensor:
    """Return a tensor without dims, such as Adam's `step` (float32 in torch)."""
    plain = value if dtype.floating or dtype.name == "bool" else int(value)
    return NewTensor(dtype, (), (Bytes(scalar_to_bytes(plain, dtype)),))


def one_element(element: OneElement) -> NewTensor:
    return replace(number(element.value, element.dtype), shape=element.shape)


def state_number(name: str, value: Any) -> Any:
    """Return a one-number optimizer state: a tensor for Adam's step, unchanged for other optimizers."""
    if isinstance(value, OneElement):
        return one_element(value)
    return number(value) if name == "step" and isinstance(value, int | float) else value


def with_gaps(parts: Iterable[FromSource], numel: int) -> Iterator[Part]:
    reached = 0
    for part in sorted(parts, key=lambda part: part.start):
        if part.start > reached:
            yield Zeros(part.start - reached, reached)
        if part.numel:
            yield part
        reached = part.start + part.numel
    if reached < numel:
        yield Zeros(numel - reached, reached)


# --- the file ------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, eq=False)
class Pickled:
    """A tree shared by several files, and its storages by number."""

    data: bytes
    storages: Sequence[NewStorage]

    def of_rank(self, rank: int) -> Pickled:
        return Pickled(
            self.data, [replace(one, fill=one.fill_of(rank)) if one.fill_of else one for one in self.storages]
        )


def pickled(root: Any) -> Pickled:
    storages = _Storages()
    return Pickled(dumps(root, tensors=storages.reference), storages.found)


def torch_file(name: str, root: Any) -> TargetFile:
    """Return the file `name` (relative to the target folder) that `torch.load` reads as `root`, a tree or `Pickled`.

    Raise LossError for an object that cannot be written.
    """
    return _Layout(name, _archive_folder(name)).write(root)


def torch_item(root: Any) -> TargetFile:
    """Return a torch file for use inside another file. Its folder is `archive`, like in torch's streams."""
    return _Layout("", "archive").write(root)


def _archive_folder(name: str) -> str:
    """Return the file's stem. torch writes non-ASCII names through a stream."""
    stem = os.path.basename(name).rpartition(".")[0] or os.path.basename(name)
    return stem if stem.isascii() and name.isascii() else "archive"


_LOCAL = struct.Struct("<4sHHHHHIIIHH").pack
_ENTRY = struct.Struct("<4sHHHHHHIIIHHHHHII").pack
_END64 = struct.Struct("<4sQHHIIQQQQ").pack
_LOCATOR = struct.Struct("<4sIQI").pack
_END = struct.Struct("<4sHHHHIIH").pack

_FULL16, _FULL32 = 0xFFFF, 0xFFFFFFFF
_ALIGNMENT = 64
_HAS_DESCRIPTOR, _UTF8 = 1 << 3, 1 << 11


@dataclass(slots=True)
class _Layout:
    path: str
    folder: str
    at: int = 0
    count: int = 0
    header: int = 0
    directory: bytearray = field(default_factory=bytearray)
    literals: list[tuple[int, bytearray]] = field(default_factory=list)
    slots: list[Slot] = field(default_factory=list)
    zeros: list[tuple[int, int]] = field(default_factory=list)

    def write(self, root: Any) -> TargetFile:
        form = root if isinstance(root, Pickled) else pickled(root)
        self.record("data.pkl", form.data)
        self.record(".format_version", b"1")
        self.record(".storage_alignment", b"%d" % _ALIGNMENT)
        self.record("byteorder", b"little")
        for key, storage in enumerate(form.storages):
            self.storage(key, storage)
        self.record("version", b"3\n")
        # Any text unique to the file will do.
        identity = f"{self.count:020d}{zlib.crc32(self.directory):020d}"
        self.record(".data/serialization_id", identity.encode())
        self.end()
        literals = tuple((offset, bytes(data)) for offset, data in self.literals)
        return TargetFile(self.path, self.at, literals, tuple(self.slots), tuple(self.zeros))

    def storage(self, key: int, storage: NewStorage) -> None:
        itemsize = storage.dtype.itemsize
        crc32 = _known_crc32(storage)
        self.begin(f"data/{key}", storage.numel * itemsize, crc32)
        reached = 0
        for part in sorted(storage.fill, key=lambda part: part.start):
            numel = len(part.data) // itemsize if isinstance(part, Bytes) else part.numel
            if part.start != reached:
                break
            reached += numel
            if isinstance(part, FromSource):
                self.slot(part, storage.dtype)
            elif isinstance(part, Bytes):
                self.literal(part.data)
            elif numel:
                self.zeros.append((self.at, numel * itemsize))
                self.at += numel * itemsize
        if reached != storage.numel:  # the source lacks some pieces
            found = f"pieces for {reached} of {pluralize(storage.numel, 'element')} in order"
            raise CorruptError("part of a tensor is stored nowhere, or twice", path=self.path or None, found=found)
        self.finish(storage.numel * itemsize, crc32)

    def slot(self, part: FromSource, dtype: DType) -> None:
        shape = (part.region.numel,) if isinstance(part.region, FlatRange) else part.region.sizes
        extent = Extent.contiguous(self.path, self.at, dtype, shape)
        self.slots.append(Slot(part.key, part.region, extent))
        self.at += part.numel * dtype.itemsize

    def record(self, name: str, data: bytes) -> None:
        crc32 = zlib.crc32(data)
        self.begin(name, len(data), crc32)
        self.literal(data)
        self.finish(len(data), crc32)

    def begin(self, name: str, size: int, crc32: int) -> None:
        encoded = f"{self.folder}/{name}".encode()
        header = self.header = self.at
        flags = _UTF8 | (_HAS_DESCRIPTOR if size else 0)
        wide_size, wide_header = size >= _FULL32, header >= _FULL32
        place = struct.pack("<Q", header) if wide_header else b""
        extra = _wide((struct.pack("<QQ", size, 0) if wide_size else b"") + place)
        padding = -(header + 30 + len(encoded) + len(extra) + 4) % _ALIGNMENT
        extra += b"FB" + struct.pack("<H", padding) + b"Z" * padding
        self.literal(_LOCAL(b"PK\3\4", 0, flags, 0, 0, 0, 0, 0, 0, len(encoded), len(extra)) + encoded + extra)
        extra = _wide((struct.pack("<QQ", size, size) if wide_size else b"") + place)
        narrow, narrow_header = min(size, _FULL32), min(header, _FULL32)
        lengths = (len(encoded), len(extra))
        entry = _ENTRY(b"PK\1\2", 0, 0, flags, 0, 0, 0, crc32, narrow, narrow, *lengths, 0, 0, 0, 0, narrow_header)
        self.directory += entry + encoded + extra
        self.count += 1

    def finish(self, size: int, crc32: int) -> None:
        """Use 64 bits if needed."""
        if not size:
            return
        wide = size >= _FULL32 or self.header >= _FULL32
        self.literal(struct.pack("<4sIQQ" if wide else "<4sIII", b"PK\7\x08", crc32, size, size))

    def end(self) -> None:
        directory, size, count = self.at, len(self.directory), self.count
        self.literal(bytes(self.directory))
        end64 = self.at
        self.literal(_END64(b"PK\6\6", 44, 0x031E, 0x002D, 0, 0, count, count, size, directory))
        self.literal(_LOCATOR(b"PK\6\7", 0, end64, 1))
        few = min(count, _FULL16)
        self.literal(_END(b"PK\5\6", 0, 0, few, few, min(size, _FULL32), min(directory, _FULL32), 0))

    def literal(self, data: bytes) -> None:
        offset = self.at
        self.at += len(data)
        if self.literals and self.literals[-1][0] + len(self.literals[-1][1]) == offset:
            self.literals[-1][1].extend(data)
        elif data:
            self.literals.append((offset, bytearray(data)))


class _Storages:
    def __init__(self) -> None:
        self.found: list[NewStorage] = []
        self._known: dict[int, tuple[str, Any]] = {}  # so that their ids stay unique

    def reference(self, value: Any) -> TensorRef | None:
        if isinstance(value, StoredTensor):
            value = _carried(value)
        elif not isinstance(value, NewTensor):
            return None
        owner = value if value.storage is None else value.storage
        if id(owner) not in self._known:
            self._known[id(owner)] = str(len(self.found)), owner
            self.found.append(value.storage or NewStorage(value.dtype, value.numel, value.fill, value.fill_of))
        key = self._known[id(owner)][0]
        storage = self.found[int(key)]
        strides = contiguous_strides(value.shape) if value.strides is None else value.strides
        _check_view(value, storage, strides)
        return TensorRef(
            value.dtype,
            key,
            storage.numel,
            value.offset,
            value.shape,
            strides,
            value.requires_grad,
            value.attributes,
            value.parameter,
        )


def _wide(fields: bytes) -> bytes:
    return struct.pack("<HH", 1, len(fields)) + fields if fields else b""


def _known_crc32(storage: NewStorage) -> int:
    """Return 0 unless all bytes are known."""
    if not all(isinstance(part, Bytes) for part in storage.fill):
        return 0
    parts = sorted(storage.fill, key=lambda part: part.start)
    return zlib.crc32(b"".join(part.data for part in parts if isinstance(part, Bytes)))


def _check_view(tensor: NewTensor, storage: NewStorage, strides: tuple[int, ...]) -> None:
    """Assert that a view fits its storage."""
    reach = Extent("", tensor.offset * tensor.dtype.itemsize, tensor.dtype, tensor.shape, strides).end
    assert tensor.dtype == storage.dtype, f"a view of {tensor.dtype} in a storage of {storage.dtype}"
    assert 0 in tensor.shape or reach <= storage.numel * storage.dtype.itemsize, "a view ends outside its storage"


def _carried(stored: StoredTensor) -> NewTensor:
    extent = stored.extent
    length = max(0, extent.end - extent.offset)
    if length > MAX_CARRIED:
        raise LossError(
            "a training state tensor is too large to copy",
            path=extent.path,
            expected=f"at most {show_size(MAX_CARRIED)}",
            found=f"{extent.dtype} of shape {list(extent.shape)}",
        )
    with opened(extent.path) as descriptor:
        data = read_at(descriptor, extent.path, extent.offset, length)
    storage = NewStorage(extent.dtype, length // extent.dtype.itemsize, (Bytes(data),))
    return NewTensor(
        extent.dtype, extent.shape, (), stored.requires_grad, stored.attributes, storage, 0, extent.strides
    )
