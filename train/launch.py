"""The process group, the launcher's or one of a single process; and what each process computes on.

Processes on a GPU each, with NCCL, where there are enough of them; else on the CPU, with gloo. What was chosen is in
DS_ACCELERATOR, by which DeepSpeed chooses too, and a process on the CPU sees no GPU at all, whichever library looks.
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

#: What ends a run; the latter is none of the former.
ERRORS = (Exception, CheckpointException)
#: Seconds that a rank waits for what the others say of an error.
_PATIENCE = 3.0
#: How much of a framework's own words an error shows.
_LONGEST = 500


def start(device: str = "auto") -> None:
    """Joins the process group; `device` is auto, cpu or cuda. Called before any library has looked for GPUs.

    Raises UserError where cuda is asked for and this machine has fewer GPUs than processes.
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
    """Leaves the process group."""
    if dist.is_initialized():
        dist.destroy_process_group()


def on_gpu() -> bool:
    """Whether this process computes on a GPU."""
    return os.environ.get("DS_ACCELERATOR") != "cpu" and torch.cuda.is_available()


def device() -> torch.device:
    """Where this process computes."""
    return torch.device("cuda", torch.cuda.current_device()) if on_gpu() else torch.device("cpu")


def of_all_ranks(mine: Any) -> list[Any]:
    """What each rank hands in, by rank, in all of them."""
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, mine)
    return found


@contextlib.contextmanager
def as_user_error(said: str, hint: str = "") -> Iterator[None]:
    """Turns what a framework raises into an error of one line, and a hint."""
    try:
        yield
    except UserError:
        raise
    except ERRORS as error:
        cause: Any = error
        if isinstance(error, CheckpointException):  # with the errors of all ranks
            rank, (cause, _) = next(iter(error.failures.items()))
            said += f": rank {rank}"
        words = " ".join(str(cause).split())[:_LONGEST]
        raise UserError(f"{said}: {type(cause).__name__}: {words}{hint}") from error


def tell(error: BaseException) -> None:
    """Prints an error once: in the process that met it first, and with its rank unless all met it.

    The others may have met nothing but the loss of that one. They wait until it has been printed. What is no mistake of
    the user's is printed with its traceback.
    """
    if not dist.is_initialized():
        if os.environ.get("LOCAL_RANK", "0") == "0":  # every node may have its own
            print_error(_text(error))
        return
    rank, ranks, text = dist.get_rank(), dist.get_world_size(), _text(error)
    with contextlib.suppress(RuntimeError):  # the store has gone with the rank that had it
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
    """Whether a condition came to be within _PATIENCE."""
    end = time.monotonic() + _PATIENCE
    while not (holds := condition()) and time.monotonic() < end:
        time.sleep(0.02)
    return holds


def is_first() -> bool:
    """Whether this process is the one that prints and writes."""
    return int(os.environ.get("RANK", "0")) == 0
