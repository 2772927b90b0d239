"""Trainer runs, with each step's optimizer options in `output/options.json`.

Besides the trainer's options a line has `save_at`, `copied` (a folder and its copy), `commands` (ckpt commands to run
first), `anywhere` (arguments for ckpt.resume), `loaded` (write the truth first), `sees` (a tower) and `forget` (zero
the states).
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import json
import shlex
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

from ckpt import resume
from tests.support.commands import Result, ckpt
from tests.support.seeing import sees
from train import launch, loop, truth
from train.config import Config


def main() -> None:
    """Run every job in turn, in one process group."""
    launch.start()
    for line in Path(sys.argv[1]).read_text().splitlines():
        job = json.loads(line)
        copied, save_at = job.pop("copied", None), job.pop("save_at", None)
        if copied and dist.get_rank() == 0:
            shutil.copytree(*copied)
        dist.barrier()
        for command in job.pop("commands", ()):
            run_command(command)
        forgets, writes, eyes = (job.pop(name, False) for name in ("forget", "loaded", "sees"))
        if "anywhere" in job:
            job["resume"] = resume(**job.pop("anywhere"))
        if forgets:
            forget(Path(job["resume"]))
        around = sees() if eyes else contextlib.nullcontext()
        with around, recorded(Config(**job), writes) as config, saving_at(save_at):
            loop.run(config)
        dist.barrier()
        gc.freeze()  # a run collects garbage twice, and can skip these modules
    launch.stop()


@contextlib.contextmanager
def recorded(config: Config, writes: bool = False) -> Iterator[Config]:
    """Record the options of param groups before every step and, with `writes`, the state an engine loaded."""
    module, name = loop.ENGINES[config.strategy]
    kind: Any = getattr(importlib.import_module(module), "MegatronEngine" if config.strategy == "megatron" else name)
    original, used = kind.train, []

    def train(engine: Any, micro_batches: list[torch.Tensor]) -> torch.Tensor:
        if writes and not used:
            truth.record(engine, config, "loaded")
        groups = engine.optimizer.param_groups
        used.append(truth.describe_groups(groups, [[] for _ in groups]))
        return original(engine, micro_batches)

    kind.train = train
    try:
        yield config
    finally:
        kind.train = original
    if dist.get_rank() == 0:
        Path(config.output, "options.json").write_text(json.dumps(used))


@contextlib.contextmanager
def saving_at(step: int | None) -> Iterator[None]:
    """Save only after this step while the context is open, or by the run's options if `step` is None."""
    save: Any = loop._save

    def save_there(engine: Any, *others: Any) -> Any:
        return save(engine, *others) if engine.step == step else None

    with contextlib.nullcontext() if step is None else mock.patch.object(loop, "_save", save_there):
        yield


def run_command(line: str) -> Result:
    """Run a `ckpt` command line on rank 0 while all ranks wait, and return its output."""
    outcome: list[Any] = [None]
    if dist.get_rank() == 0:
        name, *words = shlex.split(line)
        outcome = [ckpt(*words) if name == "ckpt" else Result(127, "", f"{name}: not found")]
    dist.broadcast_object_list(outcome)
    assert outcome[0].code == 0, f"{line}\n{outcome[0].err}"
    result: Result = outcome[0]
    return result


def forget(run: Path) -> None:
    """Zero Adam's states and step, like a conversion without states."""
    if dist.get_rank() == 0:
        for file in run.glob("iter_*/mp_rank_*/distrib_optim.pt"):
            content = torch.load(file, weights_only=False)
            for buffer in (buffer for key, buffer in content.items() if key != "buckets_coalesced"):
                for states in buffer.values():
                    states["exp_avg"].zero_()
                    states["exp_avg_sq"].zero_()
            torch.save(content, file)
            beside = file.with_name("model_optim_rng.pt")
            model = torch.load(beside, weights_only=False)
            for group in model["optimizer"]["optimizer"]["param_groups"]:
                group["step"] = 0.0
            torch.save(model, beside)
    dist.barrier()


if __name__ == "__main__":
    main()
