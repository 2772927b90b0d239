"""A writer that forgets a tensor is refused by the plan, whatever the writer says of itself.

Each writable format's own target for a real sample is tampered with as a bug in the writer would, one tensor at a time.
Two tensors of one size in each other's slots are out of reach of this proof: the slots are all filled and every tensor
is used.  That is for the tests against the engines' truth to find.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

import ckpt
from ckpt import api, registry
from ckpt.errors import LossError
from ckpt.plan.checkpoint import BUFFER, MASTER, WEIGHT, Checkpoint, Format, Key, Layout, Target, TargetFile
from ckpt.plan.planner import make_plan

FIXTURES = Path(__file__).parents[2] / "fixtures"
#: What is converted to each format: a fixture whose tensors it has a place for, optimizer states among them.
SOURCES = {
    "megatron": "megatron-dist-flattened",
    "megatron-dist": "megatron-dist-flattened",
    "megatron-deepspeed": "megatron-dist-flattened",
    "peft": "lora-zero3",
    "zero3": "toy-zero3",
}
WRITABLE = [name for name in registry.names() if registry.get(name).writes]


Tables = dict[str, dict[str, dict[str, str]]]
TITLE = "Targets of forgetful writers: refused for a parameter, a buffer, an optimizer state"


class Case:
    """A source under the names of a format, and the format's writer."""

    def __init__(self, name: str, folder: Path) -> None:
        self.format: Format = registry.get(name)
        source = SOURCES.get(name, "toy-zero2")
        shutil.copytree(FIXTURES / source, folder / source, ignore=shutil.ignore_patterns("truth"))
        opened = ckpt.open(folder / source)
        layout = Layout(
            world_size=None if name not in ("zero1", "zero2", "zero3", "dcp") or source.startswith("mega") else 2
        )
        self.source = api.to_namespace(opened, self.format.namespace, layout)
        self.layout = layout
        self.name = name
        self.target = self.lay_out(self.source)

    def lay_out(self, checkpoint: Checkpoint) -> Target:
        return self.format.lay_out(checkpoint, self.layout)

    def plan(self, target: Target) -> None:
        make_plan(self.source, target, carries_optimizer=self.format.carries_optimizer)

    def count(self, tables: Tables, way: str) -> None:
        row = tables[TITLE][self.name]
        row[way] = str(int(row.get(way, "0")) + 1)

    def forgotten(self) -> Iterator[tuple[str, set[Key]]]:
        """A parameter, a buffer and an optimizer state that are placed, as what a writer may forget."""
        placed = {slot.key for file in self.target.files for slot in file.slots if slot.extent.numel}
        assert placed
        for what, roles in (("parameter", (WEIGHT, MASTER)), ("buffer", (BUFFER,))):
            for fqn in [fqn for fqn, role in self.source.tensors if role in roles and (fqn, role) in placed][:1]:
                yield what, {(fqn, role) for role in roles} & set(self.source.tensors)
        states = [key for key in self.source.tensors if key[1] not in (WEIGHT, MASTER, BUFFER) and key in placed]
        assert bool(states) == self.format.carries_optimizer
        for key in states[:1]:
            yield "optimizer state", {key}


def without_slots(target: Target, keys: set[Key], put: Callable[[TargetFile, int, int], TargetFile]) -> Target:
    """`target` in which something else is put where the tensors were to be."""
    files = []
    for file in target.files:
        kept = tuple(slot for slot in file.slots if slot.key not in keys)
        gone = [slot.extent for slot in file.slots if slot.key in keys]
        file = replace(file, slots=kept)
        for extent in gone:
            file = put(file, extent.offset, extent.nbytes)
        files.append(file)
    return replace(target, files=tuple(files))


def zeros(file: TargetFile, offset: int, size: int) -> TargetFile:
    return replace(file, zeros=(*file.zeros, (offset, size)))


def literals(file: TargetFile, offset: int, size: int) -> TargetFile:
    return replace(file, literals=(*file.literals, (offset, bytes(size))))


@pytest.fixture(scope="module", params=WRITABLE)
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Case:
    return Case(request.param, tmp_path_factory.mktemp("source"))


@pytest.mark.parametrize("put", [zeros, literals])
def test_a_tensor_in_whose_place_is_something_else(case: Case, put: Callable[..., TargetFile], tables: Tables) -> None:
    case.plan(case.target)
    for what, keys in case.forgotten():
        with pytest.raises(LossError, match="goes nowhere") as caught:
            case.plan(without_slots(case.target, keys, put))
        assert caught.value.fqn in {fqn for fqn, _ in keys}, what
        case.count(tables, f"slots to {put.__name__}")


def test_slots_that_are_dropped(case: Case, tables: Tables) -> None:
    """The bytes of the file are then filled by nothing, which is a writer's bug and no user's mistake."""
    for _, keys in case.forgotten():
        with pytest.raises(AssertionError, match="cover"):
            case.plan(without_slots(case.target, keys, lambda file, *_: file))
        case.count(tables, "slots dropped")


def test_a_part_that_is_dropped(case: Case, tables: Tables) -> None:
    """All slots of a tensor but one, where it has several."""
    for _, keys in case.forgotten():
        slots = [slot for file in case.target.files for slot in file.slots if slot.key in keys and slot.extent.numel]
        last = slots[-1]
        if len({(slot.key, slot.region) for slot in slots}) < 2 or [s.region for s in slots].count(last.region) > 1:
            continue
        files = []
        for file in case.target.files:
            if last in file.slots:
                kept = tuple(slot for slot in file.slots if slot is not last)
                file = zeros(replace(file, slots=kept), last.extent.offset, last.extent.nbytes)
            files.append(file)
        with pytest.raises(LossError, match=r"would not be written|goes nowhere"):
            case.plan(replace(case.target, files=tuple(files)))
        case.count(tables, "one slot of several")


def test_a_tensor_that_the_writer_does_not_see(case: Case, tables: Tables) -> None:
    for what, keys in case.forgotten():
        if what == "parameter":  # with its optimizer states
            keys = {key for key in case.source.tensors if key[0] in {fqn for fqn, _ in keys}}
        seen = {key: tensor for key, tensor in case.source.tensors.items() if key not in keys}
        with pytest.raises(LossError):
            case.plan(case.lay_out(replace(case.source, tensors=seen)))
        case.count(tables, "never seen")


def test_a_tensor_that_is_left_out_without_a_reason(case: Case, tables: Tables) -> None:
    for _, keys in case.forgotten():
        target = without_slots(case.target, keys, zeros)
        with pytest.raises(AssertionError, match="reason"):
            case.plan(replace(target, left_out=dict.fromkeys(keys, "")))
        case.plan(replace(target, left_out=target.left_out | dict.fromkeys(keys, "said to the user")))
        assert "said to the user" in replace(target, left_out=dict.fromkeys(keys, "said to the user")).not_written
        case.count(tables, "without a reason")
