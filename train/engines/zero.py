"""DeepSpeed ZeRO stages 1, 2 and 3."""

import gc
import logging
import os
import warnings
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.distributed_c10d import _coalescing_manager

from train import launch, models, truth
from train.config import WARMUP, Config, read_ds_config
from train.engine import Engine
from train.optimizers import build_optimizer, build_scheduler, param_groups
from train.truth import pieces
from train.truth.pieces import Piece, Place

# DeepSpeed reads both variables during import. LOCAL_SIZE skips its search for NUMA nodes.
if not launch.on_gpu():
    os.environ["DS_ACCELERATOR"] = "cpu"
    os.environ.setdefault("LOCAL_SIZE", os.environ.get("LOCAL_WORLD_SIZE", "1"))

import deepspeed
from deepspeed.accelerator import get_accelerator
from deepspeed.runtime.zero.partition_parameters import Init
from deepspeed.utils import (
    logger,
    safe_get_full_fp32_param,
    safe_get_full_optimizer_state,
    safe_get_local_fp32_param,
    safe_get_local_optimizer_state,
    set_z3_leaf_modules,
)

_LINEAR = nn.functional.linear

logger.setLevel(logging.ERROR)
# DeepSpeed calls deprecated torch functions.
warnings.filterwarnings("ignore", category=FutureWarning, module="torch.distributed")
# The search for compiled extensions runs a compiler in every process.
vars(deepspeed.ops)["__compatible_ops__"] = {}


def _partition_unsent(init: Init, parameter: Any) -> None:
    init._convert_to_deepspeed_param(parameter)
    parameter.partition()


# Every rank builds the same model. DeepSpeed 0.19.8 fails to broadcast a 0-dim parameter.
deepspeed.DeepSpeedEngine._broadcast_model = lambda engine: None
Init._zero_init_param = _partition_unsent


def ds_config(config: Config, groups: list[dict[str, Any]]) -> dict[str, Any]:
    generated: dict[str, Any] = {
        "train_batch_size": config.batch,
        "gradient_accumulation_steps": config.accumulate,
        "gradient_clipping": 1.0,
        "steps_per_print": 10**9,
        "bf16": {"enabled": config.dtype == "bf16"},
        "fp16": {
            "enabled": config.dtype == "fp16",
            "initial_scale_power": config.initial_scale_power,
            "hysteresis": 1,
            "loss_scale_window": 100,
        },
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "zero_optimization": {
            "stage": int(config.strategy[-1]),
            # The defaults would allocate gigabytes.
            "reduce_bucket_size": 100_000,
            "allgather_bucket_size": 100_000,
            "stage3_prefetch_bucket_size": 10_000,
            # Keep some tiny parameters whole between uses, but not most.
            "stage3_param_persistence_threshold": 40,
            "overlap_comm": False,
            # This option rounds twice if a linear layer has a bias, so 16-bit logits would differ from the plain model.
            "memory_efficient_linear": False,
        },
    }
    if config.optimizer == "adamw":
        # DeepSpeed's own Adam would compile a C++ or CUDA extension first.
        params = {"lr": config.lr, "torch_adam": True} | ({"fused": True} if config.fused else {})
        generated["optimizer"] = {"type": "AdamW", "params": params}
    if config.optimizer == "muon":  # Adam steps everything but the layers' matrices
        generated["optimizer"] = {"type": "Muon", "params": {"lr": config.lr, "momentum": 0.9, "torch_adam": True}}
        generated["zero_optimization"]["reduce_scatter"] = False  # Muon refuses it
    if config.scheduler == "deepspeed":
        rates = [group["lr"] for group in groups]
        peaks: dict[str, Any] = {"warmup_min_lr": [rate / 10 for rate in rates], "warmup_max_lr": rates}
        if config.optimizer == "muon":  # DeepSpeed makes the groups, so all share one rate
            peaks = {"warmup_min_lr": config.lr / 10, "warmup_max_lr": config.lr}
        lengths = {"total_num_steps": config.schedule_steps, "warmup_num_steps": WARMUP}
        generated["scheduler"] = {"type": "WarmupDecayLR", "params": lengths | peaks}
    return _merged(generated, read_ds_config(config.ds_config))


class DeepSpeedEngine(Engine):
    engine: Any

    @property
    def step(self) -> int:
        """Steps taken, including steps skipped after an overflow, like the checkpoint's tag."""
        return int(self.engine.global_steps)

    @property
    def sequences(self) -> int:
        return int(self.engine.global_samples)

    @property
    def grad_norm(self) -> float | None:
        norm = self.engine.get_global_grad_norm()
        return None if norm is None else float(norm)

    def load(self, folder: Path, tag: str) -> None:
        if self.engine.load_checkpoint(str(folder), tag=tag)[0] is None:
            raise ValueError("DeepSpeed found nothing to load")

    def close(self) -> None:
        self.engine.destroy()
        del self.engine, self.optimizer
        decide_on_fp16()
        torch._dynamo.config.disable = False  # set for Muon
        nn.functional.linear = _LINEAR  # memory_efficient_linear replaces it permanently
        gc.collect()


class ZeroEngine(DeepSpeedEngine):
    def __init__(self, model: nn.Module, config: Config) -> None:
        groups = param_groups(model, config)
        self.names = {parameter: name for name, parameter in model.named_parameters()}
        self.options = ds_config(config, groups)
        self.stage = self.options["zero_optimization"]["stage"]
        # DeepSpeed drops empty parameters, so they have no master.
        self.groups = [{self.names[p]: p for p in group["params"] if p.numel()} for group in groups]
        if self.stage == 3 and (blocks := models.sparse_blocks(model)):
            # Ranks use different experts, so fetching their parameters one by one would hang.
            set_z3_leaf_modules(model, blocks)
        if config.optimizer == "muon":
            torch._dynamo.config.disable = True
        decide_on_fp16(config)
        # ZeRO-3 numbers parameters process-wide and saves the numbers.
        Init.param_id = 0
        self.engine, self.optimizer, _, _ = deepspeed.initialize(
            model=model,
            model_parameters=groups,
            optimizer=None if "optimizer" in self.options else build_optimizer(groups, config),
            lr_scheduler=build_scheduler(config) if config.scheduler == "torch" else None,
            config=self.options,
        )
        if config.optimizer == "muon":
            halves = [
                [(name, p) for name, p in group.items() if p.use_muon == half]
                for group in self.groups
                for half in (True, False)
            ]
            self.groups = [dict(half) for half in halves if half]

    @classmethod
    def around(cls, engine: Any, groups: list[dict[str, Any]]) -> "ZeroEngine":
        self = cls.__new__(cls)
        self.engine, self.optimizer, self.stage = engine, engine.optimizer, engine.zero_optimization_stage()
        self.groups = groups
        return self

    def train(self, micro_batches: list[torch.Tensor]) -> torch.Tensor:
        """Take one optimizer step. DeepSpeed detects the last micro batch itself."""
        self.engine.train()
        losses = []
        for input_ids in micro_batches:
            loss = self.engine(input_ids=input_ids, labels=input_ids)["loss"]
            self.engine.backward(loss)
            self.watch()
            self.engine.step()
            losses.append(loss.detach().float())
        return torch.stack(losses).mean()

    @torch.no_grad()
    def logits(self, input_ids: torch.Tensor) -> torch.Tensor:
        self.engine.eval()
        logits: torch.Tensor = self.engine(input_ids=input_ids)["logits"]
        return logits

    def save(self, folder: Path) -> str:
        self.engine.save_checkpoint(str(folder))
        return f"global_step{self.engine.global_steps}"

    def gather(self) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
        model = self.engine.module
        with deepspeed.zero.GatheredParameters([*model.parameters()], enabled=self.stage == 3):
            tensors = {f"weight/{name}": parameter.detach().clone() for name, parameter in model.named_parameters()}
        tensors |= self._gather_optimizer()
        tensors |= {f"buffer/{name}": buffer for name, buffer in truth.persistent_buffers(model).items()}
        facts = truth.facts_of(model) | {
            "param_groups": truth.describe_groups(self.optimizer.param_groups, [list(group) for group in self.groups]),
            "adam_step": adam_step(self.engine),
        }
        return tensors, facts

    def _gather_optimizer(self) -> dict[str, torch.Tensor]:
        """Return every master and optimizer state.

        safe_get_full_* are not exact enough for the truth. Below stage 3 they add pieces to zeros, so -0.0 becomes 0.0.
        They also use the masters' dtype for every state.
        """
        if self.stage < 3:
            relink(self.optimizer)
        wanted = [
            (f"{state or 'master'}/{name}", parameter, state)
            for group in self.groups
            for name, parameter in group.items()
            for state in (None, *state_names(self.engine))
            if state is None or not hasattr(parameter, "use_muon") or (state == _MOMENTUM) == parameter.use_muon
        ]
        mine = [self._piece(key, parameter, state) for key, parameter, state in wanted]
        tensors = pieces.collect([piece for piece in mine if piece is not None])
        with _coalescing_manager(self.optimizer.dp_process_group):  # one call per tensor would dominate the time
            gathered = [
                safe_get_full_optimizer_state(parameter, state) if state else safe_get_full_fp32_param(parameter)
                for _, parameter, state in wanted
            ]
        for (key, _, _), claimed in zip(wanted, (one.cpu() for one in gathered), strict=True):
            if not torch.equal(tensors[key].to(claimed.dtype).nan_to_num(), claimed.nan_to_num()):
                raise RuntimeError(f"{key}: DeepSpeed's gathered tensor differs from the ranks' pieces")
        return tensors

    def _piece(self, key: str, parameter: Any, state: str | None) -> Piece | None:
        """Return None for a piece without elements. The master's state is None."""
        role, _, name = key.partition("/")
        if self.stage == 3:
            slot = safe_get_local_optimizer_state(parameter, state) if state else safe_get_local_fp32_param(parameter)
            start = dist.get_rank() * slot.numel()
            length = min(slot.numel(), parameter.ds_numel - start)  # the last slots end in padding
            place = Place(name, tuple(parameter.ds_shape))
            return Piece(role, place, start, slot[:length].cpu()) if length > 0 else None
        return fragment(parameter, Place(name, tuple(parameter.shape)), state)


#: Muon's state for its matrices.
_MOMENTUM = "momentum_buffer"


def state_names(engine: Any) -> list[str]:
    """Return the sharded optimizer states: they are shaped like their parameters."""
    # All ranks must gather in one order, and load_universal leaves a set's order.
    return sorted(
        {
            name
            for flat, state in engine.basic_optimizer.state.items()
            for name, value in state.items()
            if torch.is_tensor(value) and value.shape == flat.shape
        }
    )


def relink(optimizer: Any) -> None:
    """Repair DeepSpeed's map to fragments (see docs/training.md)."""
    if getattr(optimizer, "round_robin_gradients", False):
        with mock.patch.object(optimizer, "bit16_groups", optimizer.round_robin_bit16_groups):
            optimizer._link_all_hp_params()
    optimizer._hp_optimizer_states_linked = False
    optimizer._lazy_init_hp_params_optimizer_state()


def fragment(parameter: Any, place: Place, state: str | None) -> Piece | None:
    """Return a state's fragment, or the master's (state None). Below stage 3 only."""
    mapping = parameter._hp_mapping
    if mapping is None:  # not in this rank's partition
        return None
    elements = mapping.get_hp_fragment(state).detach().flatten().cpu().clone()
    return Piece(state or "master", place, mapping.lp_fragment_address.start, elements)


def adam_step(engine: Any) -> int | None:
    """Return None before the first step. Steps that overflowed don't count."""
    steps = [state["step"] for state in engine.basic_optimizer.state.values() if "step" in state]
    return int(steps[0]) if steps else None


def decide_on_fp16(config: Config | None = None) -> None:
    """Allow fp16 for a run in fp16: DeepSpeed rejects it on most CPUs."""
    accelerator = get_accelerator()
    for name in ("is_fp16_supported", "supported_dtypes"):
        vars(accelerator).pop(name, None)
    if config and config.dtype == "fp16" and not accelerator.is_fp16_supported():
        accelerator.is_fp16_supported = lambda: True
        accelerator.supported_dtypes = lambda: [torch.float32, torch.bfloat16, torch.float16]


def _merged(base: dict[str, Any], overrides: dict[str, Any]) -> dict[str, Any]:
    merged = dict(base)
    for key, value in overrides.items():
        both = isinstance(value, dict) and isinstance(base.get(key), dict)
        merged[key] = _merged(base[key], value) if both else value
    return merged
