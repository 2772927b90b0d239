"""What a training script runs on: its processes and its engine, as launchers and libraries record them."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ckpt.run_folder.companions import read_json

#: Number of processes: torchrun, accelerate and deepspeed; a step of srun; Open MPI; MPICH and Intel MPI.  Of Slurm not
#: SLURM_NTASKS, which a batch script has too that starts torchrun once on each node.
_SIZES = ("WORLD_SIZE", "SLURM_STEP_NUM_TASKS", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE")


@dataclass(frozen=True, slots=True)
class Caller:
    """`format` is what its engine saves and loads; None where nothing tells, as `world_size`."""

    format: str | None = None
    world_size: int | None = None


def caller(environment: Mapping[str, str] = os.environ) -> Caller:
    """What this process and its environment tell."""
    return Caller(_format(environment), _world_size(environment))


def _world_size(environment: Mapping[str, str]) -> int | None:
    distributed = sys.modules.get("torch.distributed")
    if distributed is not None and distributed.is_available() and distributed.is_initialized():
        return int(distributed.get_world_size())
    sizes = (environment.get(name, "") for name in _SIZES)
    return next((int(size) for size in sizes if size.isdecimal() and int(size)), None)


def _format(environment: Mapping[str, str]) -> str | None:
    """As Accelerate's launcher and Trainer's arguments record it (accelerate/utils/launch.py, 1.15)."""
    trainers = sys.modules.get("transformers.integrations.deepspeed")
    config = trainers.deepspeed_config() if trainers is not None else None
    if config is not None:
        return _zero(config)
    if _is_true(environment.get("ACCELERATE_USE_DEEPSPEED")):
        path = environment.get("ACCELERATE_DEEPSPEED_CONFIG_FILE", "none")
        if path != "none":
            return _zero(read_json(Path(path)))
        stage = environment.get("ACCELERATE_DEEPSPEED_ZERO_STAGE", "2")
        return f"zero{stage}" if stage in ("0", "1", "2", "3") else None
    if _is_true(environment.get("ACCELERATE_USE_FSDP")):
        default = "SHARDED_STATE_DICT" if environment.get("FSDP_VERSION") == "2" else "FULL_STATE_DICT"
        kind = environment.get("FSDP_STATE_DICT_TYPE", default)
        return {"SHARDED_STATE_DICT": "dcp", "FULL_STATE_DICT": "full"}.get(kind)
    return None


def _is_true(value: str | None) -> bool:
    return (value or "").lower() in ("1", "true", "yes", "y", "t", "on")


def _zero(config: Any) -> str | None:
    """The format of what DeepSpeed saves under `config`; its stage may be "auto"."""
    zero = config.get("zero_optimization") if isinstance(config, Mapping) else None
    stage = zero.get("stage", 0) if isinstance(zero, Mapping) else 0
    return f"zero{stage}" if stage in (0, 1, 2, 3) else None
