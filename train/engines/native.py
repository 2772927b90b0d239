"""Strategies built on torch alone: DDP, FSDP1, FSDP2, HSDP, and tensor parallel with FSDP2."""

import contextlib
import gc
import logging
import os
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, get_optimizer_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import (
    FSDPModule,
    FullyShardedDataParallel,
    MixedPrecision,
    MixedPrecisionPolicy,
    fully_shard,
)
from torch.distributed.fsdp._common_utils import clean_tensor_name
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

from train import launch, models, truth
from train.config import Config, UserError
from train.engine import Engine
from train.engines import native_files
from train.optimizers import WarmupDecay, build_optimizer, build_scheduler, param_groups

# FSDP1 warns about its successors.
warnings.filterwarnings("ignore", category=FutureWarning, module="torch.distributed")
warnings.filterwarnings("ignore", message=".*_get_pg_default_device|Multiple backends are|Please use DTensor")
# FSDP1 has nothing to shard on a single rank.
warnings.filterwarnings("ignore", message="FSDP is switching to use|When using ``NO_SHARD``")
# DTensor warns that gathering over two mesh axes at once would be faster.
logging.getLogger("torch.distributed.tensor._redistribute").setLevel(logging.ERROR)

TENSOR_PARALLEL = {
    **dict.fromkeys(("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj"), ColwiseParallel),
    **dict.fromkeys(("o_proj", "down_proj"), RowwiseParallel),
}


class NativeEngine(Engine):
    def __init__(self, model: nn.Module, config: Config) -> None:
        self.config = config
        self.buffers, self.facts = list(truth.persistent_buffers(model)), truth.facts_of(model)
        names = {parameter: name for name, parameter in model.named_parameters()}
        groups = param_groups(model, config)
        self.group_names = [[names[parameter] for parameter in group["params"]] for group in groups]
        if config.precision == "pure":
            model.to(models.DTYPES[config.dtype])
        model.to(launch.device())
        self.mesh = build_mesh(config)
        # FSDP can't shard 0-dim parameters, and FSDP2 can't shard empty ones. They stay whole, and `_clip` reduces
        # their gradients.
        whole = [p for p in model.parameters() if p.ndim == 0 or p.numel() == 0] if config.strategy != "ddp" else []
        self.whole = [names[parameter] for parameter in whole]
        self.model = shard(model, config, self.mesh, set(whole))
        bare = self.model.module if config.strategy == "ddp" else self.model
        self.parameters = {clean_tensor_name(name): parameter for name, parameter in bare.named_parameters()}
        for group, group_names in zip(groups, self.group_names, strict=True):
            group["params"] = [self.parameters[name] for name in group_names]
        # torch 2.13 fails on a GPU if a group mixes DTensors with plain tensors.
        unlike = self.mesh is not None and bool(whole)
        if unlike and config.fused:
            raise UserError(
                f"--fused: torch's kernel needs a fully sharded model, but this part is not sharded: {self.whole[0]}"
            )
        self.optimizer = build_optimizer(groups, config, foreach=False if unlike and launch.on_gpu() else None)
        self.scheduler: Any = None
        if config.scheduler == "deepspeed":
            self.scheduler = WarmupDecay(self.optimizer, config.schedule_steps)
        elif config.scheduler == "torch":
            self.scheduler = build_scheduler(config)(self.optimizer)

    @property
    def data_shard(self) -> tuple[int, int]:
        tp = self.config.tp if self.config.strategy == "tp-fsdp" else 1
        return dist.get_rank() // tp, dist.get_world_size() // tp

    def train(self, micro_batches: list[torch.Tensor]) -> torch.Tensor:
        self.model.train()
        losses = []
        for input_ids in micro_batches:
            with self._autocast():
                loss = self.model(input_ids=input_ids, labels=input_ids)["loss"]
            (loss / len(micro_batches)).backward()
            self.watch()
            losses.append(loss.detach().float())
        self._clip()
        self.optimizer.step()
        self.optimizer.zero_grad()
        if self.scheduler:
            self.scheduler.step()
        self.step += 1
        self.sequences += self.config.batch
        return torch.stack(losses).mean()

    @torch.no_grad()
    def logits(self, input_ids: torch.Tensor) -> torch.Tensor:
        self.model.eval()
        with self._autocast():
            logits: torch.Tensor = self.model(input_ids=input_ids)["logits"]
        if isinstance(self.model, FSDPModule):
            self.model.reshard()
        return logits

    def save(self, folder: Path) -> str:
        native_files.save(self, folder / f"step-{self.step}")
        return f"step-{self.step}"

    def load(self, folder: Path, tag: str) -> None:
        native_files.load(self, folder / tag)

    def gather(self) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
        tensors, adam_step = gather(self.model, self.optimizer, list(self.parameters), self.buffers)
        facts = self.facts | {
            "param_groups": truth.describe_groups(self.optimizer.param_groups, self.group_names),
            "adam_step": adam_step,
            "precision": self.config.precision,
        }
        return tensors, facts

    def close(self) -> None:
        del self.model, self.parameters, self.optimizer, self.scheduler, self.mesh
        gc.collect()

    def _autocast(self) -> contextlib.AbstractContextManager[Any]:
        """Return the autocast context for DDP, which has no own mixed precision."""
        mixed = self.config.strategy == "ddp" and self.config.precision == "mixed" and self.config.dtype != "fp32"
        if not mixed:
            return contextlib.nullcontext()
        return torch.autocast(launch.device().type, models.DTYPES[self.config.dtype])

    def _clip(self) -> None:
        """Clip the gradient norm to 1. torch's own clipping can't mix meshes, or DTensors with plain tensors."""
        for name in self.whole:
            if (gradient := self.parameters[name].grad) is not None:
                dist.all_reduce(gradient)
                gradient /= dist.get_world_size()
        if isinstance(self.model, FullyShardedDataParallel):
            self.grad_norm = float(self.model.clip_grad_norm_(1.0))
            return
        gradients = [p.grad for group in self.optimizer.param_groups for p in group["params"] if p.grad is not None]
        norms = [torch.linalg.vector_norm(gradient.float()) for gradient in gradients]
        norms = [norm.full_tensor() if isinstance(norm, DTensor) else norm for norm in norms]
        norm = torch.linalg.vector_norm(torch.stack(norms))
        self.grad_norm = norm.item()
        scale = 1.0 / (norm + 1e-6)
        if scale < 1.0:
            for gradient in gradients:
                gradient.mul_(scale.item())


def gather(
    model: nn.Module, optimizer: torch.optim.Optimizer, parameters: list[str], buffers: list[str]
) -> tuple[dict[str, torch.Tensor], int | None]:
    """Return tensors from torch's full state dicts, and Adam's step."""
    options = StateDictOptions(full_state_dict=True)
    state: dict[str, Any] = get_model_state_dict(model, options=options)
    tensors = {f"weight/{name}": state[name] for name in parameters}
    tensors |= {f"buffer/{name}": state[name] for name in buffers}
    steps = set()
    states: Any = get_optimizer_state_dict(model, optimizer, options=options)["state"]
    for name, values in states.items():
        for role, value in values.items():
            if role == "step":
                steps.add(int(value))
            elif torch.is_tensor(value) and value.shape == state[name].shape:
                tensors[f"{role}/{name}"] = value
    return tensors, max(steps, default=None)


def build_mesh(config: Config) -> DeviceMesh | None:
    """Return a row, a grid, or None for DDP and FSDP1."""
    world_size = dist.get_world_size()
    grids = {
        "fsdp2": ((world_size,), ("shard",)),
        "hsdp": ((2, world_size // 2) if world_size % 2 == 0 else (1, world_size), ("replicate", "shard")),
        "tp-fsdp": ((world_size // config.tp, config.tp), ("shard", "tp")),
    }
    if config.strategy not in grids:
        return None
    sizes, names = grids[config.strategy]
    if torch.Size(sizes).numel() != world_size:
        raise UserError(f"--tp {config.tp}: {world_size} ranks do not divide by it")
    return init_device_mesh(launch.device().type, sizes, mesh_dim_names=names)


def shard(model: nn.Module, config: Config, mesh: DeviceMesh | None, whole: set[nn.Parameter]) -> nn.Module:
    dtype = models.DTYPES[config.dtype] if config.precision == "mixed" and config.dtype != "fp32" else None
    layers = {type(layer) for group in model.modules() if isinstance(group, nn.ModuleList) for layer in group}
    if config.strategy == "ddp":
        # Without this flag DDP regroups gradient buckets after a run's first step. Additions then change their order,
        # and a step after --resume differs in the last bits.
        silence_unused_parameters()
        return DistributedDataParallel(model, find_unused_parameters=True)
    if config.strategy == "fsdp1":
        return FullyShardedDataParallel(
            model,
            auto_wrap_policy=ModuleWrapPolicy(layers),
            mixed_precision=MixedPrecision(param_dtype=dtype, reduce_dtype=torch.float32) if dtype else None,
            device_id=launch.device(),
            ignored_states=whole,
            use_orig_params=True,  # a flat parameter can't mix groups or hold frozen parameters
        )
    assert mesh is not None
    if config.strategy == "tp-fsdp":
        parallelize_module(model, mesh["tp"], tensor_parallel_plan(model, config))
        mesh = mesh["shard"]
    policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32 if dtype else None)
    for layer in [module for module in model.modules() if type(module) in layers]:
        fully_shard(layer, mesh=mesh, mp_policy=policy, ignored_params=whole)
    fully_shard(model, mesh=mesh, mp_policy=policy, ignored_params=whole)
    return model


def silence_unused_parameters() -> None:
    """Trigger DDP's warning about find_unused_parameters with fd 2 closed. torch prints it once per process."""
    model = nn.Linear(1, 1).to(launch.device())
    stderr = os.dup(2)
    with open(os.devnull, "w") as nowhere:
        os.dup2(nowhere.fileno(), 2)
    try:
        DistributedDataParallel(model, find_unused_parameters=True)(torch.ones(1, 1, device=launch.device()))
    finally:
        os.dup2(stderr, 2)
        os.close(stderr)


def tensor_parallel_plan(model: nn.Module, config: Config) -> dict[str, Any]:
    """Split projections that heads or columns divide."""
    plan = {
        name: TENSOR_PARALLEL[name.rpartition(".")[2]]()
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear) and name.rpartition(".")[2] in TENSOR_PARALLEL
    }
    sizes = getattr(model, "config", None)
    if any(getattr(sizes, name) % config.tp for name in ("num_key_value_heads", "intermediate_size")):
        raise UserError(
            f"--strategy tp-fsdp: --model {config.model} does not split {config.tp} ways, llama_even by 2 does"
        )
    return plan
