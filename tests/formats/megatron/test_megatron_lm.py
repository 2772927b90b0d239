"""`converters/megatron/dist/read.py`, `optimizer.py`, `write.py`: checkpoints from Megatron-LM 0.19.2 itself."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from ckpt import api
from ckpt.plan.checkpoint import Checkpoint, Layout
from tests.frameworks.runs import held
from tests.support.commands import ckpt
from tests.support.describing import content

NAMES = ["megatron-lm", "megatron-lm-muon"]
#: Rank counts on which a run may resume, starting with its own.
SIZES = {"megatron-lm": (4, 2, 6), "megatron-lm-muon": (2, 4)}


@pytest.fixture(params=NAMES)
def folder(request: pytest.FixtureRequest, fixtures: Path) -> Path:
    return fixtures / str(request.param)


@pytest.mark.parametrize("name", [*NAMES, "megatron-llm-jp/run"])
def test_every_tensor_is_what_the_ranks_held(fixtures: Path, name: str) -> None:
    read, known = api.open(fixtures / name), held(fixtures / name.split("/")[0] / "truth")
    assert read.tensors.keys() == known.tensors.keys()
    for key, tensor in read.tensors.items():
        assert content(tensor) == known.tensors[key], key


@pytest.mark.parametrize("name", [*NAMES, "megatron-llm-jp/run"])
def test_what_a_run_goes_on_with(fixtures: Path, name: str) -> None:
    read, known = api.open(fixtures / name), held(fixtures / name.split("/")[0] / "truth")
    state = read.state
    assert (state.step, state.entries()["opt_param_scheduler"]) == (2, known.facts["scheduler"])
    assert set(state.scalars["step"].values()) == set(known.facts["steps"]) == {2}
    groups = {frozenset(members): json.loads(options) for options, members in known.facts["groups"]}
    assert {frozenset(group.fqns) for group in state.param_groups} == groups.keys()
    for group in state.param_groups:
        options = groups[frozenset(group.fqns)]
        assert {name: group.options[name] for name in options if name != "betas"} == {
            name: value for name, value in options.items() if name != "betas"
        }


def test_the_same_bits_for_other_ranks(folder: Path, tmp_path: Path) -> None:
    source = api.open(folder)
    for size in SIZES[folder.name]:
        written = _written(source, tmp_path / str(size), world_size=size)
        args = written.state.args
        assert args is not None and (args["world_size"], args["data_parallel_size"]) == (size, size)
        assert {key: content(one) for key, one in written.tensors.items()} == {
            key: content(one) for key, one in source.tensors.items()
        }
        assert {frozenset(group.fqns) for group in written.state.param_groups} == {
            frozenset(group.fqns) for group in source.state.param_groups
        }


@pytest.mark.parametrize(
    "layout", [{"world_size": 24}, {"world_size": 8, "pp": 2, "vpp": 1}, {"world_size": 16, "ep": 4, "pp": 4, "vpp": 3}]
)
def test_the_same_bits_for_other_stages(fixtures: Path, tmp_path: Path, layout: dict[str, int]) -> None:
    """The run counts embedding and loss as layers, on 6 stages with two chunks each."""
    source = api.open(fixtures / "megatron-llm-jp" / "run")
    written = _written(source, tmp_path / "out", **layout)
    assert written.world_size == layout["world_size"]
    assert {key: content(one) for key, one in written.tensors.items()} == {
        key: content(one) for key, one in source.tensors.items()
    }


def test_random_states_go_where_stages_are_the_same(folder: Path, tmp_path: Path) -> None:
    source = api.open(folder)
    other = _written(source, tmp_path / "dp", world_size=2 * SIZES[folder.name][0])
    assert other.state.per_rank["rng_state"].keys() == source.state.per_rank["rng_state"].keys() == {"shard_0.0_1.1"}
    assert other.state.args is not None and not other.state.args.get("no_save_rng")
    stages = _written(source, tmp_path / "pp", pp=2)
    assert "rng_state" not in stages.state.per_rank
    assert stages.state.args is not None and stages.state.args["no_save_rng"] is True  # Megatron-LM trusts this


def test_the_rerun_state_is_there_on_the_same_ranks_alone(folder: Path, tmp_path: Path) -> None:
    source = api.open(folder)
    same, other = (_written(source, tmp_path / str(n), world_size=n) for n in SIZES[folder.name][:2])
    assert "rerun_state_machine" in same.state.entries() and "rerun_state_machine_state" in same.state.per_rank
    assert "rerun_state_machine" not in other.state.entries()
    assert "rerun_state_machine_state" not in other.state.per_rank


def test_resume_converts_what_megatron_lm_does_not_load(folder: Path, tmp_path: Path) -> None:
    """The buffers fit only the run's own ranks, so `ckpt resume RUN --world-size N` converts."""
    run = shutil.copytree(folder, tmp_path / "run")
    own, other, *_ = SIZES[folder.name]
    same = ckpt("resume", run, "--world-size", str(own))
    assert (same.code, same.out.strip()) == (0, str(run))
    moved = ckpt("resume", run, "--world-size", str(other))
    assert moved.code == 0 and moved.out.strip() != str(run), moved.err
    written = api.open(moved.out.strip())
    assert written.world_size == other and not written.bound_to_ranks
    again = ckpt("resume", moved.out.strip(), "--world-size", str(own))  # loads on any ranks
    assert (again.code, again.out.strip()) == (0, moved.out.strip())


def _written(source: Checkpoint, path: Path, **layout: Any) -> Checkpoint:
    api.plan(source, "megatron-dist", Layout(**layout)).run(path)
    return api.open(path, "megatron-dist")
