"""`ckpt/containers/torchfile/read.py`: a flipped bit around storages is refused or moves no tensor."""

from __future__ import annotations

import os
import shutil
import struct
import zipfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from ckpt.containers.dcp.metadata import read_metadata
from ckpt.containers.torchfile import read as torchfile
from ckpt.errors import CkptError, CorruptError, UnsafeError
from tests.support.places import REPOSITORY

#: Number of storages to test in each file.
STORAGES = 3
HEADER = struct.Struct("<4s5HIIIHH")


def around(path: Path, first: int, last: int) -> Iterator[tuple[int, int]]:
    """Yield the byte ranges before and after storages in the zip archive at `first` in `path`."""
    data = path.read_bytes()[first:last]
    with zipfile.ZipFile(path) if (first, last) == (0, path.stat().st_size) else _embedded(data, path) as archive:
        records = sorted(archive.infolist(), key=lambda info: info.header_offset)
    ends = [info.header_offset for info in records[1:]] + [data.index(b"PK\1\2")]
    storages = [(info, end) for info, end in zip(records, ends, strict=True) if "/data/" in info.filename]
    for info, end in storages[:STORAGES]:
        *_, name, extra = HEADER.unpack_from(data, info.header_offset)
        begin = info.header_offset + HEADER.size + name + extra
        yield first + info.header_offset, first + begin
        yield first + begin + info.file_size, first + end


def _embedded(data: bytes, path: Path) -> zipfile.ZipFile:
    alone = path.with_suffix(".item")
    alone.write_bytes(data)
    return zipfile.ZipFile(alone)


def places(path: Path, offset: int, length: int) -> dict[str, tuple[int, int]]:
    return {name: (r.offset, r.size) for name, r in torchfile.read(path, offset, length).records.items()}


def flip_all(path: Path, offset: int = 0, length: int | None = None) -> Counter[str]:
    """Flip each bit around the storages of a torch file and read the file."""
    size = path.stat().st_size if length is None else length
    expected = places(path, offset, size)
    outcomes: Counter[str] = Counter()
    ranges = list(around(path, offset, offset + size))
    content = path.read_bytes()
    descriptor = os.open(path, os.O_RDWR)
    try:
        for begin, end in ranges:
            for at in range(begin, end):
                for bit in range(8):
                    os.pwrite(descriptor, bytes([content[at] ^ 1 << bit]), at)
                    try:
                        assert places(path, offset, size) == expected, (at - begin, bit)
                        outcomes["the same"] += 1
                    except CkptError as error:
                        assert isinstance(error, CorruptError | UnsafeError), (at - begin, bit, str(error))
                        outcomes["refused"] += 1
                os.pwrite(descriptor, content[at : at + 1], at)
    finally:
        os.close(descriptor)
    assert path.read_bytes() == content
    return outcomes


@pytest.mark.parametrize(
    "name",
    [
        "toy-zero3/global_step2/bf16_zero_pp_rank_1_mp_rank_00_optim_states.pt",
        "megatron-dist-flattened/iter_0000002/common.pt",
    ],
)
def test_engines_files(tmp_path: Path, name: str) -> None:
    path = Path(shutil.copy(REPOSITORY / "fixtures" / name, tmp_path))
    outcomes = flip_all(path)
    assert outcomes["refused"] > 100


def test_items_of_dcp(tmp_path: Path) -> None:
    shutil.copytree(REPOSITORY / "fixtures" / "dcp-fsdp2" / "step-2", tmp_path / "step")
    metadata = read_metadata(tmp_path / "step")
    place = metadata.places[next(row for entry in metadata.entries.values() for row in entry.chunks.values())]
    assert flip_all(Path(place.path), place.offset, place.length)["refused"] > 100


@pytest.mark.parametrize("force_zip64", [False, True])
def test_another_writers_archive(tmp_path: Path, force_zip64: bool) -> None:
    """Without descriptors, the headers contain the sizes. `force_zip64` selects 64-bit sizes."""
    torch.save({"w": torch.zeros(40), "v": torch.ones(3)}, tmp_path / "a.pt")
    with zipfile.ZipFile(tmp_path / "a.pt") as old, zipfile.ZipFile(tmp_path / "b.pt", "w") as new:
        for name in old.namelist():
            with new.open(zipfile.ZipInfo(name), "w", force_zip64=force_zip64) as record:
                record.write(old.read(name))
    assert flip_all(tmp_path / "b.pt")["refused"] > 100


def test_a_stream_with_wide_descriptors(tmp_path: Path) -> None:
    """Files from torch have 64-bit sizes after the data if a record or its offset is beyond 4 GiB."""
    torch.save({"w": torch.zeros(40), "v": torch.ones(3)}, tmp_path / "a.pt")
    with zipfile.ZipFile(tmp_path / "a.pt") as old, open(tmp_path / "b.pt", "wb") as file:

        class Pipe:
            """Stream without seeking."""

            write, flush = file.write, file.flush

        with zipfile.ZipFile(Pipe(), "w") as new:  # type: ignore[call-overload]
            for name in old.namelist():
                with new.open(zipfile.ZipInfo(name), "w", force_zip64=True) as record:
                    record.write(old.read(name))
    assert flip_all(tmp_path / "b.pt")["refused"] > 100
