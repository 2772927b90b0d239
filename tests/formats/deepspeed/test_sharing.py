"""`converters/deepspeed/sharing.py`: MoE layers with experts shared by ranks match the live engines."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from ckpt import api
from ckpt.errors import CorruptError, IncompleteError, NotFoundError, UsageError
from ckpt.plan.checkpoint import BUFFER, MASTER, WEIGHT, Layout
from converters.deepspeed.sharing import Sharing
from tests.support.damage import Fault, copied, edited, removed
from tests.support.describing import content
from tests.support.engines import Truth
from tests.support.stored import stored

RUNS, STEP = {"experts-zero2": "zero2", "experts-zero1": "zero1", "experts-zero0": "zero0"}, "global_step2"
MODEL = "mp_rank_00_model_states.pt"
EXPERT = "second.deepspeed_moe.experts.deepspeed_experts.{}.{}"


def truth_of(fixtures: Path, name: str) -> Truth:
    return Truth.load(fixtures / name / "truth" / f"{STEP}.safetensors")


@pytest.mark.parametrize("name", RUNS)
def test_equals_what_the_live_engine_held(fixtures: Path, name: str) -> None:
    truth, checkpoint = truth_of(fixtures, name), api.open(fixtures / name)
    assert (checkpoint.format, checkpoint.state.step) == (RUNS[name], 2)
    assert {key: content(tensor) for key, tensor in checkpoint.tensors.items()} == truth.tensors
    assert {role for _, role in truth.tensors} == {WEIGHT, MASTER, BUFFER, "exp_avg", "exp_avg_sq"}
    trained = [fqn for fqn, role in truth.tensors if role == MASTER]
    grouped = [fqn for group in checkpoint.state.param_groups for fqn in group.fqns]
    assert sorted(grouped) == sorted(trained)
    assert set(checkpoint.state.scalars["step"]) == set(trained)


@pytest.mark.parametrize("is_in_rows", [False, True])
@pytest.mark.parametrize(("num_ranks", "world_size"), [(1, 3), (2, 4), (4, 4), (4, 8)])
def test_every_expert_has_one_rank_and_every_rank_one_place(num_ranks: int, world_size: int, is_in_rows: bool) -> None:
    known = Sharing("", num_ranks, counts={EXPERT.split("{}")[0]: 8}, is_in_rows=is_in_rows)
    places = [known.place(rank, world_size) for rank in range(world_size)]
    assert places == sorted(places) or not is_in_rows
    assert all(known.holders(own, world_size)[place] == rank for rank, (own, place) in enumerate(places))
    for number in range(8):
        fqn = EXPERT.format(number, "up.weight")
        (rank,) = [rank for rank in range(num_ranks) if known.rank_shapes(rank, {fqn: (6, 5)})]
        assert rank == known.rank_of(fqn) == number * num_ranks // 8
        assert known.name_in_model(known.name_on_rank(fqn), rank) == fqn


def test_groups_of_experts_are_in_the_order_of_the_model(fixtures: Path) -> None:
    shared, *experts = api.open(fixtures / "experts-zero0").state.param_groups
    assert not shared.options.get("moe") and all(group.options["moe"] for group in experts)
    ends = ("up.weight", "down.weight", "down.bias")
    names = [fqn for group in experts for fqn in group.fqns]
    assert names[-24:] == [EXPERT.format(number, end) for number in range(8) for end in ends]


def test_groups_of_experts_are_in_another_order_on_each_rank(fixtures: Path) -> None:
    """DeepSpeed builds the groups from a set of names. Reading the fixture must not depend on their order."""
    files = (fixtures / "experts-zero2" / STEP).glob("*_optim_states.pt")
    inners = [torch.load(file, weights_only=False)["optimizer_state_dict"] for file in files]
    assert {tuple(inner["partition_count"]) for inner in inners} == {(4, 1, 2), (4, 2, 1)}


HOLDERS = {"experts-zero2": {1, 3}, "experts-zero1": {2, 3}}  # one with ep_size 4; one with ep_size 2 and one row


@pytest.mark.parametrize("name", HOLDERS)
def test_parts_are_of_the_ranks_that_have_the_expert(fixtures: Path, name: str) -> None:
    checkpoint = api.open(fixtures / name)
    fqn = EXPERT.format(2 if name == "experts-zero2" else 5, "up.weight")
    tensor = checkpoint.tensors[fqn, MASTER]
    ranks = {fragment.rank for fragment in tensor.source.fragments(tensor.shape)}
    assert ranks and ranks <= HOLDERS[name]


@pytest.mark.parametrize("name", RUNS)
@pytest.mark.parametrize("target", ["full", "dcp"])
def test_everything_goes_on_to_other_formats(fixtures: Path, tmp_path: Path, name: str, target: str) -> None:
    api.plan(api.open(fixtures / name), target, Layout(world_size=2 if target == "dcp" else None)).run(tmp_path / "out")
    written, truth = api.open(tmp_path / "out", target), truth_of(fixtures, name)
    masters = {fqn for fqn, role in truth.tensors if role == MASTER}
    for (fqn, role), expected in truth.tensors.items():
        if role != WEIGHT or fqn not in masters:  # masters replace weights there
            kind = WEIGHT if role in (MASTER, BUFFER) else role
            found = written.tensors.get((fqn, kind)) or written.tensors[fqn, BUFFER]
            assert content(found) == expected, (fqn, role)


def test_weights_go_to_the_hub_as_the_ranks_held_them(fixtures: Path, tmp_path: Path) -> None:
    api.plan(api.open(fixtures / "experts-zero2"), "hf").run(tmp_path / "out")
    truth = truth_of(fixtures, "experts-zero2").tensors
    assert stored(tmp_path / "out") == {fqn: value for (fqn, role), value in truth.items() if role in (WEIGHT, BUFFER)}


@pytest.mark.parametrize("target", ["zero3", "universal"])
def test_what_deepspeed_loads_is_not_written(fixtures: Path, target: str) -> None:
    """The engine loads experts from separate files."""
    with pytest.raises(UsageError, match="from separate files") as caught:
        api.plan(api.open(fixtures / "experts-zero2"), target)
    assert "dcp" in str(caught.value.hint)


def exchange(step: Path) -> None:
    a, b = (step / f"layer_1_expert_{number}_mp_rank_00_model_states.pt" for number in (2, 3))
    data = a.read_bytes()
    a.write_bytes(b.read_bytes())
    b.write_bytes(data)


def another_layer(content: dict[str, Any]) -> None:
    for name in list(content):
        content[name.replace("second", "first")] = content.pop(name)


FILE, OPTIMIZER = "layer_1_expert_3_mp_rank_00_model_states.pt", "expp_rank_{}_mp_rank_00_optim_states.pt"
COUNTS = {"partition_count": [4, 4, 1]}
OTHER = EXPERT.format(4, "up.weight")
FAULTS = {
    "experts-zero2": {
        "an expert gone": Fault(removed(FILE), IncompleteError, "expert files are missing"),
        "one too many": Fault(copied(FILE, FILE.replace("3", "8")), CorruptError, "no expert in the model"),
        "files exchanged": Fault(exchange, CorruptError, "saved under another name"),
        "more experts": Fault(
            edited(MODEL, lambda s: s.update(num_experts=[4, 9])), IncompleteError, "expert files are missing"
        ),
        "fewer ranks share a group": Fault(
            edited("bf16_zero_pp_*", lambda s: s["optimizer_state_dict"].update(COUNTS)),
            CorruptError,
            "does not match the rank part's size",
        ),
        "AutoEP": Fault(edited(MODEL, lambda s: s.update(ds_autoep_layers=[{}])), NotFoundError, "(AutoEP)"),
        "tensor parallel ranks": Fault(copied(MODEL, MODEL.replace("00", "01")), NotFoundError, "tensor parallelism"),
        "tensor parallel experts": Fault(copied(FILE, FILE.replace("_00_", "_01_")), NotFoundError, "DeepSpeed-MoE"),
    },
    "experts-zero0": {
        "another's parameters": Fault(
            edited(FILE, lambda s: s.update({OTHER: s.pop(next(iter(s)))})), CorruptError, "from outside the expert"
        ),
        "another layer's": Fault(edited(FILE, another_layer), CorruptError, "the parameters in its layer"),
        "an optimizer gone": Fault(removed(OPTIMIZER.format(1)), IncompleteError, "expert parallel ranks are missing"),
    },
}


@pytest.mark.parametrize(("name", "fault"), [(name, fault) for name, faults in FAULTS.items() for fault in faults])
def test_faults_are_refused(fixtures: Path, tmp_path: Path, name: str, fault: str) -> None:
    run = Path(shutil.copytree(fixtures / name, tmp_path / name))
    FAULTS[name][fault].check(run / STEP, lambda: api.open(run))


def test_several_ep_sizes_without_zero_leave_the_optimizer_out(fixtures: Path, tmp_path: Path) -> None:
    """With several ep_sizes and no ZeRO, files don't record which ranks share an expert's states."""
    run = Path(shutil.copytree(fixtures / "experts-zero0", tmp_path / "run"))

    def other(found: dict[str, Any]) -> None:
        base = found["optimizer"].get("optimizer_state_dict", found["optimizer"])
        base["param_groups"][-1]["name"] = "ep_size_1"

    edited(MODEL, other)(run / STEP)
    edited("expp_rank_*", other)(run / STEP)
    checkpoint = api.open(run)
    assert {role for _, role in checkpoint.tensors} == {WEIGHT, BUFFER}
    assert any("left out the optimizer states and masters" in note for note in checkpoint.notes)


def test_a_universal_checkpoint_of_experts_is_refused(fixtures: Path, tmp_path: Path) -> None:
    api.plan(api.open(fixtures / "toy-zero2"), "universal").run(tmp_path / "out")
    edited(f"*/{MODEL}", lambda s: s.update(num_experts=[2]))(tmp_path / "out")
    with pytest.raises(NotFoundError, match="universal checkpoints with experts"):
        api.open(tmp_path / "out")
