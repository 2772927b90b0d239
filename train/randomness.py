"""The random states of this process, for checkpoints: Python's, numpy's, torch's and that of its GPU.

Each rank draws its own numbers, so each rank has its own states. In files they have the names of HF Trainer's
rng_state_R.pth (transformers/trainer.py, `_save_rng_state`).
"""

import random
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from train import launch


def states() -> dict[str, Any]:
    """All of this process's states; `cuda` only where it computes on a GPU."""
    return {"python": random.getstate(), "numpy": np.random.get_state(), **of_torch()}


def of_torch() -> dict[str, torch.Tensor]:
    """torch's own: `cpu`, and `cuda` where this process computes on a GPU."""
    found = {"cpu": torch.get_rng_state()}
    return found | {"cuda": torch.cuda.get_rng_state()} if launch.on_gpu() else found


def restore(saved: dict[str, Any]) -> None:
    """Goes on from saved states. What was saved and has no place here, as a GPU's on a CPU, stays as it is."""
    if "python" in saved:
        random.setstate(saved["python"])
    if "numpy" in saved:
        np.random.set_state(saved["numpy"])
    torch.set_rng_state(saved["cpu"].cpu())
    if launch.on_gpu() and "cuda" in saved:
        torch.cuda.set_rng_state(saved["cuda"].cpu())


def save(folder: Path) -> None:
    """Writes this rank's states into a folder, which is made if it is not there."""
    folder.mkdir(parents=True, exist_ok=True)
    torch.save(states(), folder / _name())


def load(folder: Path) -> bool:
    """Goes on from this rank's states in a folder; whether there are any."""
    if not (folder / _name()).is_file():
        return False
    restore(torch.load(folder / _name(), map_location="cpu", weights_only=False))
    return True


def _name() -> str:
    return f"rng_state_{dist.get_rank()}.pth" if dist.get_world_size() > 1 else "rng_state.pth"
