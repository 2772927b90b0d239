"""`converters/optimizers/shapes.py`: states with another shape than their parameter, damaged or legitimate."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.commands import ckpt
from tests.support.dcp_folders import save
from tests.support.model_files import rewriting

States = dict[int, dict[str, Any]]


def one_short(states: States) -> None:
    states[0]["exp_avg"] = states[0]["exp_avg"].flatten()[:-1].clone()


def all_of_one_short(states: States) -> None:
    """Damage every state of a parameter, so that none has the right shape."""
    for name in ("exp_avg", "exp_avg_sq"):
        states[1][name] = states[1][name].flatten()[:-1].clone()


def one_long(states: States) -> None:
    states[2]["exp_avg_sq"] = torch.cat([states[2]["exp_avg_sq"].flatten(), torch.ones(1)])


def flat(states: States) -> None:
    states[0]["exp_avg"] = states[0]["exp_avg"].flatten()


def all_empty(states: States) -> None:
    for own in states.values():
        own |= {"exp_avg": torch.zeros(0), "exp_avg_sq": torch.zeros(0)}


def some_empty(states: States) -> None:
    for own in list(states.values())[::2]:
        own |= {"exp_avg": torch.zeros(0), "exp_avg_sq": torch.zeros(0)}


def trainer(fixtures: Path, run: Path, damage: Callable[[States], None]) -> Path:
    shutil.copytree(fixtures / "trainer-plain", run)
    path = run / "checkpoint-2" / "optimizer.pt"
    with rewriting(path) as saved:
        damage(saved["state"])
    return run


@pytest.mark.parametrize("damage", [one_short, all_of_one_short, one_long, flat, all_empty, some_empty])
def test_a_numbered_state_of_another_shape_is_damage(
    damage: Callable[[States], None], fixtures: Path, tmp_path: Path
) -> None:
    run = trainer(fixtures, tmp_path / "run", damage)
    checked = ckpt("check", run)
    assert checked.code == 4 and "does not have its parameter's shape" in checked.out, checked.out
    assert "tensor model." in checked.out or "tensor lm_head" in checked.out, checked.out
    for command in (("resume", run), ("convert", "auto", "full", run, "-o", tmp_path / "out")):
        assert ckpt(*command).code == 4, command
    assert not (tmp_path / "out").exists()


def test_a_model_can_still_be_taken_alone(fixtures: Path, tmp_path: Path) -> None:
    run = trainer(fixtures, tmp_path / "run", all_empty)
    assert ckpt("convert", "hf", "hf", run / "checkpoint-2", "-o", tmp_path / "out").code == 0


def full(content: dict[str, Any], folder: Path) -> Path:
    folder.mkdir()
    torch.save(content, folder / "model.pt")
    return folder / "model.pt"


def training(kind: str, **options: Any) -> dict[str, Any]:
    model = torch.nn.Linear(6, 4)
    optimizer = getattr(torch.optim, kind)(model.named_parameters(), **options)
    for _ in range(2):
        model(torch.ones(1, 6)).sum().backward()
        optimizer.step()
    named = {"weight": 0, "bias": 1}
    saved = optimizer.state_dict()
    states = {name: saved["state"][number] for name, number in named.items() if number in saved["state"]}
    groups = [{**saved["param_groups"][0], "params": list(named)}]
    return {"model": model.state_dict(), "optimizer": {"state": states, "param_groups": groups}, "step": 2}


EITHER = pytest.mark.parametrize("write", [full, save])


@EITHER
@pytest.mark.parametrize("shape", [(23,), (24,), (6, 4), (0,)])
def test_a_named_state_of_another_shape_is_damage(
    shape: tuple[int, ...], write: Callable[[dict[str, Any], Path], Path], tmp_path: Path
) -> None:
    content = training("AdamW")
    assert ckpt("check", write(content, tmp_path / "healthy")).code == 0
    content["optimizer"]["state"]["weight"]["exp_avg_sq"] = torch.zeros(shape)
    checked = ckpt("check", write(content, tmp_path / "damaged"))
    assert checked.code == 4 and "exp_avg_sq does not have its parameter's shape" in checked.out, checked.out


@EITHER
@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("AdamW", {"amsgrad": True}),
        ("SGD", {"lr": 0.1, "momentum": 0.9}),
        ("Adafactor", {}),
        ("Adagrad", {}),
        ("Adamax", {}),
        ("RMSprop", {"centered": True, "momentum": 0.9}),
        ("Rprop", {}),
        ("ASGD", {}),
        ("Adadelta", {}),
        ("NAdam", {}),
    ],
)
def test_states_of_torchs_own_optimizers_are_whole(
    kind: str, options: dict[str, Any], write: Callable[[dict[str, Any], Path], Path], tmp_path: Path
) -> None:
    checked = ckpt("check", write(training(kind, **options), tmp_path / "save"))
    assert checked.code == 0, checked.out


@EITHER
@pytest.mark.parametrize(
    "states",
    [
        {"exp_avg": torch.zeros(4, 6), "exp_avg_sq": torch.ones(())},
        {"m": torch.zeros(2, 12), "vmean": torch.ones(2, 1)},
        {"exp_avg": torch.zeros(4, 6), "exp_avg_sq_row": torch.ones(4), "exp_avg_sq_col": torch.ones(6)},
        {"exp_avg": torch.zeros(12, dtype=torch.uint8), "exp_avg_scale": torch.ones(1)},
    ],
    ids=["NovoGrad", "Adam-mini", "Adafactor", "packed codes"],
)
def test_states_of_other_kinds_are_no_damage(
    states: dict[str, Any], write: Callable[[dict[str, Any], Path], Path], tmp_path: Path
) -> None:
    content = training("AdamW")
    content["optimizer"]["state"]["weight"] = {"step": torch.tensor(2.0), **states}
    checked = ckpt("check", write(content, tmp_path / "save"))
    assert "its parameter's shape" not in checked.out and checked.code == 0, checked.out


def test_a_parameter_that_is_trained_in_a_projection_is_no_damage(tmp_path: Path) -> None:
    """GaLore stores moments of the projected gradient next to the projection."""
    content = training("AdamW")
    own = {"exp_avg": torch.zeros(2, 6), "exp_avg_sq": torch.zeros(2, 6), "projector": {"ortho": torch.ones(4, 2)}}
    content["optimizer"]["state"]["weight"] = {"step": torch.tensor(2.0), **own}
    checked = ckpt("check", full(content, tmp_path / "save"))
    assert "its parameter's shape" not in checked.out and checked.code == 0, checked.out


Made = Callable[[torch.nn.Parameter], dict[str, torch.Tensor]]


def unknown(made: Made, **own: Made) -> dict[str, Any]:
    """Return a save with states of unknown names: `made` for each parameter, or the one in `own` for its name.

    For example `at0_weight` is for `0.weight`.
    """
    layers = [torch.nn.Linear(6, 4), torch.nn.Linear(4, 6), torch.nn.Linear(6, 6), torch.nn.Linear(6, 3)]
    model = torch.nn.Sequential(*layers)
    states = {
        name: {"step": torch.tensor(2.0), **own.get("at" + name.replace(".", "_"), made)(parameter)}
        for name, parameter in model.named_parameters()
    }
    first = ["0.weight"] if own else []  # in a group of its own, like GaLore's
    groups = [
        {"lr": 0.1, "params": names} for names in (first, [name for name in states if name not in first]) if names
    ]
    return {"model": model.state_dict(), "optimizer": {"state": states, "param_groups": groups}, "step": 2}


def moments(parameter: torch.nn.Parameter) -> dict[str, torch.Tensor]:
    return {"m": torch.zeros_like(parameter), "v": torch.ones_like(parameter)}


def sums(parameter: torch.nn.Parameter) -> dict[str, torch.Tensor]:
    """Make SM3's states: a sum per dimension, in the parameter's shape for a bias."""
    shapes = [[n if axis == kept else 1 for axis, n in enumerate(parameter.shape)] for kept in range(parameter.ndim)]
    return {f"accumulator_{axis}": torch.zeros(shape) for axis, shape in enumerate(shapes)}


def preconditioners(parameter: torch.nn.Parameter) -> dict[str, torch.Tensor]:
    """Make Shampoo's states: a square matrix per dimension, in the parameter's shape for a square parameter."""
    return {f"precond_{axis}": torch.eye(size) for axis, size in enumerate(parameter.shape)}


def heads(parameter: torch.nn.Parameter) -> dict[str, torch.Tensor]:
    """Make Adam-mini's states of a query, with a head per row."""
    return {"m": torch.zeros(2, parameter.numel() // 2), "vmean": torch.ones(2, 1), "head": torch.tensor(2)}


def low_rank(parameter: torch.nn.Parameter) -> dict[str, torch.Tensor]:
    return {"m": torch.zeros(2, 6), "v": torch.ones(2, 6), "ortho": torch.ones(4, 2)}


def zero(parameter: torch.nn.Parameter) -> dict[str, torch.Tensor]:
    """Make Prodigy's state of a parameter that starts at zero."""
    return {**moments(parameter), "v": torch.tensor(0.0)}


@EITHER
@pytest.mark.parametrize("shape", [(5, 6), (4, 5), (6, 4), (24,), (23,)])
def test_a_state_of_an_unknown_name_is_compared_with_its_parameter(
    shape: tuple[int, ...], write: Callable[[dict[str, Any], Path], Path], tmp_path: Path
) -> None:
    def odd(parameter: torch.nn.Parameter) -> dict[str, torch.Tensor]:
        return {**moments(parameter), "m": torch.zeros(shape)}

    checked = ckpt("check", write(unknown(moments, at0_weight=odd), tmp_path / "damaged"))
    assert checked.code == 4 and "tensor 0.weight" in checked.out, checked.out
    assert "m does not have its parameter's shape" in checked.out, checked.out


@EITHER
@pytest.mark.parametrize(
    ("made", "odd"),
    [(moments, None), (sums, None), (preconditioners, None)] + [(moments, odd) for odd in (heads, low_rank, zero)],
    ids=["whole", "SM3", "Shampoo", "Adam-mini", "low rank", "Prodigy"],
)
def test_factored_states_of_unknown_names_are_no_damage(
    made: Made, odd: Made | None, write: Callable[[dict[str, Any], Path], Path], tmp_path: Path
) -> None:
    checked = ckpt("check", write(unknown(made, **({"at0_weight": odd} if odd else {})), tmp_path / "save"))
    assert checked.code == 0 and "its parameter's shape" not in checked.out, checked.out


def test_a_numbered_state_of_an_unknown_name_is_compared(fixtures: Path, tmp_path: Path) -> None:
    def renamed(states: States) -> None:
        for own in states.values():
            own |= {"m": own.pop("exp_avg"), "v": own.pop("exp_avg_sq")}

    def odd(states: States) -> None:
        renamed(states)
        states[1]["m"] = states[1]["m"].flatten()[:-1].clone()

    assert ckpt("check", trainer(fixtures, tmp_path / "healthy", renamed)).code == 0
    checked = ckpt("check", trainer(fixtures, tmp_path / "damaged", odd))
    assert checked.code == 4 and "m does not have its parameter's shape" in checked.out, checked.out
