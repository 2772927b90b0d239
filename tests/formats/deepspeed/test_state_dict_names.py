"""`converters/deepspeed/model_file.py`: a `state_dict()` with other names than `param_shapes`."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from ckpt import api
from ckpt.base.errors import CorruptError
from ckpt.containers.torchfile.values import StoredTensor
from ckpt.plan.checkpoint import BUFFER, MASTER, WEIGHT
from ckpt.plan.dtypes import BFLOAT16
from ckpt.plan.tensors import Extent
from converters.deepspeed.model_file import match
from tests.support.building import MODEL_NAME, assert_holds, groups_of, slot, write_stage2, write_stage3
from tests.support.commands import ckpt
from tests.support.model_files import rewriting

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

    def head_alone(model: dict[str, Any], rank: int) -> None:
        model["module"] = {fqn: tensor for fqn, tensor in model["module"].items() if fqn == "v_head.weight"}

    checkpoint = api.open(write(tmp_path / "run", GROUPS, 2, change_model=head_alone))
    assert_holds(checkpoint, GROUPS)
    assert checkpoint.tensors["inner.a.weight", MASTER].native == BFLOAT16
    assert not any("state dict" in note or "state_dict()" in note for note in checkpoint.notes)
    assert ckpt("check", tmp_path / "run").code == 0
    assert ckpt("resume", tmp_path / "run").code == 0


@WRITERS
@pytest.mark.parametrize("rename", [str, "{}x".format])
def test_a_parameter_that_the_dict_lost(
    tmp_path: Path, write: Callable[..., Path], rename: Callable[[str], str]
) -> None:
    """The master has the values, but a strict load refuses a dict without the name."""

    def change(model: dict[str, Any], rank: int) -> None:
        lost = model["module"].pop("inner.a.weight")
        model["module"] |= {} if rename is str else {rename("inner.a.weight"): lost}

    run = write(tmp_path / "run", GROUPS, 2, change_model=change)
    assert_holds(api.open(run), GROUPS)
    words = "the model's state dict lacks 1 trained parameter (inner.a.weight)"
    for command in ("check", "resume"):
        result = ckpt(command, run)
        assert (result.code, words in result.out + result.err) == (4, True)
    assert words in ckpt("convert", "auto", "hf", run, "-o", tmp_path / "out").err


def saying(run: Path, words: str, code: int) -> bool:
    """Run `check` and `resume`, and return True if both say `words` and end with `code`."""
    done = [ckpt(command, run) for command in ("check", "resume")]
    assert [one.code for one in done] == [code, code], done
    return all(words in one.out + one.err for one in done)


@WRITERS
@pytest.mark.parametrize("is_frozen", [True, False])
def test_a_frozen_parameter_or_a_buffer_that_the_dict_lost(
    tmp_path: Path, write: Callable[..., Path], is_frozen: bool
) -> None:
    """The run saved its frozen parameters, so the file records them."""
    value = torch.randn(3, 5).bfloat16()

    def change(model: dict[str, Any], rank: int, *, lost: bool) -> None:
        names = {"base.weight": is_frozen, "inner.running_mean": not is_frozen}
        model["frozen_param_shapes"] = {"base.weight": value.shape}
        model["buffer_names"] = ["inner.running_mean"]
        kept = {"base.weight": value, "inner.running_mean": torch.arange(3.0)}
        model["frozen_param_fragments"] = {"base.weight": value}
        if write is write_stage3:
            kept["base.weight"] = torch.empty(0, dtype=torch.bfloat16)
            model["frozen_param_fragments"] = {"base.weight": slot(value, rank, 2)}
        model["module"] |= {name: kept[name] for name, is_lost in names.items() if not (lost and is_lost)}

    whole = write(tmp_path / "whole", GROUPS, 2, change_model=partial(change, lost=False))
    assert not api.open(whole).lost_weights and ckpt("check", whole).code == ckpt("resume", whole).code == 0
    run = write(tmp_path / "run", GROUPS, 2, change_model=partial(change, lost=True))
    what = "1 frozen parameter (base.weight)" if is_frozen else "1 buffer (inner.running_mean)"
    words = f"the model's state dict lacks {what} in "
    assert saying(run, words, 4)
    done = ckpt("convert", "auto", "hf", run, "-o", tmp_path / "out")
    assert (done.code, words in done.err) == (0, True)
    tensors = load_file(tmp_path / "out" / "model.safetensors")
    assert ("inner.running_mean" in tensors) == is_frozen
    assert torch.equal(tensors["base.weight"], value)


def test_frozen_parameters_left_out_by_the_save_are_not_lost(tmp_path: Path) -> None:
    def change(model: dict[str, Any], rank: int) -> None:
        model["frozen_param_shapes"] = model["frozen_param_fragments"] = None

    run = write_stage2(tmp_path / "run", GROUPS, 2, change_model=change)
    checkpoint = api.open(run)
    assert not checkpoint.lost_weights and any("without its frozen parameters" in note for note in checkpoint.notes)


def test_the_dict_of_another_rank_lost_a_parameter(tmp_path: Path) -> None:
    def change(model: dict[str, Any], rank: int) -> None:
        if rank:
            del model["module"]["inner.a.weight"]

    run = write_stage3(tmp_path / "run", GROUPS, 2, change_model=change)
    assert_holds(api.open(run), GROUPS)
    name = "zero_pp_rank_1_mp_rank_00_model_states.pt"
    assert saying(run, f"lacks 1 trained parameter (inner.a.weight) in {name}", 4)


@pytest.mark.parametrize(
    ("fixture", "name", "kind"),
    [
        ("toy-zero0", "seen", "buffer"),
        ("toy-zero1", "mask", "buffer"),
        ("toy-zero2", "seen", "buffer"),
        ("toy-zero2", "head.weight", "tied parameter"),
        ("toy-zero2", "frozen.weight", "frozen parameter"),
    ],
)
def test_a_name_that_real_dicts_lost(fixtures: Path, tmp_path: Path, fixture: str, name: str, kind: str) -> None:
    run = Path(shutil.copytree(fixtures / fixture, tmp_path / "run"))
    assert not api.open(run).lost_weights
    for file in run.glob("global_step*/mp_rank_*_model_states.pt"):
        with rewriting(file) as model:
            del model["module"][name]
    checkpoint = api.open(run)
    assert checkpoint.lost_weights in checkpoint.notes
    assert saying(run, f"lacks 1 {kind} ({name}) in mp_rank_00_model_states.pt", 4)


@WRITERS
@pytest.mark.parametrize("shape", [(7, 5), (5, 6), (4, 7), (35,)])
def test_a_parameter_with_another_shape_than_recorded(
    tmp_path: Path, write: Callable[..., Path], shape: tuple[int, ...]
) -> None:
    def change(model: dict[str, Any], rank: int) -> None:
        if rank or write is write_stage2:
            model["module"]["inner.a.weight"] = torch.zeros(shape, dtype=torch.bfloat16)

    with pytest.raises(CorruptError, match="another shape than its file records") as caught:
        api.open(write(tmp_path / "run", GROUPS, 2, change_model=change))
    assert (caught.value.fqn, caught.value.expected, caught.value.found) == ("inner.a.weight", [5, 7], list(shape))


def test_a_frozen_parameter_and_a_tie_with_other_shapes(fixtures: Path, tmp_path: Path) -> None:
    for name in ("frozen.weight", "head.weight"):
        run = Path(shutil.copytree(fixtures / "toy-zero2", tmp_path / name))
        with rewriting(run / "global_step2" / MODEL_NAME) as model:
            model["module"][name] = model["module"][name].T.contiguous()
        with pytest.raises(CorruptError, match="another shape than its file records"):
            api.open(run)


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
