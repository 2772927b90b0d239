"""Reader for `torch.save` files. It needs no torch and reads no tensor data.

Since torch 1.6, the container is an uncompressed zip archive. Its only folder has the file's name (or `archive`):

    data.pkl                the objects, with a persistent id for each storage
    byteorder               `little` or `big`; missing before torch 2.1, meaning little
    data/0, data/1, ...     the storages
    version, .format_version, .storage_alignment, .data/serialization_id

Older files, and `_use_new_zipfile_serialization=False`, hold a sequence of pickles: magic number, protocol version,
system info, the objects, the storages' keys. Then each storage follows: its number of elements (int64) and its bytes.

The zip reader is stricter than the zip format, so that all readers see the same content. It allows no compression,
encryption, comments, duplicates, overlaps or gaps. Facts from torch 2.13's `caffe2/serialize/inline_container` and
miniz:

* every record has bit 3 set (its sizes follow the data; the local header has zeros) and bit 11 (UTF-8 names);
* an empty record has neither bit 3 nor a descriptor;
* the 64-bit end record and its locator are always present;
* `torch.serialization.set_crc32_options(False)` writes 0 for every checksum, `skip_data` only for storages.
"""

from __future__ import annotations

import os
import struct
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NoReturn

from ckpt.base.errors import CorruptError, IncompleteError, NotFoundError, UnsafeError
from ckpt.base.text import pluralize, show_size
from ckpt.containers.torchfile.machine import Machine, Table
from ckpt.containers.torchfile.table import allowed
from ckpt.containers.torchfile.tree import Parsed, Pickles
from ckpt.containers.torchfile.unpickle import loads
from ckpt.containers.torchfile.values import MAX_PICKLE, CutShortError, Storage, StorageType, short
from ckpt.move.source import opened, read_at

#: About five million records.
MAX_DIRECTORY = 1 << 29
#: A legacy file's pickles are read in growing steps: their length is unknown.
MAX_LEGACY_PICKLE = 1 << 26
#: Ends the message for an archive that contradicts itself.
NOT_READ = "no data was read"


@dataclass(frozen=True, slots=True)
class StoredRecord:
    name: str
    offset: int
    size: int
    crc32: int | None


@dataclass(frozen=True, slots=True)
class TorchFile:
    """A file written by torch.save.

    `root` is the saved object (see `ckpt.containers.torchfile.values` for its types). `records` holds `data.pkl` and
    the records used by `root`. `container` is `zip` or `legacy`. `folder` is the file name at saving without suffix, or
    `archive` for a stream.
    """

    path: str
    offset: int
    size: int
    container: str
    root: Any
    records: Mapping[str, StoredRecord]
    folder: str | None = None


def read(
    path: str | os.PathLike[str],
    offset: int = 0,
    length: int | None = None,
    table: Table | None = None,
    alike: Pickles | None = None,
) -> TorchFile:
    """Read the torch file `path`, or one embedded at `offset` (an item in a `.distcp` file).

    `table` holds the allowed names (default: `allowed()`). `alike` caches pickles between calls. Raise

    * NotFoundError: no such file, or another kind of file (a plain pickle, a tar file, ...);
    * CorruptError: truncated, overwritten with zeros, or contradicting itself;
    * UnsafeError: a name outside the table, a deceptive container (compressed or duplicate records, headers that
      contradict the directory, overlaps), or a TorchScript program;
    * StorageError: the file cannot be read.
    """
    path = os.fspath(path)
    with opened(path) as fd:
        available = os.fstat(fd).st_size
        if length is None:
            length = available - offset
        if offset < 0 or length < 0 or offset + length > available:
            raise CorruptError(
                "the file ends before the object's offset",
                path=path,
                expected=f"{pluralize(offset + length, 'byte')} or more",
                found=f"{pluralize(available, 'byte')}",
            )
        return _read_region(_Region(fd, path, offset, length, allowed() if table is None else table), alike)


@dataclass(frozen=True, slots=True)
class _Region:
    """A range of an open file. Offsets count from `start`."""

    fd: int
    path: str
    start: int
    size: int
    table: Table

    def read(self, offset: int, length: int) -> bytes:
        if offset < 0 or length < 0 or offset + length > self.size:
            self.truncated(offset + length)
        return read_at(self.fd, self.path, self.start + offset, length)

    def truncated(self, expected: int) -> NoReturn:
        raise CorruptError(
            "the file is truncated",
            path=self.path,
            expected=f"{pluralize(self.start + expected, 'byte')} or more",
            found=f"{pluralize(self.start + self.size, 'byte')}",
        )

    def corrupt(self, what: str, expected: object = None, found: object = None) -> NoReturn:
        raise CorruptError(what, path=self.path, expected=expected, found=found)

    def unsafe(self, what: str, expected: object = None, found: object = None) -> NoReturn:
        raise UnsafeError(f"{what}; {NOT_READ}", path=self.path, expected=expected, found=found)


def _read_region(region: _Region, alike: Pickles | None) -> TorchFile:
    if region.size == 0:
        raise IncompleteError(
            "the file is empty", path=region.path, expected="a file written by torch.save", found="0 bytes"
        )
    head = region.read(0, min(region.size, 512))
    tail = region.read(max(0, region.size - 22), min(region.size, 22))
    if tail.startswith(_END) and len(tail) == 22:
        return _read_zip(region, tail, alike)
    if head.startswith(_LOCAL):
        _refuse_zip_without_end(region)
    if _LEGACY_MAGIC in head[:32]:
        return _read_legacy(region)
    return _refuse_other(region, head, tail)


def _refuse_other(region: _Region, head: bytes, tail: bytes) -> NoReturn:
    if not head.strip(b"\0"):
        region.corrupt(
            "the file begins with zeros: it was not written completely",
            expected="a file written by torch.save",
            found=f"{pluralize(len(head), 'byte')} of zeros at the start of {region.size}",
        )
    if head.startswith(b"version https://git-lfs"):
        raise CorruptError(
            "this is a Git LFS pointer, not the file itself",
            path=region.path,
            hint="run `git lfs pull` in its folder",
        )
    if head[257:262] == b"ustar":
        what = "a tar file, like torch wrote before 0.1.10"
    elif not tail.strip(b"\0"):
        _zeros_at_end(region, len(tail))
    elif head[:1] == b"\x80" and head[1:2] in (b"\1", b"\2", b"\3", b"\4", b"\5"):
        what = "a plain pickle, not a file written by torch.save"
    else:
        what = "not a file written by torch.save"
    raise NotFoundError(f"this is {what}", path=region.path, expected="a zip archive of torch.save")


# --- zip -----------------------------------------------------------------------------------------------------

_LOCAL = b"PK\x03\x04"
_ENTRY = b"PK\x01\x02"
_END = b"PK\x05\x06"
_END64 = b"PK\x06\x06"
_LOCATOR = b"PK\x06\x07"
_BEHIND = b"PK\x07\x08"

_end_pack = struct.Struct("<4sHHHHIIH").pack
_end_fields = struct.Struct("<4sHHHHIIH").unpack
_locator_fields = struct.Struct("<4sIQI").unpack
_end64_fields = struct.Struct("<4sQHHIIQQQQ").unpack
# Signature, flags, method, crc32, sizes, lengths[, disk, offset].
_entry_fields = struct.Struct("<4s4xHH4xIIIHHHH6xI").unpack_from
_local_fields = struct.Struct("<4s2xHH4xIIIHH").unpack_from
# Signature, crc32, sizes. The wide one has 64 bits.
_DESCRIPTOR, _DESCRIPTOR64 = struct.Struct("<4sIII"), struct.Struct("<4sIQQ")

#: Bytes in the three end records. torch always writes them.
_END_SIZE = 56 + 20 + 22
_ENTRY_SIZE = 46
_LOCAL_SIZE = 30
_FULL16, _FULL32 = 0xFFFF, 0xFFFFFFFF
_FULL = (_FULL16, _FULL16, _FULL32, _FULL32)
_HAS_DESCRIPTOR, _UTF8 = 1 << 3, 1 << 11


@dataclass(frozen=True, slots=True)
class _ZipEntry:
    """A central directory entry. `limit` is the start of the next record, or of the directory."""

    name: str
    flags: int
    crc32: int
    size: int
    header: int
    limit: int = 0


def _refuse_zip_without_end(region: _Region) -> NoReturn:
    tail_size = min(region.size, 22 + _FULL16)
    tail = region.read(region.size - tail_size, tail_size)
    zeros = len(tail) - len(tail.rstrip(b"\0"))
    if zeros >= 22:
        _zeros_at_end(region, zeros)
    at = tail.rfind(_END)
    if at >= 0 and len(tail) - at < 22:
        region.truncated(region.size + 22 - (len(tail) - at))
    if at >= 0 and _ends_here(region, tail[at : at + 22], region.size - tail_size + at):
        region.unsafe("the zip archive has a comment, or unexpected bytes after its end")
    # Another end record: only the last record is damaged.
    is_cut_off = not any(signature in tail[-_END_SIZE:] for signature in (_END64, _LOCATOR, _END))
    raise (IncompleteError if is_cut_off else CorruptError)(
        "the file is truncated" if is_cut_off else "the end of the zip archive is damaged",
        path=region.path,
        expected="the end record of a zip archive in its last 22 bytes",
        found=f"{pluralize(region.size, 'byte')} that end without one",
    )


def _zeros_at_end(region: _Region, zeros: int) -> NoReturn:
    region.corrupt(
        "the file ends in zeros: it was not written completely",
        expected=f"the end record of a zip archive in the last 22 of {pluralize(region.size, 'byte')}",
        found=f"{pluralize(zeros, 'byte')} of zeros at the end",
    )


def _ends_here(region: _Region, end: bytes, at: int) -> bool:
    _, _, _, _, _, size, offset, _ = _end_fields(end)
    return offset + size == at or (at >= 20 and region.read(at - 20, 4) == _LOCATOR)


def _find_directory(region: _Region, tail: bytes) -> tuple[int, int, int]:
    _, disk, first_disk, here, count, size, offset, comment = _end_fields(tail)
    if comment:
        region.corrupt(
            "the file is truncated",
            expected=f"{pluralize(region.size + comment, 'byte')}",
            found=f"{pluralize(region.size, 'byte')}",
        )
    end = region.size - 22
    disks = [disk, first_disk]
    if region.size >= 42 and (locator := region.read(region.size - 42, 20)).startswith(_LOCATOR):
        _, disk64, end64, total_disks = _locator_fields(locator)
        if disk64 != 0 or total_disks != 1:
            region.unsafe("the zip archive is split over several files")
        if end64 + 56 != region.size - 42:
            region.corrupt(
                "the file size contradicts the zip end record: bytes are missing or were added",
                expected=f"{pluralize(end64 + 56 + 42, 'byte')}",
                found=f"{pluralize(region.size, 'byte')}",
            )
        end = end64
        fields = _end64_fields(region.read(end64, 56))
        signature, record_size, _, _, disk64, first64, here64, count64, size64, offset64 = fields
        if signature != _END64 or record_size != 44:
            region.corrupt("the 64-bit zip end record is damaged")
        disks += [disk64, first64]
        narrow = (min(here64, _FULL16), min(count64, _FULL16), min(size64, _FULL32), min(offset64, _FULL32))
        plausible = ((a, b, full) for a, b, full in zip((here, count, size, offset), narrow, _FULL, strict=True))
        if any(a not in (b, full) for a, b, full in plausible):
            if _end_pack(_END, disk, first_disk, *narrow, 0).startswith(tail.rstrip(b"\0")):
                _zeros_at_end(region, 22 - len(tail.rstrip(b"\0")))
            region.unsafe("the two zip end records contradict each other")
        here, count, size, offset = here64, count64, size64, offset64
    if any(n not in (0, _FULL16) for n in disks) or here != count:
        region.unsafe("the zip archive is split over several files")
    if offset + size != end:
        region.corrupt(
            "the file size contradicts the zip directory: bytes are missing or were added",
            expected=f"{pluralize(region.size - end + offset + size, 'byte')}",
            found=f"{pluralize(region.size, 'byte')}",
        )
    if size > MAX_DIRECTORY or count * _ENTRY_SIZE > size:
        region.unsafe(
            "the zip directory is invalid",
            found=f"{pluralize(count, 'record')} in {pluralize(size, 'byte')}",
        )
    return offset, size, count


def _read_directory(region: _Region, offset: int, length: int, count: int) -> dict[str, _ZipEntry]:
    """Refuse compressed, encrypted, duplicate or overlapping records."""
    data = region.read(offset, length)
    entries: dict[str, _ZipEntry] = {}
    at = 0
    for _ in range(count):
        if at + _ENTRY_SIZE > len(data):
            region.corrupt("the zip directory ends too early")
        fields = _entry_fields(data, at)
        signature, flags, method, crc32, packed, size, name_size, extra_size, comment_size, disk, header = fields
        if signature != _ENTRY:
            region.corrupt("the zip directory is damaged", found=f"at byte {offset + at}")
        at += _ENTRY_SIZE
        after = at + name_size + extra_size + comment_size
        if after > len(data):
            region.corrupt("the zip directory ends too early")
        raw = data[at : at + name_size]
        if packed == _FULL32 or size == _FULL32 or header == _FULL32:
            extra = data[at + name_size : at + name_size + extra_size]
            size, packed, header = _wide(region, extra, size, packed, header)
        at = after
        try:
            name = raw.decode("utf-8")
        except UnicodeDecodeError:
            region.corrupt("a record's name is not UTF-8", found=repr(raw[:80]))
        if name in entries:
            region.unsafe("two zip records have the same name", found=name)
        if flags & 1:
            region.unsafe("a zip record is encrypted", found=name)
        if method != 0 or packed != size:
            if _is_program(name):
                _refuse_program(region)
            region.unsafe("a zip record is compressed, but torch.save never compresses", found=name)
        if flags & ~(_HAS_DESCRIPTOR | _UTF8):
            region.unsafe("a zip record has unknown flags", found=f"{name}: {flags:#x}")
        if disk:
            region.unsafe("the zip archive is split over several files")
        entries[name] = _ZipEntry(name, flags, crc32, size, header)
    if at != len(data):
        region.unsafe("unexpected bytes after the zip directory")
    return _with_limits(region, entries, offset)


def _wide(region: _Region, extra: bytes, *narrow: int) -> list[int]:
    """Take 64-bit values from the extra field with id 1."""
    at = 0
    while at + 4 <= len(extra):
        kind, size = struct.unpack_from("<HH", extra, at)
        if kind == 1:
            wide = [value for value in narrow if value == _FULL32]
            if size < 8 * len(wide) or at + 4 + size > len(extra):
                break
            found = iter(struct.unpack_from(f"<{len(wide)}Q", extra, at + 4))
            return [next(found) if value == _FULL32 else value for value in narrow]
        at += 4 + size
    return region.corrupt("a zip record lacks its 64-bit size")


def _with_limits(region: _Region, entries: dict[str, _ZipEntry], end: int) -> dict[str, _ZipEntry]:
    """Refuse records that overlap by the directory's numbers."""
    limit = end
    limited: dict[str, _ZipEntry] = {}
    for entry in sorted(entries.values(), key=lambda e: e.header, reverse=True):
        if entry.header + _LOCAL_SIZE + len(entry.name) + entry.size > limit:
            region.unsafe("zip records overlap each other or the directory", found=entry.name)
        limited[entry.name] = _ZipEntry(entry.name, entry.flags, entry.crc32, entry.size, entry.header, limit)
        limit = entry.header
    if limit != 0 and entries:
        region.unsafe("unexpected bytes before the first zip record", found=f"{pluralize(limit, 'byte')}")
    return limited


def _is_program(name: str) -> bool:
    inner = name.partition("/")[2]
    return inner == "constants.pkl" or inner.startswith("code/")


def _refuse_program(region: _Region) -> NoReturn:
    raise UnsafeError(
        "this is a TorchScript archive: a program with its weights, not a checkpoint",
        path=region.path,
        hint="save the module's state_dict() with torch.save",
    )


def _locate(region: _Region, entry: _ZipEntry) -> StoredRecord:
    """Check the local header against the directory."""
    raw_name = entry.name.encode()
    header = region.read(entry.header, _LOCAL_SIZE + len(raw_name))
    signature, flags, method, crc32, packed, size, name_size, extra_size = _local_fields(header)
    if signature != _LOCAL:
        region.corrupt(
            "a zip record is missing at its recorded offset",
            expected=f"{entry.name} at byte {region.start + entry.header}",
            found=repr(signature),
        )
    sizes_follow = flags & _HAS_DESCRIPTOR
    plausible = (0, entry.size, _FULL32) if sizes_follow else (entry.size, _FULL32)
    if (
        method != 0
        or flags != entry.flags
        or header[_LOCAL_SIZE:] != raw_name
        or name_size != len(raw_name)
        or size not in plausible
        or packed not in plausible
        or crc32 not in ((0, entry.crc32) if sizes_follow else (entry.crc32,))
    ):
        region.unsafe("a record's header contradicts the zip directory", found=entry.name)
    offset = entry.header + _LOCAL_SIZE + name_size + extra_size
    if offset + entry.size > entry.limit:
        region.unsafe("zip records overlap each other or the directory", found=entry.name)
    _check_end(region, entry, offset + entry.size)
    return StoredRecord(entry.name.partition("/")[2], region.start + offset, entry.size, entry.crc32 or None)


def _check_end(region: _Region, entry: _ZipEntry, end: int) -> None:
    """Raise CorruptError unless only a descriptor lies between a record and its limit.

    Only the local header holds its extra field's length, and one wrong bit there moves every element.
    """
    length = entry.limit - end
    if not entry.flags & _HAS_DESCRIPTOR:
        as_it_is = length == 0
    elif as_it_is := length in (_DESCRIPTOR.size, _DESCRIPTOR64.size):
        fields = _DESCRIPTOR if length == _DESCRIPTOR.size else _DESCRIPTOR64
        expected = (_BEHIND, entry.crc32, entry.size, entry.size)
        as_it_is = fields.unpack(region.read(end, length)) == expected
    if not as_it_is:
        region.corrupt(
            f"the record {entry.name} does not end at the next record: its header or its end is damaged",
            expected=f"its sizes at byte {region.start + end}, followed by the next record",
            found=f"{pluralize(length, 'byte')} up to byte {region.start + entry.limit}",
        )


class _Archive:
    """A zip archive's records, located on demand."""

    def __init__(self, region: _Region, entries: dict[str, _ZipEntry]) -> None:
        self.region = region
        self.entries = entries
        self.folder = _archive_folder(region, entries)
        self.located: dict[str, StoredRecord] = {}

    def locate(self, name: str) -> StoredRecord:
        found = self.located.get(name)
        if found is None:
            entry = self.entries.get(self.folder + name)
            if entry is None:
                self.region.corrupt("a record is missing from the archive", expected=name, found="no such record")
            found = self.located[name] = _locate(self.region, entry)
        return found

    def content(self, name: str, limit: int) -> bytes:
        """Check the CRC-32."""
        record = self.locate(name)
        if record.size > limit:
            most, found = f"at most {show_size(limit)}", show_size(record.size)
            self.region.unsafe(f"the record {name} is absurdly large", most, found)
        data = self.region.read(record.offset - self.region.start, record.size)
        if record.crc32 is not None and zlib.crc32(data) != record.crc32:
            self.region.corrupt(
                f"the record {name} is damaged: its checksum does not match",
                expected=f"CRC-32 {record.crc32:#010x}",
                found=f"{zlib.crc32(data):#010x}",
            )
        return data


def _archive_folder(region: _Region, entries: dict[str, _ZipEntry]) -> str:
    folders = {name.partition("/")[0] for name in entries}
    if any(_is_program(name) for name in entries):
        _refuse_program(region)
    if len(folders) == 1 and f"{(folder := next(iter(folders)))}/data.pkl" in entries:
        return folder + "/"
    if any(name.endswith("/data.pkl") for name in entries):
        region.unsafe("the zip records are in several folders", found=", ".join(sorted(folders)[:5]))
    raise NotFoundError(
        "this zip archive was not written by torch.save",
        path=region.path,
        expected="a record data.pkl in a folder",
    )


def _read_zip(region: _Region, tail: bytes, alike: Pickles | None) -> TorchFile:
    archive = _Archive(region, _read_directory(region, *_find_directory(region, tail)))
    if f"{archive.folder}byteorder" in archive.entries:
        _check_byteorder(region, archive.content("byteorder", 16).decode("latin-1"))
    name = f"{archive.folder}data.pkl"
    data = archive.content("data.pkl", MAX_PICKLE)
    storages: dict[str, Storage] = {}

    def persistent(pid: Any) -> Storage:
        dtype, key, numel = _storage_id(region, pid, 5)
        known = storages.get(key)
        if known is not None:
            if known.dtype is dtype and known.numel == numel:
                return known
            # torch refuses to save this.
            region.corrupt(f"the pickle describes the storage data/{key} in two ways")
        nbytes = numel * dtype.itemsize
        if numel:
            record = archive.locate(f"data/{key}")
            # It may end with a fraction of an element.
            if not 0 <= record.size - nbytes < dtype.itemsize:
                region.corrupt(
                    f"the record data/{key} has another length than the storage",
                    expected=f"{short(numel)} elements of {dtype}, {short(nbytes)} bytes",
                    found=f"{pluralize(record.size, 'byte')}",
                )
            storages[key] = Storage(region.path, record.offset, dtype, numel, record.size, key)
            return storages[key]
        # An empty storage has no address, so torch cannot share it.
        return Storage(region.path, region.start, dtype, 0, 0, key)

    root = _known_root(region, archive, alike.get(data)) if alike is not None else None
    if root is None:
        root = loads(data, path=region.path, name=name, persistent=persistent, table=region.table)
        if alike is not None and alike.keep(data, parsed := Parsed(root, storages, region.table, region.start)):
            root = parsed.in_file(region.path) or root
    return TorchFile(region.path, region.start, region.size, "zip", root, archive.located, archive.folder[:-1])


def _known_root(region: _Region, archive: _Archive, parsed: Parsed | None) -> Any:
    """Return an equal pickle's root if all storages have the same places."""
    if parsed is None or parsed.table is not region.table or parsed.start != region.start:
        return None
    for key, storage in parsed.storages.items():
        record = archive.locate(f"data/{key}")
        if (record.offset, record.size) != (storage.offset, storage.nbytes):
            return None
    return parsed.in_file(region.path)


def _check_byteorder(region: _Region, order: str) -> None:
    if order == "big":
        raise UnsafeError(
            "big-endian files are not supported",
            path=region.path,
            hint="load and save it again with torch on a little-endian machine",
        )
    if order != "little":
        region.corrupt("the byte order is unknown", expected="little", found=order)


def _storage_id(region: _Region, pid: Any, length: int) -> tuple[Any, str, int]:
    """Return dtype, key and number of elements from `("storage", type, key, location, numel[, view])`."""
    if type(pid) is tuple and pid and pid[0] == "module":
        raise UnsafeError(
            "the pickle holds the class of a module, not just its weights; nothing was run", path=region.path
        )
    if type(pid) is not tuple or len(pid) != length or pid[0] != "storage":
        region.corrupt("a persistent id in the pickle is not a storage id")
    _, kind, key, location, numel = pid[:5]
    if type(kind) is not StorageType or type(key) is not str or type(numel) is not int or numel < 0:
        region.corrupt("a persistent id in the pickle is damaged")
    if location == "meta":
        raise UnsafeError("tensors on the meta device are not supported", path=region.path)
    return kind.dtype, key, numel


# --- before the zip format -----------------------------------------------------------------------------------

_LEGACY_VERSION = 1001
#: 0x1950a86a20f9469cfc6c, pickled with LONG1.
_LEGACY_MAGIC = b"\x8a\x0al\xfc\x9cF\xf9 j\xa8P\x19"


@dataclass(slots=True)
class _LegacyStorages:
    """Storages in a legacy pickle. The first run collects their dtypes, the second knows their places."""

    region: _Region
    dtypes: dict[str, Any]
    places: dict[str, StoredRecord] | None = None

    def __call__(self, pid: Any) -> Storage:
        dtype, key, numel = _storage_id(self.region, pid, 6)
        if self.dtypes.setdefault(key, dtype) is not dtype and numel:
            self.region.corrupt(f"the pickle describes the storage {key} in two ways")
        nbytes = numel * dtype.itemsize
        if self.places is None:
            storage = Storage(self.region.path, 0, dtype, numel, nbytes, key)
        else:
            place = self.places.get(key)
            if place is None:
                self.region.corrupt("a storage is missing from the file", expected=f"storage {key}")
            if not 0 <= place.size - nbytes < dtype.itemsize:
                self.region.corrupt(
                    f"storage {key} does not have the pickle's length",
                    expected=f"{short(numel)} elements of {dtype}",
                    found=f"{pluralize(place.size, 'byte')}",
                )
            storage = Storage(self.region.path, place.offset, dtype, numel, place.size, key)
        return storage if pid[5] is None else self._view(storage, pid[5])

    def _view(self, storage: Storage, view: Any) -> Storage:
        """Return the view `(key, offset, numel)`, a part of the storage (torch before 0.4)."""
        if type(view) is not tuple or len(view) != 3 or any(type(n) is not int or n < 0 for n in view[1:]):
            self.region.corrupt("a storage's view in the pickle is damaged")
        _, first, numel = view
        if first + numel > storage.numel:
            self.region.corrupt("a storage's view exceeds the storage")
        size = storage.dtype.itemsize
        return Storage(storage.path, storage.offset + first * size, storage.dtype, numel, numel * size, storage.key)


def _read_legacy(region: _Region) -> TorchFile:
    storages = _LegacyStorages(region, {})
    length = 1 << 20
    while True:
        data = region.read(0, min(length, region.size))
        try:
            _, keys, end = _legacy_pickles(region, data, storages)
            break
        except CutShortError:
            if length >= region.size:
                region.corrupt(
                    "the file is truncated",
                    expected="more bytes: a pickle is cut off",
                    found=f"{pluralize(region.size, 'byte')}",
                )
            if length >= MAX_LEGACY_PICKLE:
                region.corrupt(
                    "the pickle is too large", expected=f"at most {show_size(MAX_LEGACY_PICKLE)}", found="more"
                )
            length *= 4
            storages = _LegacyStorages(region, {})
    storages.places = _legacy_places(region, keys, storages.dtypes, end)
    root, _, _ = _legacy_pickles(region, data, storages)
    return TorchFile(region.path, region.start, region.size, "legacy", root, storages.places)


def _legacy_pickles(region: _Region, data: bytes, storages: _LegacyStorages) -> tuple[Any, Any, int]:
    def run(start: int, name: str, persistent: _LegacyStorages | None = None) -> tuple[Any, int]:
        return Machine(data, region.table, path=region.path, name=name, persistent=persistent).run(start)

    _, at = run(0, "the magic number")
    version, at = run(at, "the protocol version")
    if version != _LEGACY_VERSION:
        region.corrupt("unknown format version", expected=_LEGACY_VERSION, found=repr(version)[:40])
    info, at = run(at, "the system info")
    if type(info) is not dict or info.get("little_endian") is not True:
        _check_byteorder(region, "big" if type(info) is dict and info.get("little_endian") is False else "?")
    root, at = run(at, "the objects", storages)
    keys, at = run(at, "the keys of the storages")
    if type(keys) is not list or any(type(key) is not str for key in keys):
        region.corrupt("the storage list is damaged")
    return root, keys, at


def _legacy_places(region: _Region, keys: list[str], dtypes: dict[str, Any], at: int) -> dict[str, StoredRecord]:
    places: dict[str, StoredRecord] = {}
    for key in keys:
        if key in places or key not in dtypes:
            region.corrupt("the storage list does not match the objects", found=key)
        (numel,) = struct.unpack("<q", region.read(at, 8))
        size = numel * dtypes[key].itemsize
        if numel < 0:
            region.corrupt("a storage has a negative length", found=str(numel))
        if at + 8 + size > region.size:
            region.truncated(at + 8 + size)
        places[key] = StoredRecord(key, region.start + at + 8, size, None)
        at += 8 + size
    if at != region.size:
        region.corrupt(
            "unexpected bytes after the last storage",
            expected=f"{pluralize(at, 'byte')}",
            found=f"{pluralize(region.size, 'byte')}",
        )
    return places
