"""`converters/optimizers/states.py`, `state_dicts.py`: torch's optimizers other than Adam."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import ckpt
from ckpt import api
from ckpt.errors import CorruptError
from ckpt.plan.checkpoint import Checkpoint, Layout, OneElement
from ckpt.views.lazy import LazyTensor
from tests.support.engines import raw
from tests.support.model_files import rewriting

OPTIMIZERS: dict[str, Callable[[list[nn.Parameter]], torch.optim.Optimizer]] = {
    "adafactor": lambda parameters: torch.optim.Adafactor(parameters),
    "adagrad": lambda parameters: torch.optim.Adagrad(parameters),
    "muon": lambda parameters: torch.optim.Muon([p for p in parameters if p.dim() == 2]),
    "nadam": lambda parameters: torch.optim.NAdam(parameters),
    "rmsprop": lambda parameters: torch.optim.RMSprop(parameters, momentum=0.9),
    "sgd": lambda parameters: torch.optim.SGD(parameters, momentum=0.9),
}
#: States outside ZeRO's flat buffers. Their parameters have zeros for states of other parameters in the buffer.
NOT_UNDER_ZERO = {"adafactor": {"row_var", "col_var"}}

States = dict[tuple[str, str], Any]


def trained(make: Callable[[list[nn.Parameter]], torch.optim.Optimizer], path: Path) -> States:
    """Save a script's file after two steps. Return its states by parameter name."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 4), nn.LayerNorm(4))
    optimizer = make(list(model.parameters()))
    for _ in range(2):
        model(torch.rand(3, 6)).square().sum().backward()
        optimizer.step()
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, path)
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    held = {(names[id(p)], state): v for p, states in optimizer.state.items() for state, v in states.items()}
    return {key: raw(value) for key, value in held.items() if isinstance(value, torch.Tensor)}


def states(checkpoint: Checkpoint) -> States:
    found = {key: raw(LazyTensor(t, checkpoint.computed)[...]) for key, t in checkpoint.tensors.items()}
    found = {key: value for key, value in found.items() if key[1] not in ("weight", "master")}
    for state, values in checkpoint.state.scalars.items():
        for fqn, value in values.items():
            number = value.value if isinstance(value, OneElement) else value
            found[fqn, state] = raw(torch.tensor(float(number)))
    return found


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_states_are_those_that_torch_saved(name: str, tmp_path: Path) -> None:
    truth = trained(OPTIMIZERS[name], tmp_path / "model.pt")
    source = api.open(tmp_path / "model.pt")
    assert truth and states(source) == truth
    for target, ranks in (("full", None), ("dcp", 2), ("zero2", 2), ("zero3", 3)):
        conversion = api.plan(source, target, Layout(world_size=ranks))
        conversion.run(tmp_path / target)
        lost = NOT_UNDER_ZERO.get(name, set()) if target.startswith("zero") else set()
        kept = {key: value for key, value in truth.items() if key[1] not in lost}
        found = states(api.open(tmp_path / target))
        assert {key: found.get(key) for key in kept} == kept and (lost or found == kept), target
        assert all(any(state in line for line in conversion.plan.target.not_written) for state in lost)


def test_a_first_moment_of_a_single_element_is_damage(fixtures: Path, tmp_path: Path) -> None:
    """Reading it as one number for the whole parameter would silently lose the tensor."""
    run = tmp_path / "run"
    shutil.copytree(fixtures / "trainer-plain", run)
    path = max(run.rglob("optimizer.pt"))
    with rewriting(path) as saved:
        last = saved["state"][max(saved["state"])]
        last["exp_avg"] = last["exp_avg"].flatten()[:1].clone()
    with pytest.raises(CorruptError, match="exp_avg is a single number"):
        ckpt.open(run)
