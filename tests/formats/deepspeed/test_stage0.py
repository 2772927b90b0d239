"""`converters/deepspeed/stage0.py`: DeepSpeed without ZeRO matches the live engine, and shapes prove names."""

from __future__ import annotations

import itertools
import shutil
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import ckpt
from ckpt import api
from ckpt.errors import CorruptError, NotFoundError, UsageError
from ckpt.plan.checkpoint import BUFFER, MASTER, WEIGHT, Layout, OneElement
from ckpt.plan.dtypes import FLOAT32
from ckpt.state.numbered import names_by_shapes
from tests.support.describing import content
from tests.support.engines import Truth
from tests.support.model_files import rewriting

RUNS = ("toy-zero0", "toy-zero0-fp32")


def truth_of(run: Path) -> Truth:
    return Truth.load(run / "truth" / "global_step2.safetensors")


@pytest.mark.parametrize("name", RUNS)
def test_equals_what_the_live_engine_held(fixtures: Path, name: str) -> None:
    truth, checkpoint = truth_of(fixtures / name), api.open(fixtures / name)
    assert (checkpoint.format, checkpoint.tag, checkpoint.state.step) == ("zero0", "global_step2", 2)
    assert checkpoint.ties == truth.ties
    assert {key: content(tensor) for key, tensor in checkpoint.tensors.items()} == truth.tensors
    assert ("a.weight", MASTER) in truth.tensors or name.endswith("fp32")
    decay = {g.options["weight_decay"]: g.fqns for g in checkpoint.state.param_groups}
    if name == "toy-zero0":
        assert decay[0.1] == ("embed.weight", "a.weight", "b.weight")
        assert decay[0.0] == ("a.bias", "b.bias", "norm.weight", "norm.bias")
    assert len(checkpoint.state.scalars["step"]) == 7


@pytest.mark.parametrize("name", RUNS)
@pytest.mark.parametrize("target", ["zero1", "zero3", "universal", "dcp", "full"])
def test_everything_goes_on_to_other_formats(fixtures: Path, tmp_path: Path, name: str, target: str) -> None:
    checkpoint, truth = api.open(fixtures / name), truth_of(fixtures / name)
    ranks = 2 if target.startswith("zero") else None
    api.plan(checkpoint, target, Layout(world_size=ranks)).run(tmp_path / "out")
    written = api.open(tmp_path / "out", target)
    for (fqn, role), expected in truth.tensors.items():
        key = (fqn, role)
        if role == WEIGHT and key not in written.tensors:
            key = (fqn, MASTER)  # ZeRO-3 stores only masters for trainable parameters
            expected = truth.tensors.get(key, expected)
        elif role == MASTER and key not in written.tensors:
            key = (fqn, WEIGHT)  # FSDP stores masters as weights
        elif role == WEIGHT and (fqn, MASTER) in truth.tensors and target in ("dcp", "full"):
            expected = truth.tensors[fqn, MASTER]
        if role == BUFFER and key not in written.tensors:
            key = (fqn, WEIGHT)  # torch's files don't distinguish buffers
        assert content(written.tensors[key]) == expected, (fqn, role)


def test_what_shapes_do_not_prove_is_left_out_and_said(fixtures: Path, tmp_path: Path) -> None:
    run = Path(shutil.copytree(fixtures / "toy-zero0", tmp_path / "run"))
    path = run / "global_step2" / "mp_rank_00_model_states.pt"
    with rewriting(path) as whole:
        groups = whole["optimizer"]["optimizer_state_dict"]["param_groups"]
        groups[0]["params"], groups[1]["params"] = groups[0]["params"][:2], [2, *groups[1]["params"]]
        whole["optimizer"]["fp32_groups"][1].insert(0, whole["optimizer"]["fp32_groups"][0].pop())
    checkpoint = api.open(run)
    assert {role for _, role in checkpoint.tensors} == {WEIGHT, BUFFER} and not checkpoint.state.param_groups
    assert any("left out the optimizer states and masters" in note for note in checkpoint.notes)


def test_is_not_taken_for_other_layouts(fixtures: Path, tmp_path: Path) -> None:
    run = Path(shutil.copytree(fixtures / "toy-zero0", tmp_path / "run"))
    (run / "global_step2" / "mp_rank_01_model_states.pt").write_bytes(b"")
    with pytest.raises(NotFoundError):
        api.open(run)
    with pytest.raises(UsageError, match="cannot be written"):
        api.plan(api.open(fixtures / "toy-zero0"), "zero0")


SHAPES = st.lists(st.sampled_from([(2, 3), (3, 2), (4,)]), min_size=1, max_size=6)


@settings(deadline=None)
@given(SHAPES, st.data())
def test_names_are_given_where_one_way_alone_fits(shapes: list, data: st.DataObject) -> None:
    """The result equals a brute-force search. Parameters left out are frozen."""
    parameters = {f"p{i}": shape for i, shape in enumerate(shapes)}
    trained = [i for i in range(len(shapes)) if data.draw(st.booleans())]
    asked = [shapes[i] for i in trained]
    ways = [
        tuple(f"p{i}" for i in way)
        for way in itertools.combinations(range(len(shapes)), len(asked))
        if [shapes[i] for i in way] == asked
    ]
    found = names_by_shapes(parameters, [asked])
    assert found == ([ways[0]] if len(ways) == 1 else None)


def test_states_of_a_parameter_in_no_group_are_no_silent_loss(fixtures: Path, tmp_path: Path) -> None:
    run = Path(shutil.copytree(fixtures / "toy-zero0", tmp_path / "run"))
    path = run / "global_step2" / "mp_rank_00_model_states.pt"
    with rewriting(path) as content:
        state = content["optimizer"]["optimizer_state_dict"]["state"]
        state[99] = state.pop(2)
    with pytest.raises(CorruptError, match="in no param group"):
        api.open(run)
    del content["optimizer"]["fp32_groups"]
    torch.save(content, path)
    with pytest.raises(CorruptError, match="masters are missing"):
        api.open(run)


@pytest.mark.parametrize(
    ("role", "count", "what"),
    [
        (MASTER, 0, "master does not have its parameter's shape"),
        (MASTER, 1, "master is a single number"),
        (MASTER, 2, "master does not have its parameter's shape"),
        ("exp_avg", 1, "exp_avg is a single number"),
    ],
)
def test_a_master_or_a_state_of_fewer_elements_is_damage(
    fixtures: Path, tmp_path: Path, role: str, count: int, what: str
) -> None:
    run = tmp_path / "run"
    shutil.copytree(fixtures / "toy-zero0", run)
    (path,) = run.rglob("mp_rank_00_model_states.pt")
    with rewriting(path) as saved:
        masters, states = saved["optimizer"]["fp32_groups"], saved["optimizer"]["optimizer_state_dict"]["state"]
        if role == MASTER:
            masters[-1][-1] = masters[-1][-1].flatten()[:count].clone()
        else:
            last = max(states)
            states[last]["exp_avg"] = states[last]["exp_avg"].flatten()[:count].clone()
    with pytest.raises(CorruptError, match=what):
        ckpt.open(run)


def test_states_of_other_kinds_than_adams(fixtures: Path, tmp_path: Path) -> None:
    """A single number stays a tensor. A note names a state with another shape than its parameter."""
    run = Path(shutil.copytree(fixtures / "toy-zero0", tmp_path / "run"))
    path = run / "global_step2" / "mp_rank_00_model_states.pt"
    with rewriting(path) as content:
        for state in content["optimizer"]["optimizer_state_dict"]["state"].values():
            state |= {"mu_product": torch.tensor(0.25), "row": torch.ones(1, 3)}
    checkpoint, name = api.open(run), "embed.weight"
    assert checkpoint.state.scalars["mu_product"][name] == OneElement(0.25, FLOAT32, ())
    assert (name, "row") not in checkpoint.tensors and (name, "exp_avg") in checkpoint.tensors
    assert [one.partition(" of ")[0] for one in checkpoint.unread] == ["optimizer state row"]
    assert checkpoint.unread[0].endswith(": it is not of the parameter's shape")


def test_a_file_without_the_entry_of_its_optimizer_is_said(fixtures: Path, tmp_path: Path) -> None:
    """DeepSpeed always writes the entry, as None if ZeRO has the optimizer. Here one byte of the name is wrong."""
    run = Path(shutil.copytree(fixtures / "toy-zero0", tmp_path / "run"))
    model = run / "global_step2/mp_rank_00_model_states.pt"
    with rewriting(model) as content:
        content["optimizes"] = content.pop("optimizer")
    assert [note for note in api.open(run).notes if "lacks the entry 'optimizer'" in note]
    assert not any("lacks the entry" in note for note in api.open(fixtures / "toy-zero0").notes)


@pytest.mark.parametrize("name", ["toy-zero0", "autotp-zero0"])
def test_a_tag_that_a_step_does_not_have_is_not_passed_over(name: str, fixtures: Path) -> None:
    step = fixtures / name / "global_step2"
    assert ckpt.open(step, tag="global_step2").path == str(step)
    with pytest.raises(NotFoundError, match="with the tag 'global_step3'"):
        ckpt.open(step, tag="global_step3")
