"""`ckpt/state/naming.py`: names under torch.compile: the engine's own names and the state dicts' names."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from ckpt import api
from ckpt.plan.checkpoint import Checkpoint, Layout
from ckpt.plan.relation import Relation, translate
from ckpt.state.naming import stripper, without_wrappers
from tests.support.describing import content


@pytest.fixture
def toy(fixtures: Path) -> Checkpoint:
    return api.open(fixtures / "toy-zero2")


def wrapped(toy: Checkpoint, prefix: str, folder: Path) -> Checkpoint:
    """Rename the toy like DeepSpeed with torch.compile on the model or its modules; nothing else differs."""
    names = {fqn: f"{prefix}{fqn}" for fqn in toy.shapes}
    ties = {f"{prefix}{alias}": f"{prefix}{owner}" for alias, owner in toy.ties.items()}
    named = translate(replace(toy, ties={}), Relation.renaming(names, toy.shapes), toy.namespace)
    api.plan(replace(named, ties=ties), "zero2", Layout(world_size=2)).run(folder)
    return api.open(folder)


@pytest.mark.parametrize("prefix", ["_orig_mod.", "module._orig_mod.", "_checkpoint_wrapped_module."])
@pytest.mark.parametrize("target", ["dcp", "full", "hf"])
def test_state_dicts_have_names_without_wrappers(toy: Checkpoint, tmp_path: Path, prefix: str, target: str) -> None:
    run = wrapped(toy, prefix, tmp_path / "run")
    conversion = api.plan(run, target)
    assert any("left out wrapper prefixes" in note for note in conversion.plan.target.notes)
    conversion.run(tmp_path / "out")
    written = api.open(tmp_path / "out")
    assert set(written.shapes) == set(toy.shapes)
    assert api.verify(run, written).equal


def test_deepspeeds_files_keep_the_names_that_its_engine_asks_for(toy: Checkpoint, tmp_path: Path) -> None:
    run = wrapped(toy, "_orig_mod.", tmp_path / "run")
    api.plan(run, "zero2", Layout(world_size=3)).run(tmp_path / "out")
    written = api.open(tmp_path / "out")
    assert {key: content(tensor) for key, tensor in written.tensors.items()} == {
        key: content(tensor) for key, tensor in run.tensors.items()
    }
    assert all(fqn.startswith("_orig_mod.") for fqn in written.shapes)
    assert api.hash(run).whole == api.hash(toy).whole


def test_a_model_without_wrappers_is_as_it_is(toy: Checkpoint) -> None:
    assert without_wrappers(toy) is toy


def test_a_last_part_is_no_wrapper(toy: Checkpoint) -> None:
    """A wrapper's name has another one after it."""
    names = {fqn: f"{fqn}._orig_mod" for fqn in toy.shapes}
    named = translate(replace(toy, ties={}), Relation.renaming(names, toy.shapes), toy.namespace)
    assert without_wrappers(named) is named


@pytest.mark.parametrize(
    ("name", "inner"),
    [
        ("my_orig_mod.weight", "my_orig_mod.weight"),
        ("_orig_mod._orig_mod.weight", "weight"),
        ("head._fsdp_wrapped_module.weight", "head.weight"),
        ("head.__checkpoint_wrapped_module.weight", "head.__checkpoint_wrapped_module.weight"),
    ],
)
def test_a_wrapper_is_a_whole_part_of_the_name(name: str, inner: str) -> None:
    assert stripper([name, "other"])(name) == inner
