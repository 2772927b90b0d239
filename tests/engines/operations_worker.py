"""One rank of runs with planted faults. Each line in JOBS is a run, and results.json gets each error."""

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

from tests.support import hf_trainer
from train import data, launch
from train.config import UserError


def main() -> int:
    jobs = Path(sys.argv[1])
    results: dict[str, str] = {}
    launch.start()
    for line in jobs.read_text().splitlines():
        job = json.loads(line)
        with PLANTS[job["plant"]]():
            try:
                hf_trainer.run_job(job["config"])
                results[job["name"]] = ""
            except UserError as error:
                results[job["name"]] = str(error)
    if dist.get_rank() == 0:
        (jobs.parent / "results.json").write_text(json.dumps(results))
    launch.stop()
    return 0


@contextlib.contextmanager
def bad_batch() -> Iterator[None]:
    """Replace batch 16 by noise."""
    batch = data.batch

    def with_noise(first: int, count: int, length: int, seed: int) -> torch.Tensor:
        good = batch(first, count, length, seed)
        return good if first // count + 1 != 16 else (good * 7 + 13) % 256

    with mock.patch.object(data, "batch", with_noise):
        yield


PLANTS: dict[str | None, Callable[[], contextlib.AbstractContextManager[Any]]] = {
    None: contextlib.nullcontext,
    "bad batch": bad_batch,
}
