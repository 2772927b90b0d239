"""`converters/deepspeed/autotp.py`: a committed AutoTP run matches the engine's gathered state."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from ckpt import api
from ckpt.errors import CkptError, CorruptError, NotFoundError
from ckpt.plan.checkpoint import MASTER, WEIGHT, Layout
from tests.support.damage import Fault, edited, removed
from tests.support.describing import content
from tests.support.engines import Truth
from tests.support.stored import stored

NAME, STEP = "autotp-zero1", "global_step2"
RANK_0, RANK_1 = "mp_rank_00_model_states.pt", "mp_rank_01_model_states.pt"
#: Runs and their ranks.
RUNS = {NAME: 4, "autotp-zero2": 4, "autotp-zero3": 4, "autotp-zero0": 4, "autotp-zero0-fp32": 2}


@pytest.fixture
def run(fixtures: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(fixtures / NAME, tmp_path / NAME))


def truth_of(fixtures: Path, name: str = NAME) -> Truth:
    return Truth.load(fixtures / name / "truth" / f"{STEP}.safetensors")


@pytest.mark.parametrize("name", RUNS)
def test_equals_what_deepspeed_puts_together(fixtures: Path, name: str) -> None:
    truth, checkpoint = truth_of(fixtures, name), api.open(fixtures / name)
    assert (checkpoint.format, checkpoint.world_size, checkpoint.state.step) == (name.split("-")[1], RUNS[name], 2)
    masters = () if name.endswith("fp32") else (MASTER,)
    assert {role for _, role in truth.tensors} == {WEIGHT, *masters, "exp_avg", "exp_avg_sq"}
    kept = {key: bits for key, bits in truth.tensors.items() if key[1] != WEIGHT or checkpoint.format != "zero3"}
    assert {key: content(tensor) for key, tensor in checkpoint.tensors.items()} == kept
    groups = checkpoint.state.param_groups
    assert sorted(fqn for group in groups for fqn in group.fqns) == sorted({fqn for fqn, _ in truth.tensors})
    if name.endswith("fp32"):
        assert {g.options["weight_decay"]: all("norm" in fqn for fqn in g.fqns) for g in groups} == {
            0.01: False,
            0: True,
        }
    stored_as = MASTER if checkpoint.format == "zero3" else WEIGHT
    whole = [fqn for (fqn, role), tensor in checkpoint.tensors.items() if role == stored_as and tensor.replicas]
    assert all("norm" in fqn or "embed" in fqn for fqn in whole) and len(whole) == 6
    assert "tensor_parallel" not in (checkpoint.state.ds_config or {})
    assert any("2 tensor parallel ranks" in note for note in checkpoint.notes)


@pytest.mark.parametrize("name", [NAME, "autotp-zero0"])
@pytest.mark.parametrize("target", ["zero3", "zero1", "universal", "dcp"])
def test_everything_goes_on_to_other_formats(fixtures: Path, tmp_path: Path, name: str, target: str) -> None:
    checkpoint, truth = api.open(fixtures / name), truth_of(fixtures, name)
    api.plan(checkpoint, target, Layout(world_size=None if target == "universal" else 2)).run(tmp_path / "out")
    written = api.open(tmp_path / "out", target)
    for (fqn, role), expected in truth.tensors.items():
        if role == WEIGHT and target in ("zero3", "dcp"):
            continue  # here the masters are the weights
        key = (fqn, WEIGHT if role == MASTER and target == "dcp" else role)
        assert content(written.tensors[key]) == expected, key


@pytest.mark.parametrize("name", RUNS)
def test_weights_go_to_the_hub_as_the_engine_gathered_them(fixtures: Path, tmp_path: Path, name: str) -> None:
    api.plan(api.open(fixtures / name), "hf").run(tmp_path / "out")
    weights = {fqn: value for (fqn, role), value in truth_of(fixtures, name).tensors.items() if role == WEIGHT}
    assert stored(tmp_path / "out") == weights


def info(state: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = state["universal_checkpoint_info"]
    return found


Q = r"^model\.layers\.0\.self_attn\.q_proj\.weight$"


def params(state: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = info(state)["affine_map"]["params"]
    return found


FAULTS = {
    "no record": Fault(edited(RANK_0, lambda s: s.pop("universal_checkpoint_info")), NotFoundError, "AutoTP"),
    "another version": Fault(edited(RANK_0, lambda s: info(s)["affine_map"].update(version=2)), NotFoundError, ""),
    "a parameter without one": Fault(
        edited(RANK_0, lambda s: params(s).pop(Q)),
        NotFoundError,
        "without a record for model.layers.0.self_attn.q_proj.weight",
    ),
    "a scaled bias": Fault(
        edited(RANK_0, lambda s: params(s)[Q]["ranks"][0]["pieces"][0].update(scale=0.5)),
        NotFoundError,
        "divided by the number of ranks",
    ),
    "another shape": Fault(edited(RANK_0, lambda s: params(s)[Q].update(logical_shape=[32, 16])), CorruptError, ""),
    "another step": Fault(edited(RANK_1, lambda s: s.update(global_steps=3)), CorruptError, "different steps"),
    "a rank gone": Fault(removed(RANK_1), CkptError, "model file is missing"),
    "a partition gone": Fault(removed("*_1_mp_rank_01_optim_states.pt"), CkptError, "optim_states files are missing"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_faults_are_refused(run: Path, fault: str) -> None:
    FAULTS[fault].check(run / STEP, lambda: api.plan(api.open(run), "zero1"))


# -- without ZeRO ------------------------------------------------------------------------------------------------------
def optimizer(state: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = state["optimizer"]
    return found


def another_lr(state: dict[str, Any]) -> None:
    optimizer(state)["optimizer_state_dict"]["param_groups"][0]["lr"] = 1.0


FAULTS_WITHOUT_ZERO = {
    **{name: FAULTS[name] for name in FAULTS if "gone" not in name and name != "another step"},
    "another step": Fault(edited(RANK_1, lambda s: s.update(global_steps=3)), CorruptError, "different"),
    "rank 1 gone": Fault(removed(RANK_1), NotFoundError, "model parallel"),
    "rank 0 gone": Fault(removed(RANK_0), CkptError, ""),
    "rank 1 called rank 2": Fault(
        lambda step: (step / RANK_1).rename(step / RANK_1.replace("01", "02")), CorruptError, ""
    ),
    "another lr": Fault(edited(RANK_1, another_lr), CorruptError, "different param groups"),
    "a weight gone": Fault(edited(RANK_1, lambda s: s["module"].popitem()), CorruptError, "different tensors"),
    "the optimizer gone": Fault(edited(RANK_1, lambda s: s.pop("optimizer")), CorruptError, "different tensors"),
}


@pytest.mark.parametrize("fault", FAULTS_WITHOUT_ZERO)
def test_faults_without_zero_are_refused(fixtures: Path, tmp_path: Path, fault: str) -> None:
    run = Path(shutil.copytree(fixtures / "autotp-zero0", tmp_path / "run"))
    FAULTS_WITHOUT_ZERO[fault].check(run / STEP, lambda: api.plan(api.open(run), "zero1"))


@pytest.mark.parametrize("ranks", [(0,), (1,), (0, 1)])
def test_states_that_shapes_do_not_name_are_left_out_of_all_ranks(
    fixtures: Path, tmp_path: Path, ranks: tuple[int, ...]
) -> None:
    run = Path(shutil.copytree(fixtures / "autotp-zero0", tmp_path / "run"))
    for rank in ranks:
        edited(f"mp_rank_{rank:02d}_*", lambda s: optimizer(s)["fp32_groups"][0].reverse())(run / STEP)
    checkpoint = api.open(run)
    assert {role for _, role in checkpoint.tensors} == {WEIGHT} and not checkpoint.state.param_groups
    assert any("left out the optimizer states and masters" in note for note in checkpoint.notes)
    weights = {key: bits for key, bits in truth_of(fixtures, "autotp-zero0").tensors.items() if key[1] == WEIGHT}
    assert {key: content(tensor) for key, tensor in checkpoint.tensors.items()} == weights
