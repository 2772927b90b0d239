"""Real checkpoints: launches of the bundled trainer, and the truth that the live engine gathered."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import safe_open

REPOSITORY = Path(__file__).parents[2]

#: How numpy holds the raw bits of an element of so many bytes.
RAW = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}


@dataclass(frozen=True)
class Truth:
    """What the engine gathered through its own API: raw bytes by role and fqn, and what it said of the run."""

    tensors: dict[tuple[str, str], tuple[str, tuple[int, ...], bytes]]
    ties: dict[str, str]
    metadata: dict[str, Any]

    @classmethod
    def load(cls, path: Path) -> Truth:
        tensors = {}
        with safe_open(path, "pt") as file:
            metadata = {key: json.loads(value) for key, value in file.metadata().items() if key != "format"}
            for name in file.keys():  # noqa: SIM118 - safe_open has no iterator
                role, _, fqn = name.partition("/")
                tensors[fqn, role] = raw(file.get_tensor(name))
        return cls(tensors, metadata["ties"], metadata)


def raw(tensor: Any) -> tuple[str, tuple[int, ...], bytes]:
    """A torch tensor as dtype name, shape and bytes."""
    import torch

    flat = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
    return str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape), flat.numpy().tobytes()


def launch(jobs: list[dict[str, Any]], world_size: int, folder: Path, module: str = "train") -> None:
    """Run the trainer, or another module that takes a file of jobs, once on `world_size` processes for all jobs.

    AssertionError with its output where it fails.
    """
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / f"jobs-{world_size}.jsonl"
    file.write_text("".join(json.dumps(job) + "\n" for job in jobs))
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(world_size)]
    command += ["--rdzv-backend", "c10d", "--rdzv-endpoint", "localhost:0", "-m", module]
    command += ["--jobs", str(file)] if module == "train" else [str(file)]
    env = os.environ | {"OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu"}
    done = subprocess.run(command, cwd=REPOSITORY, env=env, capture_output=True, text=True, timeout=1200)
    assert done.returncode == 0, f"{' '.join(command)}\n{done.stdout[-2000:]}\n{done.stderr[-6000:]}"
