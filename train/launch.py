"""The process group, the launcher's or one of a single process; and what each process computes on.

Processes on a GPU each, with NCCL, where there are enough of them; else on the CPU, with gloo. What was chosen is in
DS_ACCELERATOR, by which DeepSpeed chooses too, and a process on the CPU sees no GPU at all, whichever library looks.
"""

import os
from datetime import timedelta

import torch
import torch.distributed as dist

from train.config import UserError


def start(device: str = "auto") -> None:
    """Joins the process group; `device` is auto, cpu or cuda. Called before any library has looked for GPUs.

    Raises UserError where cuda is asked for and this machine has fewer GPUs than processes.
    """
    for name, value in {
        "RANK": "0",
        "LOCAL_RANK": "0",
        "WORLD_SIZE": "1",
        "LOCAL_WORLD_SIZE": "1",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "0",
    }.items():
        os.environ.setdefault(name, value)
    if device == "cuda":
        os.environ.pop("DS_ACCELERATOR", None)
    if _takes_gpu(device, int(os.environ["LOCAL_WORLD_SIZE"])):
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    else:
        os.environ |= {"DS_ACCELERATOR": "cpu", "CUDA_VISIBLE_DEVICES": ""}
    dist.init_process_group("nccl" if on_gpu() else "gloo", timeout=timedelta(minutes=10))


def _takes_gpu(device: str, num_processes: int) -> bool:
    if device == "cpu" or (device == "auto" and os.environ.get("DS_ACCELERATOR") == "cpu"):
        return False
    num_gpus = torch.cuda.device_count()
    if device == "cuda" and num_gpus < num_processes:
        raise UserError(
            f"--device cuda: {num_processes} processes on this machine, and torch {torch.__version__} sees {num_gpus} "
            f"GPUs\nhint: {f'--nproc-per-node {num_gpus}, or ' if num_gpus else ''}--device cpu"
        )
    return num_gpus >= num_processes


def stop() -> None:
    """Leaves the process group."""
    if dist.is_initialized():
        dist.destroy_process_group()


def on_gpu() -> bool:
    """Whether this process computes on a GPU."""
    return os.environ.get("DS_ACCELERATOR") != "cpu" and torch.cuda.is_available()


def device() -> torch.device:
    """Where this process computes."""
    return torch.device("cuda", torch.cuda.current_device()) if on_gpu() else torch.device("cpu")


def is_first() -> bool:
    """Whether this process is the one that prints and writes."""
    return int(os.environ.get("RANK", "0")) == 0
