"""Trainer runs, with each step's optimizer options in `output/options.json`.

Besides the trainer's options a line has `save_at`, `loaded` (write the truth first) and `sees` (sizes of a tower).
Nothing of the converter is imported, so that the runs are kept.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

from tests.support.seeing import sees
from train import launch, loop, truth
from train.config import Config


def main(prepare: Callable[[dict[str, Any]], None] = lambda _: None) -> None:
    """Run every job in turn, in one process group, each after `prepare`."""
    launch.start()
    for line in Path(sys.argv[1]).read_text().splitlines():
        job = json.loads(line)
        prepare(job)
        save_at, writes, eyes = job.pop("save_at", None), job.pop("loaded", False), job.pop("sees", None)
        around = sees(eyes) if eyes else contextlib.nullcontext()
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
