"""Digest over a sample of a checkpoint's bytes, to check that several processes opened the same contents.

It covers the sizes and both ends of all files, and some bytes of some tensors. A change of a few bytes in the middle of
a file without checksums goes unnoticed.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path

from xxhash import xxh3_128

from ckpt.base.errors import shown
from ckpt.move.files import OpenFiles
from ckpt.move.reading import read_exactly
from ckpt.move.source import is_standin
from ckpt.move.threads import in_threads
from ckpt.plan.checkpoint import Checkpoint, SourceFile

_END = 16 << 10  # bytes
_TENSORS, _BYTES = 64, 4 << 10  # tensors, and bytes per tensor


def sample_digest(checkpoint: Checkpoint) -> str:
    """Raise CorruptError if a file ends early, NotFoundError if one is missing, or StorageError."""
    found: list[tuple[str, int, str]] = []

    def look(files: Iterator[SourceFile]) -> None:
        with OpenFiles() as opened:
            found.extend((Path(file.path).name, file.size, _sample_digest(file, opened)) for file in files)

    in_threads(look, checkpoint.files)
    with OpenFiles() as opened:
        tensors = [_read_ranges(opened, [part]) for part in _tensor_ranges(checkpoint)]
    return xxh3_128(shown(repr((sorted(found), tensors))).encode("utf-8", "surrogatepass")).hexdigest()


def _sample_digest(file: SourceFile, opened: OpenFiles) -> str:
    if is_standin(file.path):
        return str(file.mtime_ns)  # the object's version
    ends = {(0, min(file.size, _END)), (max(0, file.size - _END), min(file.size, _END))}
    return _read_ranges(opened, ((file.path, *end) for end in sorted(ends)))


def _tensor_ranges(checkpoint: Checkpoint) -> Iterator[tuple[str, int, int]]:
    """Yield the first bytes of some tensors, spread evenly over roles and names."""
    keys = sorted(checkpoint.tensors, key=lambda key: (key[1], key[0]))
    for key in keys[:: max(1, -(-len(keys) // _TENSORS))]:
        extent = next((part.extent for part in checkpoint.tensors[key].fragments() if part.extent.numel), None)
        if extent is not None and extent.path not in checkpoint.computed and not is_standin(extent.path):
            yield extent.path, extent.offset, min(extent.end - extent.offset, _BYTES)


def _read_ranges(opened: OpenFiles, ranges: Iterable[tuple[str, int, int]]) -> str:
    hasher = xxh3_128()
    for path, offset, size in ranges:
        buffer = bytearray(size)
        read_exactly(opened, path, offset, memoryview(buffer))
        hasher.update(buffer)
    return hasher.hexdigest()
