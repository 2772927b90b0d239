"""One rank of runs in which something is planted: `python -m tests.support.operations_worker JOBS`, under torchrun.

JOBS has a run on each line: {"name": ..., "config": {options}, "plant": what goes wrong, or null}.  How each ended goes
into results.json beside JOBS: an empty text, or the message of its UserError.
"""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from transformers import Trainer

from train import data, launch, loop, resume_check
from train.config import Config, UserError
from train.engines.native import NativeEngine


def main() -> int:
    jobs = Path(sys.argv[1])
    results: dict[str, str] = {}
    launch.start()
    for line in jobs.read_text().splitlines():
        job = json.loads(line)
        with PLANTS[job["plant"]]():
            try:
                loop.run(Config(**job["config"]))
                results[job["name"]] = ""
            except UserError as error:
                results[job["name"]] = str(error)
    if dist.get_rank() == 0:
        (jobs.parent / "results.json").write_text(json.dumps(results))
    launch.stop()
    return 0


@contextlib.contextmanager
def after_loading(change: Callable[[Any], None]) -> Iterator[None]:
    """Does something to the engine as soon as it has loaded a checkpoint, and says nothing."""
    load = NativeEngine.load

    def and_change(self: Any, folder: Path, tag: str) -> None:
        load(self, folder, tag)
        change(self)

    with mock.patch.object(NativeEngine, "load", and_change):
        yield


def reset_attention_dropout(engine: Any) -> None:
    for name, module in engine.model.named_modules():
        if name.endswith("attn.attn_dropout"):
            module.p = 0.0


def reseed_rank_1(engine: Any) -> None:
    if dist.get_rank() == 1:
        torch.manual_seed(4)


def lose_the_schedule(engine: Any) -> None:
    engine.scheduler.last_batch_iteration = 0


def go_back_in_the_data(engine: Any) -> None:
    engine.sequences -= engine.config.batch


@contextlib.contextmanager
def unseen_reseed() -> Iterator[None]:
    """Another random state than any comparison sees, so that only the losses tell."""
    with mock.patch.object(resume_check, "state_problems", lambda *_: []), after_loading(reseed_rank_1):
        yield


def forget_trainers_random_state() -> contextlib.AbstractContextManager[Any]:
    return mock.patch.object(Trainer, "_load_rng_state", lambda *_: None)


@contextlib.contextmanager
def another_corpus() -> Iterator[None]:
    batch = data.batch
    with mock.patch.object(data, "batch", lambda first, *rest: batch(first + 1, *rest)):
        yield


@contextlib.contextmanager
def bad_batch() -> Iterator[None]:
    """Batch 16 is noise."""
    batch = data.batch

    def with_noise(first: int, count: int, length: int, seed: int) -> torch.Tensor:
        good = batch(first, count, length, seed)
        return good if first // count + 1 != 16 else (good * 7 + 13) % 256

    with mock.patch.object(data, "batch", with_noise):
        yield


PLANTS: dict[str | None, Callable[[], contextlib.AbstractContextManager[Any]]] = {
    None: contextlib.nullcontext,
    "attention dropout": lambda: after_loading(reset_attention_dropout),
    "random state": lambda: after_loading(reseed_rank_1),
    "schedule": lambda: after_loading(lose_the_schedule),
    "position": lambda: after_loading(go_back_in_the_data),
    "unseen random state": unseen_reseed,
    "Trainer's random state": forget_trainers_random_state,
    "another corpus": another_corpus,
    "bad batch": bad_batch,
}
