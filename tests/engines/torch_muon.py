"""Muon from torch under DDP and FSDP2: `python -m tests.engines.torch_muon save|load FOLDER` on each rank.

FOLDER/NAME-{save,load}.pt gets each rank's state.
"""

from __future__ import annotations

import sys
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from train import launch

WRAPPERS = ("ddp", "fsdp2")
SIZES = (8, 12, 7, 5)


def main() -> None:
    what, folder = sys.argv[1], Path(sys.argv[2])
    launch.start()
    for name in WRAPPERS:
        model, optimizer = _engine(name if what == "save" else "fsdp2")
        if what == "save":
            _train(model, optimizer)
            states, options = get_state_dict(model, optimizer)
            dcp.save({"model": states, "optimizer": options}, checkpoint_id=folder / name)
        else:
            states, options = get_state_dict(model, optimizer)
            state = {"model": states, "optimizer": options}
            dcp.load(state, checkpoint_id=folder / f"{name}-converted")
            set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
        held = _held(model, optimizer)
        if dist.get_rank() == 0:
            torch.save(held, folder / f"{name}-{what}.pt")
        dist.barrier()
    launch.stop()


def _engine(name: str) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model: nn.Module = nn.Sequential(*(nn.Linear(a, b, bias=False) for a, b in pairwise(SIZES)))
    if name == "fsdp2":
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        for layer in model.children():
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
    else:
        model = nn.parallel.DistributedDataParallel(model)
    return model, torch.optim.Muon(model.parameters(), lr=0.02, momentum=0.9)


def _train(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    for step in range(2):
        drawn = torch.Generator().manual_seed(10 * step + dist.get_rank())
        model(torch.randn(4, SIZES[0], generator=drawn)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def _held(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Return weights and momentums by name, and the param group's options."""
    held: dict[str, Any] = {}
    for name, parameter in model.named_parameters():
        state = optimizer.state[parameter]
        for role, tensor in {"weight": parameter.detach(), **state}.items():
            whole = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
            held[f"{role}/{name.removeprefix('module.')}"] = whole.clone()
    (group,) = optimizer.param_groups
    return held | {"group": {option: value for option, value in group.items() if option != "params"}}


if __name__ == "__main__":
    main()
