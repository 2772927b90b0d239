"""Process group, and each process's device.

Each process takes a GPU, with NCCL, if there are enough; else all use the CPU, with gloo. DS_ACCELERATOR records the
choice. A process on the CPU hides GPUs from every library.
"""

import contextlib
import os
import time
import traceback
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint import CheckpointException

from train.config import UserError, print_error

#: CheckpointException is not an Exception.
ERRORS = (Exception, CheckpointException)
#: For the other ranks' error reports.
_PATIENCE = 3.0
_LONGEST = 500


def start(device: str = "auto") -> None:
    """Join the process group before any library looks for GPUs. `device` is auto, cpu or cuda.

    Raise UserError if cuda is requested and this machine has fewer GPUs than processes.
    """
    alone = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1"}
    alone |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    os.environ |= alone | os.environ
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
    if dist.is_initialized():
        dist.destroy_process_group()


def on_gpu() -> bool:
    return os.environ.get("DS_ACCELERATOR") != "cpu" and torch.cuda.is_available()


def device() -> torch.device:
    return torch.device("cuda", torch.cuda.current_device()) if on_gpu() else torch.device("cpu")


def gather_objects(mine: Any) -> list[Any]:
    """Gather in rank order, on every rank."""
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, mine)
    return found


@contextlib.contextmanager
def as_user_error(said: str, hint: str = "") -> Iterator[None]:
    try:
        yield
    except UserError:
        raise
    except ERRORS as error:
        cause: Any = error
        if isinstance(error, CheckpointException):  # holds all ranks' errors
            rank, (cause, _) = next(iter(error.failures.items()))
            said += f": rank {rank}"
        words = " ".join(str(cause).split())[:_LONGEST]
        raise UserError(f"{said}: {type(cause).__name__}: {words}{hint}") from error


def tell(error: BaseException) -> None:
    """Print an error once, with its rank unless all ranks met it.

    The first rank to report prints. The others, which may only have lost the connection, wait until it has printed.
    """
    if not dist.is_initialized():
        if os.environ.get("LOCAL_RANK", "0") == "0":  # each node has a LOCAL_RANK 0
            print_error(_text(error))
        return
    rank, ranks, text = dist.get_rank(), dist.get_world_size(), _text(error)
    with contextlib.suppress(RuntimeError):  # the rank with the store may have exited
        store = dist.PrefixStore("train/errors", dist.distributed_c10d._get_default_store())
        store.set(str(rank), text)
        if store.add("count", 1) > 1:
            _wait(lambda: store.check(["told"]))
            return
        everyone = [str(other) for other in range(ranks)]
        all_met_it = _wait(lambda: store.check(everyone)) and set(store.multi_get(everyone)) == {text.encode()}
        print_error(text if all_met_it else f"rank {rank}: {text}")
        store.set("told", "")
        return
    print_error(f"rank {rank}: {text}")


def _text(error: BaseException) -> str:
    return str(error) if isinstance(error, UserError) else "".join(traceback.format_exception(error)).strip()


def _wait(condition: Callable[[], bool]) -> bool:
    end = time.monotonic() + _PATIENCE
    while not (holds := condition()) and time.monotonic() < end:
        time.sleep(0.02)
    return holds


def is_first() -> bool:
    return int(os.environ.get("RANK", "0")) == 0
