"""`converters/pytorch/fsdp_ranks_write.py`: rank files for another world size, loaded like verl loads them."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from ckpt import api
from ckpt.containers.torchfile.values import Record
from ckpt.errors import CorruptError, LossError, UsageError
from ckpt.plan.checkpoint import Checkpoint, Layout
from converters.pytorch.dtensors import DTensors
from converters.pytorch.facts import TorchFacts
from converters.pytorch.flat_parameters import find_units, slice_length, slice_pieces
from tests.support.describing import content
from tests.support.engines import raw
from tests.support.fsdp_runs import run_ranks
from tests.support.model_files import rewriting

RUNS = ("verl-fsdp1", "verl-fsdp2")
ACTOR = "global_step_3/actor"


def truth(run: Path) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    return torch.load(run / "truth/pytorch_model_fsdp.bin"), torch.load(run / "truth/optimizer.bin")


def assert_is_truth(checkpoint: Checkpoint, run: Path) -> None:
    weights, optimizer = truth(run)
    for fqn, weight in weights.items():
        assert content(checkpoint.tensors[checkpoint.ties.get(fqn, fqn), "weight"]) == raw(weight), fqn
    states = {(fqn, name): raw(t) for fqn, s in optimizer["state"].items() for name, t in s.items() if name != "step"}
    found = {key: content(tensor) for key, tensor in checkpoint.tensors.items() if key[1] != "weight"}
    assert found == states
    assert checkpoint.state.scalars["step"] == dict.fromkeys(optimizer["state"], 3.0)
    (group,) = checkpoint.state.param_groups
    assert set(group.fqns) == set(optimizer["param_groups"][0]["params"])


@pytest.mark.parametrize("name", RUNS)
def test_verls_folders_are_read_with_the_optimizer(fixtures: Path, name: str) -> None:
    checkpoint = api.open(fixtures / name)
    assert (checkpoint.format, checkpoint.state.step, checkpoint.world_size) == ("fsdp-ranks", 3, 2)
    assert_is_truth(checkpoint, fixtures / name)
    units = checkpoint.facts_of(TorchFacts).flat_parameters
    assert [len(unit) for unit in units] == ([2, 5, 5] if name == "verl-fsdp1" else [])
    assert checkpoint.ties == {"lm_head.weight": "model.embed_tokens.weight"}


@pytest.mark.parametrize("ranks", [1, 3])
@pytest.mark.parametrize("name", RUNS)
def test_written_at_another_size_it_is_the_same(fixtures: Path, tmp_path: Path, name: str, ranks: int) -> None:
    api.plan(api.open(fixtures / name), "fsdp-ranks", Layout(world_size=ranks)).run(tmp_path / "out")
    written = api.open(tmp_path / "out")
    assert Path(written.path) == tmp_path / "out" / ACTOR
    assert (written.world_size, written.state.step) == (ranks, 3)
    assert_is_truth(written, fixtures / name)
    assert written.state.lr_scheduler == api.open(fixtures / name).state.lr_scheduler
    assert len(written.facts_of(TorchFacts).flat_parameters) == (3 if name == "verl-fsdp1" else 0)
    config = json.loads((tmp_path / "out" / ACTOR / "fsdp_config.json").read_text())
    assert config == {"FSDP_version": int(name[-1]), "world_size": ranks}
    assert (tmp_path / "out" / ACTOR / "huggingface/config.json").is_file()


def test_at_the_same_size_random_states_stay(fixtures: Path, tmp_path: Path) -> None:
    source = api.open(fixtures / "verl-fsdp2")
    conversion = api.plan(source, "fsdp-ranks")
    assert not conversion.plan.target.not_written
    conversion.run(tmp_path / "out")
    for rank in range(2):
        name = f"{ACTOR}/extra_state_world_size_2_rank_{rank}.pt"
        ours, theirs = (torch.load(place / name) for place in (tmp_path / "out", fixtures / "verl-fsdp2"))
        assert raw(ours["rng"]["cpu"]) == raw(theirs["rng"]["cpu"]) and ours["lr_scheduler"] == theirs["lr_scheduler"]
    other = api.plan(source, "fsdp-ranks", Layout(world_size=3)).plan.target
    assert any("random states of 2 ranks" in line for line in other.not_written)


@pytest.mark.slow
def test_verl_loads_what_is_written_at_another_size(fixtures: Path, tmp_path: Path) -> None:
    """Live FSDP1 and FSDP2 on 3 ranks load runs from 2 ranks and from another format."""
    kinds = {"flat": "verl-fsdp1", "fsdp2": "verl-fsdp2"}
    for kind, name in kinds.items():
        api.plan(api.open(fixtures / name), "fsdp-ranks", Layout(world_size=3)).run(tmp_path / name)
        shutil.copytree(tmp_path / name / ACTOR, tmp_path / "load" / kind)
    api.plan(api.open(fixtures / "verl-fsdp1"), "full").run(tmp_path / "full")
    layout = Layout(world_size=3, mesh_device="cpu")
    api.plan(api.open(tmp_path / "full"), "fsdp-ranks", layout).run(tmp_path / "from-full")
    shutil.copytree(tmp_path / "from-full" / ACTOR, tmp_path / "load" / "unfrozen")
    run_ranks("verl", 3, tmp_path / "load")
    for kind, name in {**kinds, "unfrozen": "verl-fsdp1"}.items():
        gathered = torch.load(tmp_path / "load" / kind / "gathered.pt")
        weights, optimizer = truth(fixtures / name)
        assert {fqn: raw(t) for fqn, t in gathered["model"].items()} == {fqn: raw(t) for fqn, t in weights.items()}
        for fqn, values in optimizer["state"].items():
            found = gathered["optimizer"]["state"][fqn]
            assert {k: raw(v) for k, v in found.items()} == {k: raw(v) for k, v in values.items()}, (kind, fqn)
        assert gathered["optimizer"]["param_groups"][0]["lr"] == optimizer["param_groups"][0]["lr"]


def test_what_fsdp1_is_not_known_of_is_not_written_for_it(fixtures: Path) -> None:
    checkpoint = api.open(fixtures / "dcp-fsdp2")
    with pytest.raises(UsageError, match="does not record FSDP1's flat parameters"):
        api.plan(checkpoint, "fsdp-ranks", Layout(fsdp_version=1))
    target = api.plan(checkpoint, "fsdp-ranks", Layout(world_size=2)).plan.target
    assert any("torch 2.13" in note for note in target.notes)
    two = api.plan(api.open(fixtures / "verl-fsdp1"), "fsdp-ranks", Layout(fsdp_version=2)).plan.target
    assert any("FSDP2 on 2 ranks" in note for note in two.notes)


def test_parameters_of_one_flat_one_have_taken_the_same_steps(fixtures: Path) -> None:
    checkpoint = api.open(fixtures / "verl-fsdp1")
    checkpoint.state.scalars["step"]["scale"] = 4.0  # type: ignore[index]
    with pytest.raises(LossError, match="different numbers of steps"):
        api.plan(checkpoint, "fsdp-ranks")


def test_steps_of_different_ranks_are_refused(fixtures: Path, tmp_path: Path) -> None:
    run = Path(shutil.copytree(fixtures / "verl-fsdp1", tmp_path / "run"))
    path = run / ACTOR / "optim_world_size_2_rank_1.pt"
    with rewriting(path) as state:
        state["state"][1]["step"] += 1
    with pytest.raises(CorruptError, match="different steps"):
        api.open(run)


def test_flat_parameters_are_those_of_the_only_choice_that_fits() -> None:
    shapes = {"embed": (7, 3), "layers.0.a": (2, 3), "layers.0.b": (5,), "layers.1.a": (2, 3), "layers.1.b": (5,)}
    layers = (("embed",), ("layers.0.a", "layers.0.b"), ("layers.1.a", "layers.1.b"))
    assert find_units(shapes, [11, 6, 6], 2) == layers
    assert find_units(shapes, [22], 2) == (tuple(shapes),)
    assert find_units(shapes, [11, 6, 5], 2) is None
    both = {"a.0.x": (4,), "b.0.x": (4,)}  # either list may be the wrapped one
    assert find_units(both, [2, 2], 2) is None
    pieces = [list(slice_pieces(layers[1], shapes, 3, rank)) for rank in range(3)]
    assert slice_length(layers[1], shapes, 3) == 4
    assert [(p.fqn, p.start, p.stop, p.at) for p in pieces[1]] == [("layers.0.a", 4, 6, 0), ("layers.0.b", 0, 2, 2)]
    assert [(p.start, p.stop) for p in pieces[2]] == [(2, 5)]


def test_a_mesh_of_an_unknown_form_is_refused(fixtures: Path) -> None:
    like = api.open(fixtures / "verl-fsdp2").facts_of(TorchFacts).dtensor
    spec = like.attributes["_spec"]
    assert DTensors(like, None, 3, 1)
    strange = Record(like.module, like.name, like.args, state={"_spec": spec})
    spec.attributes["mesh"].state["_seen_on"] = "mars"
    with pytest.raises(LossError, match="unknown form") as caught:
        DTensors(strange, None, 3, 1)
    assert "_seen_on" in str(caught.value.found)
