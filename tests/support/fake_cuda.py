"""A double of torch.cuda: GPU_DOUBLES GPUs on the CPU, hidden from processes with DS_ACCELERATOR.

It models neither GPU arithmetic nor GPU memory.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
from typing import Any

import torch
import torch.distributed as dist
from torch import serialization
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.optim import optimizer

from train.engines import native
from train.megatron import cpu

NUM_GPUS = int(os.environ.get("GPU_DOUBLES", "2"))
_join, _mesh, _fsdp1 = dist.init_process_group, native.init_device_mesh, FullyShardedDataParallel.__init__
_generator = torch.Generator()


def num_gpus() -> int:
    """Return the number of GPUs visible to this process."""
    return 0 if os.environ.get("DS_ACCELERATOR") == "cpu" else NUM_GPUS


DOUBLES: dict[str, Any] = cpu._CUDA | {
    "is_available": lambda: num_gpus() > 0,
    "device_count": num_gpus,
    "current_device": lambda: int(os.environ.get("LOCAL_RANK", "0")),
    "set_device": lambda device: None,
    "get_device_name": lambda device=None: "double",
    "get_rng_state": lambda device=None: _generator.get_state(),
    "set_rng_state": lambda state, device=None: _generator.set_state(state) and None,
    "max_memory_allocated": lambda device=None: 123_000_000,
    "reset_peak_memory_stats": lambda device=None: None,
    "is_bf16_supported": lambda *_: True,
}


def install() -> None:
    """Install the double for the rest of this process."""
    for name, double in DOUBLES.items():
        setattr(torch.cuda, name, double)
    dist.init_process_group = join
    native.init_device_mesh = lambda kind, *sizes, **options: _mesh("cpu", *sizes, **options)
    serialization.default_restore_location = lambda storage, location: storage
    serialization.location_tag = lambda storage: f"cuda:{DOUBLES['current_device']()}" if num_gpus() else "cpu"
    FullyShardedDataParallel.__init__ = lambda self, *args, device_id, **options: _fsdp1(
        self, *args, device_id=torch.device("cpu"), **options
    )
    if importlib.util.find_spec("deepspeed"):
        # DeepSpeed chooses its accelerator once and must choose the CPU. The trainer must not see the variable.
        os.environ["DS_ACCELERATOR"] = "cpu"
        importlib.import_module("deepspeed.ops.adam.fused_adam").FusedAdamBuilder = FusedAdamBuilder
        importlib.import_module("deepspeed.accelerator").get_accelerator()
        del os.environ["DS_ACCELERATOR"]
    # Optimizers update many parameters at once, like on a GPU.
    optimizer._get_foreach_kernels_supported_devices = lambda: ["cuda", "cpu"]
    cpu._has_gpu = lambda: False
    cpu._CUDA |= DOUBLES
    cpu._CudaIsCpu().__enter__()


def join(backend: str, **options: Any) -> Any:
    """Join the process group, with gloo in place of NCCL."""
    assert backend == ("nccl" if num_gpus() else "gloo")
    return _join("gloo", **options)


class FusedAdamBuilder:
    """Stand-in for DeepSpeed's FusedAdam compiler. FusedAdam itself is the real class."""

    def load(self) -> FusedAdamBuilder:
        """Return this object in place of a compiled module."""
        return self

    @staticmethod
    def multi_tensor_adam(
        chunk: int,
        overflow: torch.Tensor,
        tensors: list[list[torch.Tensor]],
        lr: float,
        beta1: float,
        beta2: float,
        epsilon: float,
        step: int,
        decoupled: int,
        bias_correction: int,
        weight_decay: float,
    ) -> None:
        """Do one AdamW step on lists of gradients, parameters and both states (csrc/adam/multi_tensor_adam.cu)."""
        assert decoupled and bias_correction
        for gradient, parameter, average, square in zip(*tensors, strict=True):
            average.lerp_(gradient, 1 - beta1)
            square.mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
            divisor = (square / (1 - beta2**step)).sqrt_().add_(epsilon)
            change = (average / (1 - beta1**step)) / divisor + weight_decay * parameter
            parameter.sub_(change, alpha=lr)


install()
