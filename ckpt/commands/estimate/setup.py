"""Facts about a run that decide its memory."""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil
from typing import Literal

from ckpt.base.errors import UsageError

TrainDType = Literal["bf16", "fp16", "fp32"]  # for computing
StateDType = Literal["fp32", "bf16", "fp16", "fp8"]  # for masters and states
Optimizer = Literal["adam", "adamw", "adamw_8bit", "lion", "lion_8bit", "momentum", "momentum_8bit", "sgd"]
Device = Literal["none", "cpu", "nvme"]

#: More sharding comes later.
STRATEGIES = (
    *("ddp", "zero1", "zero2", "zero2-offload", "zero3", "zero3-offload", "zero3-offload-params"),
    *("fsdp1", "fsdp2", "fsdp2-offload", "megatron"),
)
DDP, ZERO1, ZERO2, ZERO2_OFFLOAD, ZERO3, ZERO3_OFFLOAD, ZERO3_OFFLOAD_ALL = STRATEGIES[:7]
FSDP1, FSDP2, FSDP2_OFFLOAD, MEGATRON = STRATEGIES[7:]

CPU, NVME = "cpu", "nvme"
#: Engine, and devices for its optimizer and its parameters.
OFFLOADED = {
    ZERO2_OFFLOAD: (ZERO2, CPU, ""),
    ZERO3_OFFLOAD: (ZERO3, CPU, ""),
    ZERO3_OFFLOAD_ALL: (ZERO3, CPU, CPU),
    FSDP2_OFFLOAD: (FSDP2, "", CPU),
}

ITEMSIZES = {"fp32": 4, "bf16": 2, "fp16": 2, "fp8": 1}
#: `_8bit` optimizers are bitsandbytes'.
OPTIMIZER_STATES = {
    "adam": 2,
    "adamw": 2,
    "adamw_8bit": 2,
    "lion": 1,
    "lion_8bit": 1,
    "momentum": 1,
    "momentum_8bit": 1,
    "sgd": 0,
}
#: In Megatron's `--recompute-modules`.
RECOMPUTED = ("core_attn", "layernorm", "mlp", "moe", "moe_act")

#: bitsandbytes 0.50 optim/optimizer.py: elements per float32 scale. Smaller tensors are not quantized.
_8BIT_BLOCK, _8BIT_LEAST = 256, 4096


@dataclass(frozen=True, slots=True)
class ZeroOptions:
    """DeepSpeed's `zero_optimization` options, in elements, with its defaults.

    The last four need device nvme (runtime/zero/offload_config.py).
    """

    reduce_bucket_size: int = 500_000_000
    overlap_comm: bool = False
    max_live_parameters: int = 1_000_000_000
    param_persistence_threshold: int = 100_000
    sub_group_size: int = 1_000_000_000
    optimizer_buffers: int = 4
    param_buffers: int = 5
    param_buffer_size: int = 100_000_000
    max_in_cpu: int = 1_000_000_000


@dataclass(frozen=True, slots=True)
class Setup:
    """A training run.

    - `mixed` (ddp, fsdp) keeps float32 parameters under autocast or MixedPrecision; otherwise everything has `dtype`.
    - `batch` counts sequences in one GPU's micro batch. `context_parallel` GPUs share each sequence.
    - `lora_rank` freezes the model. `lora_targets` names modules with adapters, None for PEFT's "all-linear".
    - `quantized` holds the frozen model's linear layers in 4 bits (QLoRA).
    - `master_dtype` and `state_dtype` are for DeepSpeed's and Megatron's optimizers.
    - `fused_loss` never holds all logits (Cut cross-entropy, Liger). `eager_attention` keeps the scores.
    - `activation_offload` keeps inputs of checkpointed layers in host memory.
    - `offload_*` is empty, "cpu" or "nvme".
    - `reshard` frees gathered parameters after a unit's forward pass (FSDP).
    """

    gpus: int = 1
    dtype: str = "bf16"
    mixed: bool = True
    optimizer: str = "adam"
    batch: int = 1
    length: int = 4096
    lora_rank: int = 0
    lora_targets: tuple[str, ...] | None = None
    quantized: bool = False
    zero: ZeroOptions = ZeroOptions()
    distributed_optimizer: bool = True
    master_dtype: str = "fp32"
    state_dtype: str = "fp32"
    fused_loss: bool = False
    eager_attention: bool = False
    activation_offload: bool = False
    recompute: tuple[str, ...] = ()
    context_parallel: int = 1
    sequence_parallel: bool = True
    offload_optimizer: str = ""
    offload_params: str = ""
    reshard: bool = True

    @property
    def itemsize(self) -> int:
        return ITEMSIZES[self.dtype]

    @property
    def tokens(self) -> int:
        """Tokens per micro batch and GPU."""
        return ceil(self.batch * self.length / self.context_parallel)

    def state_bytes(self, numel: int, itemsize: int) -> int:
        states = OPTIMIZER_STATES[self.optimizer]
        if not self.optimizer.endswith("_8bit"):
            return states * itemsize * numel
        return states * (numel + 4 * ceil(numel / _8BIT_BLOCK) if numel >= _8BIT_LEAST else 4 * numel)


def placed(strategy: str, setup: Setup) -> tuple[str, str, str]:
    """Return the engine, and the devices for its optimizer and its parameters.

    Raise UsageError for unsupported offloading. DeepSpeed offloads the optimizer from stage 1 on. NVMe and parameters
    need stage 3.
    """
    if strategy in OFFLOADED:
        return OFFLOADED[strategy]
    optimizer, params = setup.offload_optimizer, setup.offload_params
    is_fsdp = strategy in (FSDP1, FSDP2)
    can = (
        (not optimizer or strategy in (ZERO1, ZERO2, ZERO3))
        and (not params or strategy == ZERO3 or (is_fsdp and params == CPU))
        and (optimizer != NVME or strategy == ZERO3)
    )
    if not can:
        raise UsageError(
            f"{strategy} doesn't support this offloading",
            expected="optimizer: zero1, zero2, zero3; parameters: zero3, and with all states fsdp1, fsdp2; nvme: zero3",
            found=", ".join(
                f"{what} to {device}" for what, device in (("optimizer", optimizer), ("parameters", params)) if device
            ),
        )
    return strategy, optimizer, params
