"""`ckpt/containers/dcp/runs.py`, `metadata.py`: batched reading matches the step-by-step machine."""

from __future__ import annotations

import pickle
import random
from dataclasses import replace
from io import BytesIO
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.checkpoint import metadata as dcp
from torch.distributed.checkpoint.filesystem import _StorageInfo

from ckpt.containers.dcp import metadata
from ckpt.containers.dcp.metadata import Metadata, _Numbers, read_metadata
from ckpt.containers.dcp.runs import IrregularError, Runs
from ckpt.errors import CkptError
from tests.support.places import REPOSITORY

FIXTURES = sorted(path.parent for path in REPOSITORY.glob("fixtures/*dcp*/**/.metadata"))
FIXTURES += [REPOSITORY / "fixtures" / "megatron-fsdp" / "iter_0000002"]


class Pickler(pickle._Pickler):  # type: ignore[name-defined]  # Python's own, in Python
    """Pickler that writes like Python's C code, but in smaller batches.

    The first item of a kind then shares its run with few others.
    """

    _BATCHSIZE = 4


def pickled(value: Any) -> bytes:
    stream = BytesIO()
    Pickler(stream, protocol=4).dump(value)
    return stream.getvalue()


def by_machine(folder: Path) -> Metadata:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Runs, "load", irregular)
        return read_metadata(folder)


def irregular(*_: Any) -> Any:
    raise IrregularError


def by_runs(folder: Path) -> tuple[Metadata, Runs] | None:
    """Return metadata read in batches only, or None if the machine is needed."""
    made: list[Runs] = []

    class Kept(Runs):
        def __init__(self) -> None:
            super().__init__()
            made.append(self)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(metadata, "Runs", Kept)
        patch.setattr(metadata, "load_pickle", irregular)
        try:
            return read_metadata(folder), made[0]
        except IrregularError:
            return None


def assert_alike(found: Metadata, expected: Metadata) -> None:
    """Check that both hold the same items, in any order."""
    assert (found.path, found.is_nested, found.keys) == (expected.path, expected.is_nested, expected.keys)
    assert list(found.paths()) == list(expected.paths())
    assert sorted(map(found.places.__getitem__, range(len(found.places.paths)))) == sorted(
        map(expected.places.__getitem__, range(len(expected.places.paths)))
    )
    assert list(found.entries) == list(expected.entries)
    for number, entry in expected.entries.items():
        one = found.entries[number]
        assert (one.key, one.dtype, one.shape) == (entry.key, entry.dtype, entry.shape)
        assert list(found.chunks(number).items()) == list(expected.chunks(number).items())
        assert one.replicas == entry.replicas == []
    places = [[None if row < 0 else one.places[row] for row in one.rows] for one in (found, expected)]
    assert places[0] == places[1]


@pytest.mark.parametrize("folder", FIXTURES, ids=lambda folder: str(folder.relative_to(REPOSITORY / "fixtures")))
def test_what_torch_wrote(folder: Path, tmp_path: Path) -> None:
    saved = pickle.loads((folder / ".metadata").read_bytes())
    (tmp_path / ".metadata").write_bytes(pickled(saved))
    found = by_runs(tmp_path)
    assert found is not None
    assert_alike(found[0], by_machine(tmp_path))
    assert len(found[1].fqns) > len(saved.storage_data) // 2


NAMES = st.text("ab.é", min_size=0, max_size=3)
STEPS = st.lists(NAMES | st.integers(0, 300), min_size=1, max_size=8)


@st.composite
def saved(draw: st.DrawFn) -> dcp.Metadata:
    """Return metadata for values and for tensors in a few chunks. Names are either separate or shared strings."""
    described, places, paths, numbers = {}, {}, {}, count()
    files = [f"__{rank}_0.distcp" for rank in range(3)]
    is_shared = draw(st.booleans())
    for steps in draw(st.lists(STEPS, min_size=1, max_size=24, unique_by=lambda steps: ".".join(map(str, steps)))):
        key = ".".join(map(str, steps))
        paths[key] = tuple(steps)

        def put(length: int, key: str = key, **where: Any) -> None:
            name = key if is_shared else "".join([*key])
            file = files[next(numbers) % 3]
            offset = draw(st.sampled_from([0, 7, 300, 70_000, 1 << 31, 1 << 40]))
            places[dcp.MetadataIndex(name, **where)] = _StorageInfo(
                file if is_shared else file[:4] + file[4:], offset, length
            )

        shape = draw(st.sampled_from([None, (), (4,), (4, 3), (300, 1, 2, 2)]))
        if shape is None:
            described[key] = dcp.BytesStorageMetadata()
            put(draw(st.integers(0, 1 << 17)))
            continue
        half = (shape[0] // 2, *shape[1:]) if shape else ()
        offsets = [(0,) * len(shape), (half[0], *(0 for _ in half[1:]))] if shape else [()]
        chunks = [dcp.ChunkStorageMetadata(torch.Size(one), torch.Size(half)) for one in offsets]
        properties = dcp.TensorProperties(dtype=draw(st.sampled_from([torch.float32, torch.int8])))
        described[key] = dcp.TensorStorageMetadata(properties, torch.Size(shape), chunks)
        for number, one in enumerate(chunks):
            put(5000, offset=one.offsets if is_shared else torch.Size([*one.offsets]), index=number)
    order = draw(st.permutations(list(paths)))
    return dcp.Metadata(described, {key: paths[key] for key in order} if draw(st.booleans()) else None, places)


@settings(max_examples=60, deadline=None)
@given(saved=saved())
def test_whatever_is_saved(saved: dcp.Metadata, tmp_path_factory: pytest.TempPathFactory) -> None:
    folder = tmp_path_factory.mktemp("saved")
    (folder / ".metadata").write_bytes(pickled(saved))
    expected = by_machine(folder)
    assert_alike(read_metadata(folder), expected)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(metadata, "_MANY", 1)  # forces the lookup in arrays
        assert_alike(read_metadata(folder), expected)


@pytest.mark.parametrize("is_alike", [False, True])
def test_numbers_of_keys(monkeypatch: pytest.MonkeyPatch, is_alike: bool) -> None:
    """Lookups in arrays match a dict, even for missing keys and equal hashes."""
    monkeypatch.setattr(metadata, "_MANY", 1)
    if is_alike:
        monkeypatch.setattr(metadata, "_hashes", lambda texts: np.zeros(len(texts), np.int64))
    keys = [f"layers.{n * 7919 % 1000}.weight" for n in range(1000)]
    asked = [*keys[::-3], "", "layers.1000.weight", "layers.3", *keys[:5]]
    assert _Numbers(keys).of(asked) == [keys.index(one) if one in keys else -1 for one in asked]
    with pytest.raises(IrregularError):
        _Numbers([*keys, keys[7]])


def test_a_text_of_more_bytes_than_it_says(tmp_path: Path) -> None:
    """The two characters take three bytes but the header says two, so the byte after them is no valid opcode."""
    keys = [f"layers.{n}.a" for n in range(12)] + ["abc", "xyz"]
    places = {dcp.MetadataIndex(key): _StorageInfo("__0_0.distcp", 10 * n, 10) for n, key in enumerate(keys)}
    data = pickled(dcp.Metadata({key: dcp.BytesStorageMetadata() for key in keys}, None, places))
    assert b"\x8c\x03abc\x94" in data
    (tmp_path / ".metadata").write_bytes(data)
    assert by_runs(tmp_path) is not None
    (tmp_path / ".metadata").write_bytes(data.replace(b"\x8c\x03abc\x94", b"\x8c\x02\xc3\xa9a\x94"))
    with pytest.raises(CkptError):
        read_metadata(tmp_path)


def test_a_damaged_file(tmp_path: Path) -> None:
    """The machine and the batches refuse the same files and read the same values."""
    saved = pickle.loads((FIXTURES[-1] / ".metadata").read_bytes())
    keys = list(saved.state_dict_metadata)[:24]
    few = replace(
        saved,
        state_dict_metadata={key: saved.state_dict_metadata[key] for key in keys},
        planner_data={key: saved.planner_data[key] for key in keys},
        storage_data={index: info for index, info in saved.storage_data.items() if index.fqn in keys},
    )
    data, rng, num_read = pickled(few), random.Random(0), 0
    for _ in range(1000):
        damaged = bytearray(data)
        for _ in range(rng.choice((1, 1, 2))):
            at = rng.randrange(11, len(data))
            damaged[at] = rng.choice((rng.randrange(256), damaged[at] ^ 1 << rng.randrange(8), *b"\x94hjKub"))
        (tmp_path / ".metadata").write_bytes(damaged)
        try:
            expected = by_machine(tmp_path)
        except CkptError:
            expected = None
        try:
            found = by_runs(tmp_path)
        except CkptError:
            found = None
        if found is not None:
            num_read += 1
            assert expected is not None, "the machine refuses it"
            assert_alike(found[0], expected)
    assert num_read > 30
