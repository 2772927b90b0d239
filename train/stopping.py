"""SIGTERM and SIGUSR1: all ranks save a checkpoint after the current step and exit.

Slurm sends SIGUSR1 before a job's time limit (`--signal=USR1@120`), and SIGTERM to preempt or cancel a job. Ranks
receive signals at different times, or not at all, so they agree after every step.
"""

import signal
import sys
from typing import Any

import torch
import torch.distributed as dist

from train import launch

#: SIGUSR1 gives EX_TEMPFAIL: saved but unfinished, start again. Don't restart after SIGTERM.
EXIT_CODES = {signal.SIGUSR1: 75, signal.SIGTERM: 128 + signal.SIGTERM}

#: Received by this rank, and by any rank at the last agreement.
_interruptible: dict[str, int] = {}


def listen() -> None:
    """Note the signals in EXIT_CODES instead of ending the process."""
    _interruptible.update(own=0, agreed=0)
    for number in EXIT_CODES:
        signal.signal(number, _note)


def stop_requested() -> bool:
    """Return True if any rank received a signal. All ranks call it together."""
    if not _interruptible:  # nobody listens
        return False
    heard = torch.tensor(_interruptible["own"], device=launch.device())
    dist.all_reduce(heard, dist.ReduceOp.MAX)
    _interruptible["agreed"] = int(heard)
    return bool(_interruptible["agreed"])


def exit_code() -> int:
    number = _interruptible.get("agreed", 0)
    if number and launch.is_first():
        print(f"{signal.Signals(number).name}: saved, and ended before the last step", file=sys.stderr)
    return EXIT_CODES[signal.Signals(number)] if number else 0


def _note(number: int, frame: Any) -> None:
    _interruptible["own"] = max(_interruptible["own"], number)
