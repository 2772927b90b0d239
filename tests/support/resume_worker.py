"""Runs of `recorded_runs` that are made ready by ckpt.

A line also has `copied` (a folder and its copy), `commands` (ckpt commands to run first), `anywhere` (arguments for
ckpt.resume) and `forget` (zero the states).
"""

from __future__ import annotations

import shlex
import shutil
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from ckpt import resume
from tests.support import recorded_runs
from tests.support.commands import Result, ckpt


def main() -> None:
    recorded_runs.main(prepare)


def prepare(job: dict[str, Any]) -> None:
    copied = job.pop("copied", None)
    if copied and dist.get_rank() == 0:
        shutil.copytree(*copied)
    dist.barrier()
    for command in job.pop("commands", ()):
        run_command(command)
    if "anywhere" in job:
        job["resume"] = resume(**job.pop("anywhere"))
    if job.pop("forget", False):
        forget(Path(job["resume"]))


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
