"""Communication between the processes of one command.

A thread in each process exchanges values, progress and errors a few times a second, so that no process waits for a dead
one.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import traceback
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextvars import ContextVar
from typing import Any, TypeVar

from ckpt.base.errors import CkptError, StorageError, UsageError
from ckpt.base.words import Message
from ckpt.processes.messages import dump, load
from ckpt.processes.transport import Torch, Transport

T = TypeVar("T")

#: Launchers, with their variables for rank, world size and local world size. accelerate and deepspeed use torchrun's.
#: SLURM_NTASKS also exists in the shell of `salloc`, and in a batch script that starts torchrun once per node.
#: mpirun starts its daemons with srun, so its ranks also have srun's variables. srun may set PMI's, too.
LAUNCHERS = (
    ("torchrun", "RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"),
    ("torchrun", "RANK", "WORLD_SIZE", ""),
    ("mpirun", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_SIZE"),
    ("mpirun", "PMI_RANK", "PMI_SIZE", "MPI_LOCALNRANKS"),
    ("srun", "SLURM_PROCID", "SLURM_STEP_NUM_TASKS", ""),
    ("mpirun", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", ""),
    ("mpirun", "PMI_RANK", "PMI_SIZE", ""),
)

_INTERVAL = 0.25  # seconds between exchanges if nobody waits


class Alone:
    rank, size = 0, 1

    def gather(self, value: T) -> list[T]:
        """Return each process's value, by rank. All processes must call it."""
        return [value]

    def count_all_ranks(self, progress: Callable[[int], None]) -> Callable[[int], None]:
        """Let the first process's `progress` count all processes."""
        return progress

    def share(self, work: Callable[[Alone, int], T], number: int) -> T:
        """Run `work` with a group and the number of forked processes in it, at most `number`."""
        return work(self, 1)


class ProcessGroup(Alone):
    """All processes of a transport.

    An error in any process is raised in all of them: from `gather`, from the result of `count_all_ranks`, or on exit.
    Only errors inside the context are shared.
    """

    def __init__(self, transport: Transport) -> None:
        self._transport, self.rank, self.size = transport, transport.rank, transport.size
        self._values: list[deque[str]] = [deque() for _ in range(self.size)]
        self._left = [False] * self.size  # ranks that are finished
        self._outgoing: list[str] = []
        self._failure: BaseException | None = None  # still to be sent
        self._error: BaseException | None = None  # any process's error
        self._is_lost = False  # True if a process has died
        self._is_leaving = False
        self._done = self._told = 0  # bytes done here; bytes reported by all
        self._progress: Callable[[int], None] = lambda _: None
        self._changed = threading.Condition()
        self._wake = threading.Event()
        self._thread = threading.Thread(target=self._exchange, daemon=True)

    def __enter__(self) -> ProcessGroup:
        self._thread.start()
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        """Wait for all processes, or send them an error.

        Raise the same error as the other processes, with two exceptions: the first process had finished before another
        one died, or this process was interrupted.
        """
        with self._changed:
            self._failure, self._is_leaving = error, True
        self._wake.set()
        self._thread.join()
        is_done = error is None and self._is_lost and self.rank == 0
        if self._error is not None and not is_done and not isinstance(error, KeyboardInterrupt):
            raise self._error from None

    def gather(self, value: T) -> list[T]:
        """Gather, or raise another process's error, or StorageError if one has died.

        `value` is made of JSON's types, tuples, dicts with any keys, and errors.
        """
        message = dump(value)
        with self._changed:
            self._outgoing.append(message)
            self._wake.set()
            self._changed.wait_for(lambda: self._error is not None or all(self._values) or self._has_lost_process())
            self._raise_error()
            if not all(self._values):
                raise StorageError(
                    "another process of this conversion ended during the wait",
                    hint="start every process with the same options, and the same version of ckpt",
                )
            return [load(values.popleft()) for values in self._values]

    def _has_lost_process(self) -> bool:
        return any(has_left and not values for has_left, values in zip(self._left, self._values, strict=True))

    def count_all_ranks(self, progress: Callable[[int], None]) -> Callable[[int], None]:
        """Let the result raise another process's error."""
        self._progress = progress if self.rank == 0 else self._progress
        return self._count

    def _count(self, num_bytes: int) -> None:
        self._done += num_bytes
        self._raise_error()

    def _raise_error(self) -> None:
        if self._error is not None:
            raise self._error

    def _exchange(self) -> None:
        """Exchange messages until all processes leave or one fails."""
        while True:
            self._wake.wait(_INTERVAL)
            with self._changed:
                outgoing, self._outgoing = self._outgoing, []
                failure = None if self._failure is None else _named(self._failure, self.rank, self.size)
                message = outgoing, failure, self._is_leaving, self._done
            messages: list[Any] = []
            try:
                messages = [load(one) for one in self._transport.all_gather(dump(message).encode())]
                done = sum(num_bytes for _, _, _, num_bytes in messages)
            except Exception as error:
                lost = self._lost(error)
                with self._changed:
                    self._error, self._is_lost = lost, True
            else:
                try:
                    self._progress(done - self._told)
                    self._told = done
                except Exception as error:
                    self._failure = error
            with self._changed:
                if self._error is None:
                    for values, (new, *_) in zip(self._values, messages, strict=True):
                        values.extend(new)
                    self._error = next((error for _, error, *_ in messages if error is not None), None)
                    self._left = [is_leaving for _, _, is_leaving, _ in messages]
                if all(self._values) and not self._is_leaving:  # otherwise a waiting process would wait longer
                    self._wake.clear()
                self._changed.notify_all()
                if self._error is not None or all(is_leaving for _, _, is_leaving, _ in messages):
                    return

    def _lost(self, error: Exception) -> StorageError:
        missing = self._transport.missing()
        who = f"rank {', '.join(map(str, missing))} of {self.size}" if missing else f"one of {self.size}"
        return StorageError(
            f"another process of this conversion has ended, or cannot be reached any more: {who}",
            found=str(error),
            hint="read its output for the reason; the same command goes on from what is done",
        )


def check_alike(given: Mapping[str, str], group: Alone) -> None:
    """Raise UsageError if options differ from the first process's."""
    first = group.gather(given if group.rank == 0 else {})[0]
    for name in {**first, **given}:
        if given.get(name) != first.get(name):
            raise UsageError(
                f"the processes were given different options: {name}",
                expected=f"{first.get(name)}, as rank 0",
                found=given.get(name),
                hint="start the same command everywhere",
            )


def _named(error: BaseException, rank: int, size: int) -> BaseException:
    """Add the rank to `error`, in a class that every process knows."""
    if getattr(error, "is_told", False):
        return error
    named: Any = error
    where = f"in rank {rank} of {size}, on {os.uname().nodename}"
    if isinstance(error, CkptError):
        error.what = Message("{} ({})", error.what, where)
    elif not isinstance(error, KeyboardInterrupt | MemoryError):
        places = [f"{frame.filename}:{frame.lineno}" for frame in traceback.extract_tb(error.__traceback__)[-3:]]
        named = RuntimeError(f"{where}: {type(error).__name__}: {error}, at {', '.join(places)}")
    named.is_told = True
    found: BaseException = named
    return found


JOINED: ContextVar[ProcessGroup | None] = ContextVar("JOINED", default=None)


@contextlib.contextmanager
def the_callers() -> Iterator[Alone]:
    """Use torch.distributed's processes if it is initialized."""
    distributed = sys.modules.get("torch.distributed")
    if (joined := JOINED.get()) is not None:
        yield joined
    elif distributed is None or not distributed.is_available() or not distributed.is_initialized():
        yield Alone()
    else:
        with contextlib.closing(Torch(distributed)) as transport, ProcessGroup(transport) as group:
            yield group
