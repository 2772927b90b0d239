"""One rank that trains a small model under torch's own FSDP and saves it: the files that the tests read.

    python -m tests.support.forked '' WORLD_SIZE tests.support.fsdp_worker KIND FOLDER

KIND is fsdp2, hsdp, tp, fsdp1, fsdp1_untied or local; with load- before it, FOLDER is loaded as Accelerate does.
FOLDER/ranks has the files of all ranks as verl saves them, FOLDER/full what Accelerate saves with FULL_STATE_DICT (by
the same functions of torch), which is the truth.  Imports nothing of ours.
"""

from __future__ import annotations

import json
import sys
import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
)
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
    """Odd shapes, a parameter of one element, a frozen one, tied embeddings under the names of a language model."""

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
    """The model as `kind` shards it, and its optimizer."""
    torch.manual_seed(0)
    model: Any = Model(tied="untied" not in kind)
    world_size = dist.get_world_size()
    if kind in ("fsdp1", "fsdp1_untied", "local"):
        model = FullyShardedDataParallel(model, use_orig_params=True, device_id=torch.device("cpu"))
    else:
        mesh = None
        if kind == "fsdp2":
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
    if kind.startswith("fsdp1"):
        configs = ShardedStateDictConfig(), ShardedOptimStateDictConfig()
        with FullyShardedDataParallel.state_dict_type(model, StateDictType.SHARDED_STATE_DICT, *configs):
            state = model.state_dict()
            optimizer_state = optimizer.state_dict()
    else:
        state, optimizer_state = model.state_dict(), optimizer.state_dict()
    suffix = f"world_size_{world_size}_rank_{rank}.pt"
    torch.save(state, ranks / f"model_{suffix}")
    torch.save(optimizer_state, ranks / f"optim_{suffix}")
    extra = {"lr_scheduler": scheduler.state_dict(), "rng": {"cpu": torch.get_rng_state()}}
    torch.save(extra, ranks / f"extra_state_{suffix}")
    gathered = get_model_state_dict(model, options=FULL)
    named = get_optimizer_state_dict(model, optimizer, options=FULL)
    if rank == 0:
        (ranks / "fsdp_config.json").write_text(json.dumps({"FSDP_version": 2, "world_size": world_size}))
        torch.save(gathered, full / "pytorch_model_fsdp.bin")
        torch.save(named, full / "optimizer.bin")
        torch.save(scheduler.state_dict(), full / "scheduler.pt")


def accelerate_plugin(version: int) -> Any:
    """What Accelerate's own functions ask of its plugin under FULL_STATE_DICT."""
    return SimpleNamespace(
        fsdp_version=version,
        state_dict_type=StateDictType.FULL_STATE_DICT,
        state_dict_config=FullStateDictConfig(offload_to_cpu=True, rank0_only=True),
        optim_state_dict_config=FullOptimStateDictConfig(offload_to_cpu=True, rank0_only=True),
        sync_module_states=True,
    )


def load(model: Any, optimizer: torch.optim.Optimizer, folder: Path) -> tuple[Any, Any]:
    """By Accelerate's own functions; returns what is gathered again."""
    from accelerate.state import PartialState
    from accelerate.utils.fsdp_utils import load_fsdp_model, load_fsdp_optimizer

    PartialState(cpu=True)  # for its logger
    torch.optim.lr_scheduler.StepLR(optimizer, 3)  # adds `initial_lr`, without which torch refuses a state that has it
    version = 1 if isinstance(model, FullyShardedDataParallel) else 2
    accelerator = SimpleNamespace(
        process_index=dist.get_rank(),
        num_processes=dist.get_world_size(),
        is_main_process=dist.get_rank() == 0,
        is_fsdp2=version == 2,
        wait_for_everyone=dist.barrier,
    )
    load_fsdp_model(accelerate_plugin(version), accelerator, model, folder)
    load_fsdp_optimizer(accelerate_plugin(version), accelerator, optimizer, model, folder)
    return get_model_state_dict(model, options=FULL), get_optimizer_state_dict(model, optimizer, options=FULL)


def main() -> None:
    warnings.filterwarnings("ignore")
    kind, folder = sys.argv[1:]
    dist.init_process_group("gloo")
    model, optimizer = build(kind.removeprefix("load-"))
    if kind.startswith("load-"):
        weights, states = load(model, optimizer, Path(folder))
        if dist.get_rank() == 0:
            torch.save({"model": weights, "optimizer": states}, Path(folder).parent / "gathered.pt")
    else:
        train(model, optimizer, 3)
        save(kind, model, optimizer, Path(folder))
    dist.barrier()
    dist.destroy_process_group()
