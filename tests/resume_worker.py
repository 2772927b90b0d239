"""Run under torchrun: for each line of a file, a run of the trainer, and with which options its optimizer stepped.

    torchrun --nproc-per-node 3 -m tests.resume_worker jobs.jsonl

A line has options of the trainer.  Besides,

    refused   true where the trainer is to refuse `resume`: the command of its hint is then run as it stands, which
              goes to `refused.json`, and the run goes on from what the command wrote

`output/options.json` gets, for each step, the options of every param group before it.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from train import launch, loop, truth
from train.config import ZERO, Config, UserError
from train.native import NativeEngine
from train.zero import ZeroEngine


def main() -> None:
    """Every job in turn, in one process group."""
    launch.start()
    for line in Path(sys.argv[1]).read_text().splitlines():
        job = json.loads(line)
        if job.pop("refused", False):
            job["resume"] = follow_the_hint(job)
        with recorded(Config(**job)) as config:
            loop.run(config)
        dist.barrier()
    launch.stop()


@contextlib.contextmanager
def recorded(config: Config) -> Iterator[Config]:
    """While this is open, the engines of a run note the options of their param groups before every step."""
    kind: Any = ZeroEngine if config.strategy in ZERO else NativeEngine
    original, used = kind.train, []

    def train(engine: Any, micro_batches: list[torch.Tensor]) -> torch.Tensor:
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


def follow_the_hint(job: dict[str, Any]) -> str:
    """The folder that the command of the refusal's hint says that it wrote."""
    try:
        loop.run(Config(**job))
    except UserError as error:
        said = str(error)
    else:
        raise AssertionError(f"--resume {job['resume']} is not refused")
    hint = re.search(r"^hint: (ckpt convert .*)$", said, re.MULTILINE)
    assert hint, said
    written = [""]
    if dist.get_rank() == 0:
        output = Path(job["output"])
        output.mkdir(parents=True, exist_ok=True)
        environment = {name: value for name, value in os.environ.items() if not name.startswith("TORCHELASTIC")}
        command = [sys.executable, "-m", *shlex.split(hint[1])]
        done = subprocess.run(command, env=environment, capture_output=True, text=True)
        assert done.returncode == 0, f"{hint[1]}\n{done.stderr}"
        written = [done.stdout.strip()]
        record = {"refusal": said, "command": hint[1], "stderr": done.stderr, "written": written[0]}
        (output / "refused.json").write_text(json.dumps(record))
    dist.broadcast_object_list(written)
    return written[0]


if __name__ == "__main__":
    main()
