"""The bundled trainer's runs on DeepSpeed's pipeline: real checkpoints in Megatron-DeepSpeed's layout."""

from __future__ import annotations

import atexit
import functools
import shutil
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from typing import Any

import torch

from tests.support.engines import Truth, launch, launch_in_turn

RANKS, TAG = 4, "global_step2"


@dataclass(frozen=True)
class Run:
    """A model and a layout, by default on four ranks; `options` are the trainer's own."""

    name: str
    model: str
    tp: int = 1
    pp: int = 1
    dp: int = 0
    options: Mapping[str, Any] = field(default_factory=dict)

    @property
    def sizes(self) -> tuple[int, int, int]:
        """Return (TP, PP, DP)."""
        return self.tp, self.pp, self.dp or RANKS // self.tp // self.pp

    @property
    def ranks(self) -> int:
        return prod(self.sizes)

    @property
    def layout(self) -> str:
        """(TP, PP, DP) and special options, for tables."""
        return " ".join([",".join(map(str, self.sizes)), str(self.options.get("dtype", "bf16"))])

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
    # ZeRO-1's own optimizer, and stages with three and with two layers.
    Run("llama-fp16", "llama_wide", tp=2, pp=2, options={"dtype": "fp16", "layers": 5}),
    Run("qwen2", "qwen2_wide", pp=2),
    Run("qwen2-tp", "qwen2_wide", tp=2, pp=2),
    Run("gpt_neox", "gpt_neox_wide", tp=2),
]
#: A tied five-layer model with the same padded vocabulary for one and two tensor parallel ranks.
BASE = Run("base", "qwen2_wide", tp=2, pp=2, options={"layers": 5, "vocab_multiple": 130})
#: A run that continues to step 8, with a checkpoint at step 4.
LONG = Run("long", "llama_wide", tp=2, pp=2, options={"dtype": "fp32", "vocab_multiple": 130})
BY_NAME = {run.name: run for run in [*RUNS, BASE, LONG]}


@functools.cache
def _folder() -> Path:
    folder = Path(tempfile.mkdtemp(prefix="pipeline-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    jobs = [run.job(folder / run.name) for run in [*RUNS, BASE]]
    launch([*jobs, LONG.job(folder / LONG.name, steps=8, save_every=4)], RANKS, folder)
    return folder


def sample(name: str) -> Path:
    """Return a folder from `RUNS`, with its truth. The first call makes all runs."""
    return _folder() / name


def truth(name: str) -> Truth:
    """Return the truth from the live engine's ranks at the save."""
    return Truth.load(sample(name) / "truth" / f"{TAG}.safetensors")


def copy_of(name: str, folder: Path) -> Path:
    """Copy a run without its truth, for changes."""
    run = folder / name
    shutil.copytree(sample(name), run, ignore=shutil.ignore_patterns("truth"))
    return run


def edit(path: Path, change: Callable[[dict[str, Any]], None]) -> None:
    """Rewrite a file: `change(content)` works in place."""
    saved = torch.load(path, weights_only=False)
    change(saved)
    torch.save(saved, path)


def as_neox(step: Path) -> None:
    """Rename a run's four layers like gpt-neox's gpt2_model.py, with rotary frequencies in every layer."""

    def renamed(number: int, name: str) -> str:
        new = name.replace("self_attention.", "attention.").replace("lm_head.", "final_linear.")
        return f"norm.{new}" if number == 6 else new

    def shifted(number: int) -> int:
        return number - (number == 1) + (number > 5)

    def parameter(name: str) -> str:
        number, _, rest = name.partition(".")
        return f"{shifted(int(number))}.{renamed(int(number), rest)}"

    def slice_file(saved: dict[str, Any]) -> None:
        saved["param_shapes"] = [{parameter(n): shape for n, shape in group.items()} for group in saved["param_shapes"]]
        saved["args"] = {"num_layers": 4, "model_parallel_size": saved["checkpoint_parallel_dimensions"]["tp_degree"]}
        del saved["checkpoint_version"]

    for path in sorted(step.glob("layer_*"), reverse=True):
        number, state = int(path.name[6:8]), torch.load(path)
        state = {renamed(number, name): value for name, value in state.items()}
        if 1 < number < 6:
            state["attention.rotary_emb.inv_freq"] = torch.ones(2)
        path.unlink()
        torch.save(state, path.with_name(f"layer_{shifted(number):02d}" + path.name[8:]))
    for path in step.glob("mp_rank_*"):
        edit(path, slice_file)


def load_all(loads: Sequence[tuple[Run, Path, int]], folder: Path) -> list[Path]:
    """Resume each run in one launch and return the folders.

    With 0 steps the engine saves the loaded state and the truth.
    """
    jobs: dict[int, list[dict[str, Any]]] = {}
    outputs = [folder / f"loaded-{number}" for number in range(len(loads))]
    for (run, path, steps), output in zip(loads, outputs, strict=True):
        job = run.job(output, resume=str(path), steps=steps, save_every=1)
        jobs.setdefault(run.ranks, []).append(job | ({"save_every": 0} if steps else {}))
    launch_in_turn(jobs.items(), folder, module="tests.support.pipeline_worker")
    return outputs


def loaded_truth(output: Path) -> Truth:
    """Return the truth from the engine's ranks after a load in `load_all`."""
    return Truth.load(output / "truth" / "truth.safetensors")
