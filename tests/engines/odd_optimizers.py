"""Optimizers from DeepSpeed's own suite in its engine.

Run `python -m tests.engines.odd_optimizers save|load FOLDER` on each rank.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import deepspeed
import torch
from torch import nn

from train import launch

STEPS = 3


class HybridState(torch.optim.Optimizer):
    """SGD that counts steps in an int and a tensor with shape [1], from deepspeed's tests/unit/simple_model.py."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                if not state:
                    state |= {"integer_step": 0, "tensor_step": torch.zeros(1)}
                parameter.add_(parameter.grad, alpha=-group["lr"])
                state["integer_step"] += 1
                state["tensor_step"] += 1


class GroupStep(torch.optim.Optimizer):
    """Adam that counts steps in its param groups, like DeepSpeed's FusedAdam on GPUs (ops/adam/fused_adam.py)."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr, "betas": (0.9, 0.95)})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            group["step"] = group.get("step", 0) + 1
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                if not state:
                    state |= {name: torch.zeros_like(parameter) for name in ("exp_avg", "exp_avg_sq")}
                first, second = group["betas"]
                state["exp_avg"].lerp_(parameter.grad, 1 - first)
                state["exp_avg_sq"].mul_(second).addcmul_(parameter.grad, parameter.grad, value=1 - second)
                parameter.addcdiv_(state["exp_avg"], state["exp_avg_sq"].sqrt() + 1e-8, value=-group["lr"])


@dataclass(frozen=True)
class Kind:
    """An optimizer under one ZeRO stage."""

    optimizer: type[torch.optim.Optimizer]
    stage: int
    is_elastic: bool = False


KINDS = {f"hybrid-zero{stage}": Kind(HybridState, stage) for stage in (1, 2, 3)}
KINDS["step-in-groups"] = Kind(GroupStep, 2)
KINDS["step-in-groups-elastic"] = Kind(GroupStep, 2, is_elastic=True)


def main() -> None:
    what, folder = sys.argv[1], Path(sys.argv[2])
    launch.start()
    for name, kind in KINDS.items():
        engine = _engine(kind)
        if what == "save":
            for step in range(STEPS):
                torch.manual_seed(step)
                engine.backward(engine(torch.randn(6, 7, dtype=torch.bfloat16)).float().square().mean())
                engine.step()
            engine.save_checkpoint(str(folder / name), tag="global_step3")
        else:
            path, _ = engine.load_checkpoint(str(folder / f"{name}-converted"))
            assert path is not None
        torch.save(_held(engine, kind), folder / f"{name}-{what}-{torch.distributed.get_rank()}.pt")
        engine.destroy()
    launch.stop()


def _engine(kind: Kind) -> Any:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(7, 5), nn.Linear(5, 3))
    optimizer = kind.optimizer([{"params": [*model[0].parameters()]}, {"params": [*model[1].parameters()]}])
    options = {"stage": kind.stage, "elastic_checkpoint": kind.is_elastic, "memory_efficient_linear": False}
    config = {
        "train_micro_batch_size_per_gpu": 6,
        "bf16": {"enabled": True},
        "zero_allow_untested_optimizer": True,
        "zero_optimization": options,
    }
    return deepspeed.initialize(model=model, optimizer=optimizer, config=config)[0]


def _held(engine: Any, kind: Kind) -> dict[str, Any]:
    """Return each group's step, states and masters (ZeRO-1 and 2): the rank's slice of flat buffers."""
    optimizer = engine.optimizer.optimizer
    held: dict[str, Any] = {"steps": [group.get("step") for group in optimizer.param_groups]}
    held["states"] = [dict(state) for state in optimizer.state.values()]  # by group
    if kind.stage < 3:
        held["masters"] = [buffer.detach() for buffer in engine.optimizer.single_partition_of_fp32_groups]
    return held


if __name__ == "__main__":
    main()
