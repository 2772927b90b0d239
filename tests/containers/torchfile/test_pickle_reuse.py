"""`ckpt/containers/torchfile/tree.py`: equal pickles of many ranks are parsed once.

Each file keeps its own tensors.
"""

from __future__ import annotations

import collections
import datetime
import pathlib
import shutil
import zipfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

import ckpt
from ckpt.containers.torchfile import read as torchfile
from ckpt.containers.torchfile import tree
from ckpt.containers.torchfile.machine import Machine
from ckpt.containers.torchfile.tree import Parsed, Pickles
from ckpt.containers.torchfile.values import Array, Record, Storage, StoredDict, StoredTensor
from ckpt.errors import CorruptError
from ckpt.plan.dtypes import FLOAT32
from ckpt.plan.tensors import Extent
from tests.support.places import FIXTURES


def structure(value: Any, seen: dict[int, int] | None = None) -> Any:
    """Return `value` as plain tuples. Equal roots give equal tuples, including shared objects and cycles."""
    seen = {} if seen is None else seen
    if isinstance(value, (dict, list, set, Record, Array)):
        if id(value) in seen:
            return "again", seen[id(value)]
        seen[id(value)] = len(seen)
    if isinstance(value, dict):
        more = (value.kind, structure(value.attributes, seen)) if isinstance(value, StoredDict) else ()
        items = [(structure(key, seen), structure(item, seen)) for key, item in value.items()]
        return type(value).__name__, more, items
    if isinstance(value, (list, tuple, collections.deque)):
        return type(value).__name__, [structure(item, seen) for item in value]
    if isinstance(value, (set, frozenset)):
        return type(value).__name__, sorted(repr(structure(item, seen)) for item in value)
    if isinstance(value, (Record, Array)):
        return type(value).__name__, [structure(getattr(value, name), seen) for name in type(value).__slots__]
    if isinstance(value, StoredTensor):
        return value.extent, value.requires_grad, structure(value.attributes, seen)
    return type(value).__name__, value


def values() -> dict[str, Any]:
    """Return a variety of values found in checkpoints, large enough to be cached."""
    weight = torch.arange(12.0).reshape(3, 4)
    shared = {"lr": 1e-3}
    return {
        "state": {f"layer.{n}.weight": torch.full((n % 3, 2), float(n)) for n in range(60)},
        "tied": [weight, weight.T, weight[1:]],
        "groups": [shared, shared],
        "ordered": collections.OrderedDict(a=torch.nn.Parameter(weight)),
        "default": collections.defaultdict(list, {"x": [1, (2, frozenset({3}))]}),
        "times": (datetime.datetime(2026, 1, 2), pathlib.PurePosixPath("a/b")),
        "numpy": np.arange(6, dtype=np.int16).reshape(2, 3),
        "args": SimpleNamespace(dtype=torch.bfloat16, deep={"set": {1, 2}, "none": None, "bytes": b"\0\1"}),
        "empty": torch.empty(0),
    }


def test_the_next_files_are_what_they_are_when_read_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    parsed = []
    run = Machine.run
    monkeypatch.setattr(Machine, "run", lambda machine: parsed.append(machine) or run(machine))
    paths = [tmp_path / name for name in ("one", "two", "three")]
    for path in paths:
        (path).mkdir()
        torch.save(values(), path / "x.pt")
    known = Pickles()
    roots = [torchfile.read(path / "x.pt", alike=known).root for path in paths]
    assert len(parsed) == len(known) == 1
    for path, root in zip(paths, roots, strict=True):
        assert structure(root) == structure(torchfile.read(path / "x.pt").root)
    roots[0]["state"].clear()  # readers don't share changes
    roots[1]["groups"][0]["lr"] = 2
    again = torchfile.read(paths[2] / "x.pt", alike=known).root
    assert structure(again) == structure(torchfile.read(paths[2] / "x.pt").root)


@pytest.mark.parametrize("name", ["toy-zero1", "toy-zero2", "toy-zero3", "lora-zero3", "moe-zero3"])
def test_files_of_deepspeed(name: str) -> None:
    known = Pickles()
    files = sorted((FIXTURES / name).rglob("*.pt"))
    assert files
    for path in [*files, *files]:
        assert structure(torchfile.read(path, alike=known).root) == structure(torchfile.read(path).root)


def test_a_checkpoint_of_ranks_is_the_same_with_and_without(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tree, "_MIN_PICKLE", 1)
    found = ckpt.open(FIXTURES / "toy-zero3")
    monkeypatch.setattr(tree, "_MAX_PICKLE", 0)
    alone = ckpt.open(FIXTURES / "toy-zero3")
    assert found.tensors == alone.tensors
    assert structure(found.state.entries()) == structure(alone.state.entries())


def rezipped(path: Path, change: dict[str, bytes | None]) -> None:
    """Rewrite the file with changed or removed records and correct checksums."""
    with zipfile.ZipFile(path) as before:
        content = {info.filename: before.read(info) for info in before.infolist()}
    with zipfile.ZipFile(path, "w") as after:
        for name, data in content.items():
            data = change.get(name.split("/", 1)[1], data)
            if data is not None:
                after.writestr(name, data)


@pytest.mark.parametrize("data", [None, b"", b"1234"])
def test_a_storage_that_is_missing_or_of_another_length_is_found(tmp_path: Path, data: bytes | None) -> None:
    known = Pickles()
    for name in ("good", "bad"):
        (tmp_path / name).mkdir()
        torch.save(values(), tmp_path / name / "x.pt")
    rezipped(tmp_path / "good" / "x.pt", {})
    rezipped(tmp_path / "bad" / "x.pt", {"data/4": data})
    torchfile.read(tmp_path / "good" / "x.pt", alike=known)
    assert len(known) == 1
    with pytest.raises(CorruptError) as alone:
        torchfile.read(tmp_path / "bad" / "x.pt")
    with pytest.raises(CorruptError) as caught:
        torchfile.read(tmp_path / "bad" / "x.pt", alike=known)
    assert str(caught.value) == str(alone.value)


def test_the_same_pickle_with_its_storages_elsewhere_is_parsed(tmp_path: Path) -> None:
    known = Pickles()
    for name in ("x.pt", "a-much-longer-name-of-a-folder-in-the-zip-that-moves-what-follows.pt"):
        torch.save(values(), tmp_path / name)
        rezipped(tmp_path / name, {})  # drops the alignment padding
        assert structure(torchfile.read(tmp_path / name, alike=known).root) == structure(
            torchfile.read(tmp_path / name).root
        )
    shutil.copy(tmp_path / "x.pt", tmp_path / "copy.pt")
    assert torchfile.read(tmp_path / "copy.pt", alike=known).root["tied"][0].extent.path == str(tmp_path / "copy.pt")


def test_what_is_not_understood_is_not_copied() -> None:
    table: dict[Any, Any] = {}
    circle = Record("m", "C")
    circle.state = (1, circle)
    held: tuple[Any, ...] = (circle,)
    circle.state = held
    for root in ({"x": object()}, bytearray(b"x"), held):
        assert Parsed(root, {}, table, 0).in_file("other") is None
    storage = Storage("one", 64, FLOAT32, 2, 8, "0")
    tensor = StoredTensor(Extent.contiguous("one", 64, FLOAT32, (2,)))
    moved = Parsed([storage, tensor, tensor], {}, table, 0).in_file("other")
    assert [moved[0].path, moved[1].extent.path, moved[1].extent.offset] == ["other", "other", 64]
    assert moved[1] is moved[2]


def test_few_pickles_are_kept_and_none_that_is_small_or_huge() -> None:
    known = Pickles()
    for number in range(9):
        known.keep(bytes([number]) * 5000, Parsed(None, {}, None, 0))
    known.keep(b"small", Parsed(None, {}, None, 0))
    assert [pickle[0] for pickle in known] == [5, 6, 7, 8]
