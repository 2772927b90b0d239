"""Runs of the bundled trainer on DeepSpeed's pipeline: real checkpoints in Megatron-DeepSpeed's layout."""

from __future__ import annotations

import atexit
import functools
import shutil
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.engines import Truth, launch

RANKS, TAG = 4, "global_step2"


@dataclass(frozen=True)
class Run:
    """A model and a layout on four ranks; `options` are the trainer's own."""

    name: str
    model: str
    tp: int = 1
    pp: int = 1
    options: Mapping[str, Any] = field(default_factory=dict)

    @property
    def layout(self) -> str:
        """(TP, PP, DP) and what is special, for tables."""
        return " ".join([f"{self.tp},{self.pp},{RANKS // self.tp // self.pp}", str(self.options.get("dtype", "bf16"))])

    def job(self, output: Path, **more: Any) -> dict[str, Any]:
        return {
            "strategy": "megatron-deepspeed",
            "model": self.model,
            "tp": self.tp,
            "pp": self.pp,
            "steps": 2,
            "truth": True,
            "batch": 8,
            "accumulate": 2,
            "length": 8,
            "output": str(output),
            **self.options,
            **more,
        }


RUNS = [
    Run("llama", "llama_wide", tp=2, pp=2),
    Run("llama-odd", "llama"),
    # ZeRO-1's own optimizer, and stages of three layers and of two.
    Run("llama-fp16", "llama_wide", tp=2, pp=2, options={"dtype": "fp16", "layers": 5}),
    Run("qwen2", "qwen2_wide", pp=2),
    Run("qwen2-tp", "qwen2_wide", tp=2, pp=2),
    Run("gpt_neox", "gpt_neox_wide", tp=2),
]
BY_NAME = {run.name: run for run in RUNS}


@functools.cache
def _folder() -> Path:
    folder = Path(tempfile.mkdtemp(prefix="pipeline-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    launch([run.job(folder / run.name) for run in RUNS], RANKS, folder)
    return folder


def sample(name: str) -> Path:
    """The run folder of one of `RUNS`, with its truth; all are made at once."""
    return _folder() / name


def truth(name: str) -> Truth:
    """What the live engine's ranks held when it wrote the checkpoint."""
    return Truth.load(sample(name) / "truth" / f"{TAG}.safetensors")
