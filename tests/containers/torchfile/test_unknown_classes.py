"""`ckpt/containers/torchfile/unknown_classes.py`: objects whose classes are not in the table."""

from __future__ import annotations

import argparse
import dataclasses
import enum
import pickle
import sys
from collections import namedtuple
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.metadata import Metadata

from ckpt import api
from ckpt.containers.torchfile import read as torchfile
from ckpt.containers.torchfile.unpickle import loads as load
from ckpt.containers.torchfile.values import Record
from ckpt.errors import UnsafeError
from tests.support.hostile import make

PROTOCOLS = [2, 4, 5]
NEW = PROTOCOLS  # protocols 0 and 1 create objects with copyreg._reconstructor


class Colour(enum.Enum):
    red = 1


class Kind(str, enum.Enum):
    full = "full"


class Name(str):
    pass


class Count(int):
    pass


class Shape(tuple):  # type: ignore[type-arg]
    pass


class Settings(dict):  # type: ignore[type-arg]
    pass


@dataclasses.dataclass
class Place:
    path: str
    offset: int
    kind: Colour = Colour.red


@dataclasses.dataclass(slots=True)
class Slotted:
    path: str


Pair = namedtuple("Pair", "first second")


class Outer:
    class Inner:
        pass


class WithCode:
    """Object with its own `__setstate__` code."""

    def __getstate__(self) -> str:
        return "text"

    def __setstate__(self, state: str) -> None:
        raise AssertionError("it was run")


class Called:
    def __reduce__(self) -> tuple[Any, ...]:
        return Called, (1, 2)


class Holder:
    def __init__(self, value: Any) -> None:
        self.value = value


def loads(data: bytes) -> Any:
    return load(data, path="file.pt")


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_plain_objects_of_any_class_are_inert(protocol: int) -> None:
    value = [Colour.red, Kind.full, Name("a"), Count(3), Shape((1, 2)), Pair(1, "b"), Place("x", 3), Outer.Inner()]
    red, full, name, count, shape, pair, place, inner = loads(pickle.dumps(value, protocol))
    assert all(type(one) is Record and one.module == __name__ for one in (red, full, name, count, shape, pair, inner))
    assert (red.value, full.value, name.value, count.value) == (1, "full", "a", 3)
    assert (shape.args, pair.args) == (((1, 2),), (1, "b"))
    assert (place.get("path"), place.get("offset"), place.get("kind").value) == ("x", 3, 1)
    assert inner.name == "Outer.Inner"


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_slots_and_items(protocol: int) -> None:
    slotted, settings = loads(pickle.dumps([Slotted("x"), Settings(lr=0.1, nested=Settings(a=1))], protocol))
    assert settings.get("lr") == 0.1 and settings.get("nested").get("a") == 1
    assert slotted.typename == f"{__name__}.Slotted"


def test_nothing_is_imported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "canary_module.py").write_text("raise AssertionError('it was imported')")
    monkeypatch.syspath_prepend(tmp_path)
    found = loads(make.pickled(b"ccanary_module\nPlace\n)\x81}" + make.text("path") + make.text("x") + b"sb"))
    assert (found.typename, found.get("path")) == ("canary_module.Place", "x")
    assert "canary_module" not in sys.modules


REFUSED = {
    "a function": make.called("framework.tools", "rebuild", "x"),
    "a function that is only named": b"cframework.tools\nrebuild\n",
    "a private function": make.called("framework.tools", "_rebuild_thing", "x"),
    "a class called with two values": make.called("framework.tools", "Place", "x", "y"),
    "a class called with a list": b"cframework.tools\nPlace\n](K\x01e\x85R",
    "a class called without arguments": b"cframework.tools\nPlace\n)R",
    "a state that is no dict": b"cframework.tools\nPlace\n)\x81" + make.text("state") + b"b",
    "a state that is a list": b"cframework.tools\nPlace\n)\x81]b",
    "a state of a class": b"cframework.tools\nPlace\n}b",
    "the standard library": b"csubprocess\nPopen\n)\x81}b",
    "the standard library's classes": make.called("zipfile", "ZipFile", "x"),
    "a shell": make.called("sh", "Command", "ls"),
    "torch": make.called("torch.jit", "CompilationUnit", "x"),
    "a module of torch's": b"ctorch.nn.modules.linear\nLinear\n)\x81}b",
    "numpy": make.called("numpy", "DataSource", "x"),
    "an attribute of a class": b"\x8c\x10framework.tools." + b"\x8c\x03a.b\x93",
    "a dotted function": make.stack_global("framework.tools", "Place.__init__"),
    "getattr of a class": b"cbuiltins\ngetattr\ncframework.tools\nPlace\n" + make.text("run") + b"\x86R",
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_only_code_can_make_is_refused(case: str) -> None:
    with pytest.raises(UnsafeError) as caught:
        loads(make.pickled(REFUSED[case]))
    assert caught.value.exit_code == 5


def test_a_refusal_names_the_framework_and_the_way_out() -> None:
    with pytest.raises(UnsafeError, match=r"framework\.tools\.rebuild") as caught:
        loads(make.pickled(REFUSED["a function"]))
    assert "load the file with framework" in (caught.value.hint or "") and "state_dict" in (caught.value.hint or "")


@pytest.mark.parametrize("protocol", NEW)
@pytest.mark.parametrize("value", [WithCode(), Called()], ids=["state", "call"])
def test_objects_with_code_of_their_own(protocol: int, value: object) -> None:
    with pytest.raises(UnsafeError, match=type(value).__name__):
        loads(pickle.dumps(value, protocol))


@pytest.mark.parametrize("nested", [lambda one: one, lambda one: [{"a": (one,)}], lambda one: Holder(Holder(one))])
def test_an_object_with_a_tensor_inside_is_refused(tmp_path: Path, nested: Any) -> None:
    """The meaning of such a tensor is unknown, and it must not get lost silently."""
    torch.save({"w": torch.ones(2), "odd": Holder(nested(torch.ones(3)))}, tmp_path / "model.pt")
    with pytest.raises(UnsafeError, match=r"tensors inside an object of .*Holder"):
        torchfile.read(tmp_path / "model.pt")


def test_a_model_next_to_a_plain_object_is_read(tmp_path: Path) -> None:
    saved = {"model": {"w": torch.ones(2)}, "args": argparse.Namespace(kind=Colour.red), "place": Place("x", 1)}
    torch.save(saved, tmp_path / "model.pt")
    assert [fqn for fqn, _ in api.open(tmp_path / "model.pt").tensors] == ["w"]


def test_metadata_with_a_savers_own_place_in_storage(tmp_path: Path) -> None:
    """OLMo-core's `.metadata` uses its own `_StorageInfo`. Only torch's fields are read."""
    dcp.save({"model": {"w": torch.arange(6.0)}}, checkpoint_id=tmp_path / "step", no_dist=True)
    path = tmp_path / "step" / ".metadata"
    metadata: Metadata = pickle.loads(path.read_bytes())
    own = {index: StorageInfo(**vars(info)) for index, info in metadata.storage_data.items()}
    path.write_bytes(pickle.dumps(dataclasses.replace(metadata, storage_data=own)))
    assert [fqn for fqn, _ in api.open(tmp_path / "step").tensors] == ["w"]
    assert api.verify(tmp_path / "step", tmp_path / "step").equal


@dataclasses.dataclass
class StorageInfo:
    relative_path: str
    offset: int
    length: int
    transform_descriptors: Any = None
