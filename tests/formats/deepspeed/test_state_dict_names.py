"""`converters/deepspeed/model_file.py`: a `state_dict()` with other names than `param_shapes`."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from ckpt import api
from ckpt.containers.torchfile.values import StoredTensor
from ckpt.plan.checkpoint import BUFFER, MASTER, WEIGHT
from ckpt.plan.dtypes import BFLOAT16
from ckpt.plan.tensors import Extent
from converters.deepspeed.model_file import match
from tests.support.building import assert_holds, groups_of, write_stage2, write_stage3

GROUPS = groups_of({"inner.a.weight": (5, 7), "inner.b.weight": (3,), "v_head.weight": (1, 4)}, {"inner.a.bias": (2,)})
WRITERS = pytest.mark.parametrize("write", [write_stage2, write_stage3])


def without_inner(fqn: str) -> str:
    return fqn.removeprefix("inner.")


def in_another_prefix(fqn: str) -> str:
    return f"model.{fqn}"


def without_the_adapters_name(fqn: str) -> str:
    return fqn.replace(".a.", ".")


def with_other_words(fqn: str) -> str:
    return fqn.replace("inner", "encoder").replace("v_head", "value")


def renaming(rename: Callable[[str], str], drop: str | None = None) -> Callable[[dict[str, Any], int], None]:
    def change(model: dict[str, Any], rank: int) -> None:
        module = {rename(fqn): tensor for fqn, tensor in model["module"].items() if fqn != drop}
        module[rename("inner.running_mean")] = torch.arange(3.0)
        model["module"] = module
        model["buffer_names"] = ["inner.running_mean"]

    return change


@WRITERS
@pytest.mark.parametrize("rename", [without_inner, in_another_prefix, without_the_adapters_name])
def test_names_of_parameters_and_buffers_are_those_recorded(
    tmp_path: Path, write: Callable[..., Path], rename: Callable[[str], str]
) -> None:
    checkpoint = api.open(write(tmp_path / "run", GROUPS, 2, change_model=renaming(rename)))
    assert_holds(checkpoint, GROUPS)
    recorded = {fqn for group in GROUPS for fqn in group}
    assert {fqn for fqn, _ in checkpoint.tensors} == {*recorded, "inner.running_mean"}
    assert [tensor.fqn for tensor in checkpoint.with_role(BUFFER)] == ["inner.running_mean"]
    assert {tensor.native for tensor in checkpoint.with_role(MASTER)} == {BFLOAT16}
    assert any("state_dict() renames" in note for note in checkpoint.notes)


@WRITERS
def test_no_tensor_appears_twice_under_an_unrelated_name(tmp_path: Path, write: Callable[..., Path]) -> None:
    """The values come from the masters. A note names entries without a recorded name."""
    checkpoint = api.open(write(tmp_path / "run", GROUPS, 2, change_model=renaming(with_other_words)))
    assert_holds(checkpoint, GROUPS)
    assert not any(fqn.startswith(("encoder.a", "encoder.b", "value")) for fqn, _ in checkpoint.tensors)
    assert any("4 entries in the model's state_dict()" in note for note in checkpoint.notes)


@WRITERS
def test_a_state_dict_without_some_parameters(tmp_path: Path, write: Callable[..., Path]) -> None:
    """TRL's value head over a PEFT model: the dict has only the head."""
    change = renaming(str, drop="inner.a.weight")
    checkpoint = api.open(write(tmp_path / "run", GROUPS, 2, change_model=change))
    assert_holds(checkpoint, GROUPS)
    assert checkpoint.tensors["inner.a.weight", MASTER].native == BFLOAT16
    assert not any("state_dict()" in note for note in checkpoint.notes)


@WRITERS
def test_a_tensor_that_the_dict_adds_is_kept(tmp_path: Path, write: Callable[..., Path]) -> None:
    def add(model: dict[str, Any], rank: int) -> None:
        model["module"]["average.weight"] = torch.ones(5, 7)

    checkpoint = api.open(write(tmp_path / "run", GROUPS, 2, change_model=add))
    assert_holds(checkpoint, GROUPS)
    assert ("average.weight", WEIGHT) in checkpoint.tensors


def stored(*shape: int) -> StoredTensor:
    return StoredTensor(Extent.contiguous("", 0, BFLOAT16, shape))


def test_the_place_most_names_agree_on_decides() -> None:
    """`b.weight` could be `outer.b.weight` or `b.b.weight`. The other names lack `outer`, so `outer.b.weight` wins."""
    recorded = {"outer.a.weight": (2,), "outer.c.weight": (2,), "outer.b.weight": (2,), "b.b.weight": (2,)}
    module = {"a.weight": stored(2), "c.weight": stored(2), "b.weight": stored(2)}
    names = match(module, recorded)
    assert names.renamed == {"a.weight": "outer.a.weight", "c.weight": "outer.c.weight", "b.weight": "outer.b.weight"}


def test_another_shape_is_another_tensor() -> None:
    names = match({"a.weight": stored(3)}, {"outer.a.weight": (2,)})
    assert (names.renamed, names.unmatched) == ({}, frozenset())
