"""`ckpt/state/positions.py`: the position that DeepSpeed's files record for any LR schedule."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from typing import Any

import pytest
import torch
from torch.optim import lr_scheduler

from ckpt.state.positions import deepspeed_schedule

SCHEDULES: dict[str, Callable[[Any], Any]] = {
    "LambdaLR": lambda optimizer: lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step)),
    "MultiplicativeLR": lambda optimizer: lr_scheduler.MultiplicativeLR(optimizer, lambda step: 0.9),
    "CosineAnnealingLR": lambda optimizer: lr_scheduler.CosineAnnealingLR(optimizer, 10),
    "StepLR": lambda optimizer: lr_scheduler.StepLR(optimizer, 2),
}


def trained(name: str, steps: int) -> tuple[Any, Any]:
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=0.1)
    schedule = SCHEDULES[name](optimizer)
    for _ in range(steps):
        optimizer.step()
        schedule.step()
    return optimizer, schedule


@pytest.mark.parametrize("name", SCHEDULES)
def test_torchs_schedules_continue(name: str) -> None:
    """A new schedule with the recorded position gives the unbroken schedule's next learning rates."""
    optimizer, unbroken = trained(name, 3)
    groups = deepcopy(optimizer.state_dict())
    loaded, schedule = trained(name, 0)
    loaded.load_state_dict(groups)
    schedule.load_state_dict(deepspeed_schedule(3))
    for _ in range(3):
        for one, other in ((optimizer, unbroken), (loaded, schedule)):
            one.step()
            other.step()
        assert schedule.get_last_lr() == unbroken.get_last_lr()
