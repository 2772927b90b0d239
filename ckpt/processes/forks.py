"""Processes forked from a command's only one, to share heavy computing.

Threads that compute with numpy wait for the interpreter's lock between its calls. Processes don't.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import socket
import sys
import warnings
from collections.abc import Callable
from datetime import timedelta
from typing import NoReturn, TypeVar

from ckpt.base.errors import CkptError, StorageError
from ckpt.base.progress import IMPORTING
from ckpt.base.words import Message
from ckpt.processes.group import Alone, ProcessGroup
from ckpt.processes.sockets import Sockets

T = TypeVar("T")
_Work = Callable[[Alone, int], T]
_STOPPING = signal.SIGINT, signal.SIGTERM
_ENDING = signal.SIGUSR1  # from the first process to its forks
_PR_SET_PDEATHSIG = 1  # linux/prctl.h
_SILENCE = timedelta(weeks=52)  # Ctrl-Z may stop both sides for long, and a dead one closes its socket


class Forkable(Alone):
    """The only process of a command. Its threads only show progress, so it can be forked."""

    def share(self, work: _Work[T], number: int) -> T:
        """Run `work` in this process and `number - 1` forks of it as one group, and return its result here.

        An error in any of them is raised here, and only this process is interrupted by Ctrl-C or SIGTERM. Raise
        StorageError if a fork was killed.
        """
        if number < 2 or sys.platform != "linux" or "torch" in sys.modules:  # torch's threads don't survive a fork
            return work(self, 1)
        peers: dict[int, socket.socket] = {}
        forks: list[int] = []
        try:
            with contextlib.suppress(OSError), IMPORTING:  # the system may allow no more processes
                for rank in range(1, number):
                    peers[rank], theirs = socket.socketpair()
                    with theirs:
                        forks.append(_forked(rank, number, theirs, [*peers.values()], work))
            if len(forks) == number - 1:
                return _work(Sockets(0, number, peers, _SILENCE), work)
        except StorageError as error:
            if signals := _ended(forks):
                error.what, error.found = "a process that computes was killed", signals[0]
                error.hint = Message("check the free memory, or give a smaller {max_memory}; the same command goes on")
            raise
        finally:
            for peer in peers.values():
                peer.close()
            _ended(forks)
        return work(self, 1)


def _forked(rank: int, number: int, transport: socket.socket, others: list[socket.socket], work: _Work[T]) -> int:
    """Return the process number of a fork that ends with `work`, or with this process."""
    first, ours = os.getpid(), Sockets(rank, number, {0: transport}, _SILENCE)
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _STOPPING)  # a fork leaves them to the first process
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # Python 3.12 sees OpenBLAS's threads, which can fork
            if process := os.fork():
                return process
        _end(first, others, ours, work)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _end(first: int, others: list[socket.socket], transport: Sockets, work: _Work[T]) -> NoReturn:
    """Do a fork's work, and end with it or with the process `first`."""
    try:
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        signal.signal(_ENDING, signal.SIG_DFL)
        for other in others:
            other.close()
        sys.stdout = sys.stderr = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115
        if os.getppid() == first:
            with contextlib.suppress(BaseException):  # the first process raises it
                _work(transport, work)
    finally:
        os._exit(0)


def _work(transport: Sockets, work: _Work[T]) -> T:
    failure: BaseException | None = None
    try:
        with contextlib.closing(transport), ProcessGroup(transport) as group:
            try:
                return work(group, group.size)
            except BaseException as error:
                failure = error
                if isinstance(error, CkptError) or transport.rank == 0:
                    vars(error)["is_told"] = True  # without a rank: the user started one process
                raise
    except Exception as error:
        raise failure or error from None  # the same error, without the way over a socket


def _ended(forks: list[int]) -> list[str]:
    """End the forks, which have nothing left to do, and return the signals by which others killed some."""
    for fork in forks:
        with contextlib.suppress(ProcessLookupError):
            os.kill(fork, _ENDING)
    codes = []
    while forks:
        with contextlib.suppress(ChildProcessError):  # the system keeps no codes if our parent ignores SIGCHLD
            codes.append(os.waitstatus_to_exitcode(os.waitpid(forks.pop(), 0)[1]))
    return [signal.Signals(-code).name for code in codes if code < 0 and -code != _ENDING]
