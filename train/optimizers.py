"""Parameter groups, optimizers and schedules, shared by every strategy."""

import math
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn

from train.config import WARMUP, Config


def param_groups(model: nn.Module, config: Config) -> list[dict[str, Any]]:
    """Return two groups: vectors and scalars don't decay and learn slower.

    Without weight decay there is one group, like in `AdamW(model.parameters())`.
    """
    trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
    if not config.weight_decay:
        return [{"params": trainable, "lr": config.lr, "weight_decay": 0.0}]
    matrices = [parameter for parameter in trainable if parameter.ndim >= 2]
    vectors = [parameter for parameter in trainable if parameter.ndim < 2]
    groups: list[dict[str, Any]] = [
        {"params": matrices, "lr": config.lr, "weight_decay": config.weight_decay},
        {"params": vectors, "lr": config.lr / 2, "weight_decay": 0.0},
    ]
    return [group for group in groups if group["params"]]


def build_optimizer(groups: list[dict[str, Any]], config: Config, foreach: bool | None = None) -> torch.optim.Optimizer:
    """Return the optimizer. State tensors per parameter: adamw two and a step, momentum one, lion one, sgd none."""
    if config.optimizer == "adamw":
        return torch.optim.AdamW(groups, lr=config.lr, foreach=foreach, fused=config.fused or None)
    if config.optimizer == "lion":
        return Lion(groups, lr=config.lr)
    momentum = 0.9 if config.optimizer == "momentum" else 0.0
    return torch.optim.SGD(groups, lr=config.lr, momentum=momentum, foreach=foreach)


class WarmupDecay:
    """DeepSpeed's WarmupDecayLR with the generated config: same rates, same state dict."""

    def __init__(self, optimizer: torch.optim.Optimizer, steps: int) -> None:
        self.optimizer, self.steps, self.last_batch_iteration = optimizer, steps, -1
        self.peaks = [group["lr"] for group in optimizer.param_groups]
        self._set()

    def step(self) -> None:
        self.last_batch_iteration += 1
        self._set()

    def state_dict(self) -> dict[str, Any]:
        return {"last_batch_iteration": self.last_batch_iteration}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load the position: the rates are in the optimizer's state."""
        self.last_batch_iteration = state["last_batch_iteration"]

    def _set(self) -> None:
        if self.last_batch_iteration < 0:
            gamma = 0.0
        elif self.last_batch_iteration < WARMUP:
            gamma = 1.0 / math.log(WARMUP) * math.log(self.last_batch_iteration + 1)
        else:
            gamma = max(0.0, (self.steps - self.last_batch_iteration) / max(1.0, self.steps - WARMUP))
        for group, peak in zip(self.optimizer.param_groups, self.peaks, strict=True):
            group["lr"] = peak / 10 + (peak - peak / 10) * gamma


def build_scheduler(config: Config) -> Callable[[torch.optim.Optimizer], Any]:
    return lambda optimizer: torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=config.schedule_steps)


def after(steps: int, state: dict[str, Any]) -> dict[str, Any]:
    """Advance a fresh state dict of either schedule."""
    positions = {"last_epoch": steps, "_step_count": steps + 1, "last_batch_iteration": steps - 1}
    return state | {name: value for name, value in positions.items() if name in state}


class Lion(torch.optim.Optimizer):
    """Lion (Chen et al. 2023). It steps by the sign of an interpolated momentum, so `exp_avg` is its only state."""

    def __init__(self, params: Iterable[Any], lr: float, betas: tuple[float, float] = (0.9, 0.99)) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": 0.0})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        loss = None if closure is None else closure()
        for group in self.param_groups:
            beta1, beta2 = group["betas"]
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                if not state:
                    state["exp_avg"] = torch.zeros_like(parameter)
                average = state["exp_avg"]
                update = average.lerp(parameter.grad, 1 - beta1).sign_()
                parameter.mul_(1 - group["lr"] * group["weight_decay"]).sub_(update, alpha=group["lr"])
                average.lerp_(parameter.grad, 1 - beta2)
        return loss
