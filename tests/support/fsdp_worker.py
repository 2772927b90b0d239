"""One rank that trains a small model under torch's FSDP and saves it, with the arguments KIND and FOLDER.

KIND is fsdp2, unfrozen, hsdp, tp, fsdp1, fsdp1_untied, local or flat (verl's layout); load-KIND loads FOLDER with
Accelerate, `verl` with verl's calls. FOLDER/ranks gets one file per rank, FOLDER/full the truth. Imports nothing of
ours.
"""

from __future__ import annotations

import copy
import json
import sys
import warnings
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, get_optimizer_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import (
    FullOptimStateDictConfig,
    FullStateDictConfig,
    FullyShardedDataParallel,
    LocalStateDictConfig,
    ShardedOptimStateDictConfig,
    ShardedStateDictConfig,
    StateDictType,
    fully_shard,
)
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

FULL = StateDictOptions(full_state_dict=True)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(6, 10)
        self.down = nn.Linear(10, 6, bias=False)
        self.norm = nn.LayerNorm(6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.norm(x + self.down(torch.tanh(self.up(x))))
        return y


class Model(nn.Module):
    """Model with odd shapes, a one-element and a frozen parameter, and tied embeddings with standard names."""

    def __init__(self, tied: bool = True) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.full((1,), 0.5))
        self.model = nn.Module()
        self.model.embed_tokens = nn.Embedding(13, 6)
        self.model.layers = nn.ModuleList([Block(), Block()])
        self.lm_head = nn.Linear(6, 13, bias=False)
        self.model.layers[0].norm.bias.requires_grad_(False)
        if tied:
            self.lm_head.weight = self.model.embed_tokens.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.model.embed_tokens(ids)
        for block in self.model.layers:
            x = block(x)
        y: torch.Tensor = self.lm_head(x * self.scale)
        return y


def build(kind: str) -> tuple[nn.Module, torch.optim.Optimizer]:
    """Return the model, sharded for `kind`, and its optimizer."""
    torch.manual_seed(0)
    model: Any = Model(tied="untied" not in kind)
    world_size = dist.get_world_size()
    if kind in ("flat", "unfrozen"):
        model.requires_grad_(True)  # FSDP1 can't mix frozen and trained parts in one flat parameter
    if kind == "flat":
        mesh = init_device_mesh("cpu", (world_size,), mesh_dim_names=("fsdp",))
        on = {"device_mesh": mesh, "device_id": torch.device("cpu")}
        model = FullyShardedDataParallel(model, auto_wrap_policy=ModuleWrapPolicy({Block}), **on)
    elif kind in ("fsdp1", "fsdp1_untied", "local"):
        model = FullyShardedDataParallel(model, use_orig_params=True, device_id=torch.device("cpu"))
    else:
        mesh = None
        if kind in ("fsdp2", "unfrozen"):
            mesh = init_device_mesh("cpu", (world_size,), mesh_dim_names=("fsdp",))
        if kind == "hsdp":
            mesh = init_device_mesh("cpu", (2, world_size // 2), mesh_dim_names=("ddp", "fsdp"))
        if kind == "tp":
            grid = init_device_mesh("cpu", (world_size // 2, 2), mesh_dim_names=("fsdp", "tp"))
            mesh = grid["fsdp"]
            for block in model.model.layers:
                parallelize_module(block, grid["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
        for block in model.model.layers:
            fully_shard(block, mesh=mesh)
        fully_shard(model, mesh=mesh)
    return model, torch.optim.AdamW(model.parameters(), lr=0.05)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int) -> None:
    for step in range(steps):
        ids = (torch.arange(8) * (step + 3)) % 13
        model(ids).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def version(model: nn.Module) -> int:
    return 1 if isinstance(model, FullyShardedDataParallel) else 2


def sharded(model: nn.Module) -> Any:
    """Return verl's context for saving and loading."""
    if version(model) == 2:
        return nullcontext()
    configs = ShardedStateDictConfig(), ShardedOptimStateDictConfig()
    return FullyShardedDataParallel.state_dict_type(model, StateDictType.SHARDED_STATE_DICT, *configs)


def save(kind: str, model: nn.Module, optimizer: torch.optim.Optimizer, folder: Path) -> None:
    rank, world_size = dist.get_rank(), dist.get_world_size()
    ranks, full = folder / "ranks", folder / "full"
    for one in (ranks, full):
        one.mkdir(parents=True, exist_ok=True)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 3)
    if kind == "local":
        with FullyShardedDataParallel.state_dict_type(model, StateDictType.LOCAL_STATE_DICT, LocalStateDictConfig()):
            torch.save(model.state_dict(), ranks / f"pytorch_model_fsdp_rank{rank}.bin")
        return
    with sharded(model):
        state, optimizer_state = model.state_dict(), optimizer.state_dict()
    suffix = f"world_size_{world_size}_rank_{rank}.pt"
    torch.save(state, ranks / f"model_{suffix}")
    torch.save(optimizer_state, ranks / f"optim_{suffix}")
    extra = {"lr_scheduler": scheduler.state_dict(), "rng": {"cpu": torch.get_rng_state()}}
    torch.save(extra, ranks / f"extra_state_{suffix}")
    gathered = get_model_state_dict(model, options=FULL)
    named = get_optimizer_state_dict(model, optimizer, options=FULL)
    if rank == 0:
        (ranks / "fsdp_config.json").write_text(json.dumps({"FSDP_version": version(model), "world_size": world_size}))
        torch.save(gathered, full / "pytorch_model_fsdp.bin")
        torch.save(named, full / "optimizer.bin")
        torch.save(scheduler.state_dict(), full / "scheduler.pt")


def accelerate_plugin(version: int) -> Any:
    """Return the plugin attributes used by Accelerate's functions under FULL_STATE_DICT."""
    return SimpleNamespace(
        fsdp_version=version,
        state_dict_type=StateDictType.FULL_STATE_DICT,
        state_dict_config=FullStateDictConfig(offload_to_cpu=True, rank0_only=True),
        optim_state_dict_config=FullOptimStateDictConfig(offload_to_cpu=True, rank0_only=True),
        sync_module_states=True,
    )


def load(model: Any, optimizer: torch.optim.Optimizer, folder: Path) -> tuple[Any, Any]:
    """Load with Accelerate's own functions and return the gathered state."""
    from accelerate.state import PartialState
    from accelerate.utils.fsdp_utils import load_fsdp_model, load_fsdp_optimizer

    PartialState(cpu=True)  # for its logger
    torch.optim.lr_scheduler.StepLR(optimizer, 3)  # adds `initial_lr`, required by torch if the saved state has it
    accelerator = SimpleNamespace(
        process_index=dist.get_rank(),
        num_processes=dist.get_world_size(),
        is_main_process=dist.get_rank() == 0,
        is_fsdp2=version(model) == 2,
        wait_for_everyone=dist.barrier,
    )
    load_fsdp_model(accelerate_plugin(version(model)), accelerator, model, folder)
    load_fsdp_optimizer(accelerate_plugin(version(model)), accelerator, optimizer, model, folder)
    return get_model_state_dict(model, options=FULL), get_optimizer_state_dict(model, optimizer, options=FULL)


def load_as_verl(model: nn.Module, optimizer: torch.optim.Optimizer, folder: Path) -> tuple[Any, Any, Any]:
    """Load with the calls of verl's checkpoint manager (0.9.1); return the gathered state and the scheduler's state."""
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 3)
    name = f"world_size_{dist.get_world_size()}_rank_{dist.get_rank()}.pt"
    with sharded(model):
        model.load_state_dict(torch.load(folder / f"model_{name}", weights_only=False), strict=True)
        optimizer.load_state_dict(torch.load(folder / f"optim_{name}", weights_only=False))
    scheduler.load_state_dict(torch.load(folder / f"extra_state_{name}", weights_only=False)["lr_scheduler"])
    gathered = get_model_state_dict(model, options=FULL), get_optimizer_state_dict(model, optimizer, options=FULL)
    kept = copy.deepcopy(gathered)
    train(model, optimizer, 1)  # the optimizer goes on
    return *kept, scheduler.state_dict()


def main() -> None:
    warnings.filterwarnings("ignore")
    kind, folder = sys.argv[1:]
    dist.init_process_group("gloo")
    if kind == "verl":  # FOLDER has a folder for each kind
        for one in sorted(Path(folder).iterdir()):
            weights, states, schedule = load_as_verl(*build(one.name), one)
            if dist.get_rank() == 0:
                torch.save({"model": weights, "optimizer": states, "scheduler": schedule}, one / "gathered.pt")
        dist.barrier()
        dist.destroy_process_group()
        return
    model, optimizer = build(kind.removeprefix("load-"))
    if kind.startswith("load-"):
        weights, states = load(model, optimizer, Path(folder))
        if dist.get_rank() == 0:
            torch.save({"model": weights, "optimizer": states}, Path(folder) / "gathered.pt")
    else:
        train(model, optimizer, 3)
        save(kind, model, optimizer, Path(folder))
    dist.barrier()
    dist.destroy_process_group()
