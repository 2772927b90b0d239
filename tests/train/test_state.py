"""Recorded state of each rank: the loss scaler and the dtypes in use, read from live objects."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from train.operations.state import live


@pytest.fixture
def engine() -> Any:
    """Return an engine stub with torch's own model, optimizer and scaler."""
    model = torch.nn.Linear(2, 3)
    adam = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 2)).sum().backward()
    adam.step()
    scaler = torch.amp.GradScaler("cpu", init_scale=256.0)
    optimizer = SimpleNamespace(param_groups=adam.param_groups, optimizer=adam, grad_scaler=scaler)
    return SimpleNamespace(model=model, optimizer=optimizer, scheduler=None)


def test_a_loss_scale_is_in_it(engine: Any) -> None:
    before = live(engine)
    scaler = engine.optimizer.grad_scaler
    scaler.load_state_dict(scaler.state_dict() | {"scale": 32.0})
    assert (before["scaler"][0]["scale"], live(engine)["scaler"][0]["scale"]) == (256.0, 32.0)
    assert live(engine) | {"scaler": []} == before | {"scaler": []}


def test_dtypes_are_in_it(engine: Any) -> None:
    assert live(engine)["dtype"] == {"parameters": ["torch.float32"], "optimizer": ["torch.float32"]}
    for state in engine.optimizer.optimizer.state.values():
        state["exp_avg"] = state["exp_avg"].bfloat16()
    engine.model.bias.data = engine.model.bias.data.double()
    assert live(engine)["dtype"] == {
        "parameters": ["torch.float32", "torch.float64"],
        "optimizer": ["torch.bfloat16", "torch.float32"],
    }
