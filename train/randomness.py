"""This process's random states: Python's, numpy's, torch's and its GPU's.

The keys in files follow HF Trainer's rng_state_R.pth (transformers/trainer.py, `_save_rng_state`).
"""

import random
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from train import launch


def states() -> dict[str, Any]:
    return {"python": random.getstate(), "numpy": np.random.get_state(), **torch_states()}


def torch_states() -> dict[str, torch.Tensor]:
    found = {"cpu": torch.get_rng_state()}
    return found | {"cuda": torch.cuda.get_rng_state()} if launch.on_gpu() else found


def restore(saved: dict[str, Any]) -> None:
    """Keep states without a counterpart here, for example a GPU's on a CPU."""
    if "python" in saved:
        random.setstate(saved["python"])
    if "numpy" in saved:
        np.random.set_state(saved["numpy"])
    torch.set_rng_state(saved["cpu"].cpu())
    if launch.on_gpu() and "cuda" in saved:
        torch.cuda.set_rng_state(saved["cuda"].cpu())


def save(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    torch.save(states(), folder / _name())


def load(folder: Path) -> bool:
    """Return False if there are no saved states."""
    if not (folder / _name()).is_file():
        return False
    restore(torch.load(folder / _name(), map_location="cpu", weights_only=False))
    return True


def _name() -> str:
    return f"rng_state_{dist.get_rank()}.pth" if dist.get_world_size() > 1 else "rng_state.pth"
