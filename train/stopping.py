"""SIGTERM and SIGUSR1: all ranks save a checkpoint after the step that they are in, and end.

Slurm sends SIGUSR1 ahead of the limit of a job that asks for it (`--signal=USR1@120`), and SIGTERM where it preempts or
cancels one. Ranks hear it at different times, or not at all, so they ask each other after every step.
"""

import signal
import sys
from typing import Any

import torch
import torch.distributed as dist

from train import launch

#: Exit codes. That of SIGUSR1 is EX_TEMPFAIL: saved, not done, to be started again. After SIGTERM nobody is to.
EXIT_CODES = {signal.SIGUSR1: 75, signal.SIGTERM: 128 + signal.SIGTERM}

#: The largest signal that this rank has heard, and that all had when they last asked. Two, as one may come meanwhile.
_heard: dict[str, int] = {}


def listen() -> None:
    """From now on the signals of EXIT_CODES end no process but are noted. Called once, by every rank."""
    _heard.update(own=0, agreed=0)
    for number in EXIT_CODES:
        signal.signal(number, _note)


def asked() -> bool:
    """Whether any rank has heard a signal; the same in all of them, which call it together."""
    if not _heard:  # nobody listens
        return False
    heard = torch.tensor(_heard["own"], device=launch.device())
    dist.all_reduce(heard, dist.ReduceOp.MAX)
    _heard["agreed"] = int(heard)
    return bool(_heard["agreed"])


def exit_code() -> int:
    """What the process ends with: 0 where no signal was heard."""
    number = _heard.get("agreed", 0)
    if number and launch.is_first():
        print(f"{signal.Signals(number).name}: saved, and ended before the last step", file=sys.stderr)
    return EXIT_CODES[signal.Signals(number)] if number else 0


def _note(number: int, frame: Any) -> None:
    _heard["own"] = max(_heard["own"], number)
