"""What a resume is held against: the loss scaler and the dtypes in use, read from live objects."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from train.resume_check import differences, live


@pytest.fixture
def engine() -> Any:
    """An engine with the parts that are looked at: torch's own model, optimizer and scaler."""
    model = torch.nn.Linear(2, 3)
    adam = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 2)).sum().backward()
    adam.step()
    scaler = torch.amp.GradScaler("cpu", init_scale=256.0)
    optimizer = SimpleNamespace(param_groups=adam.param_groups, optimizer=adam, grad_scaler=scaler)
    return SimpleNamespace(model=model, optimizer=optimizer, scheduler=None)


def test_a_loss_scale_that_was_reset_is_named(engine: Any) -> None:
    before = live(engine)
    assert not list(differences(before, live(engine)))
    scaler = engine.optimizer.grad_scaler
    scaler.load_state_dict(scaler.state_dict() | {"scale": 32.0})
    assert list(differences(before, live(engine))) == [("scaler[0].scale", 256.0, 32.0)]


def test_other_dtypes_are_named(engine: Any) -> None:
    before = live(engine)
    for state in engine.optimizer.optimizer.state.values():
        state["exp_avg"] = state["exp_avg"].bfloat16()
    engine.model.bias.data = engine.model.bias.data.double()
    assert list(differences(before, live(engine))) == [
        ("dtype.parameters", ["torch.float32"], ["torch.float32", "torch.float64"]),
        ("dtype.optimizer", ["torch.float32"], ["torch.bfloat16", "torch.float32"]),
    ]
