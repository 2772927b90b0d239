"""A double of torch.cuda, installed where this is imported: two GPUs, which are the CPU.

What the bundled trainer asks of torch.cuda is answered as two GPUs would, tensors made or moved there stay on the CPU,
and files are tagged as written from there.  What a GPU computes, how its kernels round and how much memory they take is
none of it.
"""

from __future__ import annotations

import os
from typing import Any

import torch
import torch.distributed as dist
from torch import serialization

from train.engines import native
from train.megatron import cpu

NUM_GPUS = 2
_join, _mesh, _tag = dist.init_process_group, native.init_device_mesh, serialization.location_tag
_generator = torch.Generator()

DOUBLES: dict[str, Any] = cpu._CUDA | {
    "is_available": lambda: True,
    "device_count": lambda: NUM_GPUS,
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
    """Puts the double in place, for the rest of this process."""
    for name, double in DOUBLES.items():
        setattr(torch.cuda, name, double)
    dist.init_process_group = lambda backend, **options: _join({"nccl": "gloo"}[backend], **options)
    native.init_device_mesh = lambda kind, *sizes, **options: _mesh("cpu", *sizes, **options)
    serialization.default_restore_location = lambda storage, location: storage
    serialization.location_tag = lambda storage: f"cuda:{DOUBLES['current_device']()}"
    cpu._CudaIsCpu().__enter__()


install()
