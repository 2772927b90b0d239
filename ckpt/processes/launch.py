"""Detection and meeting of processes started by torchrun, srun or mpirun."""

from __future__ import annotations

import atexit
import contextlib
import os
import re
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import Any
from uuid import uuid4

from ckpt.base.errors import CkptError, StorageError, UsageError
from ckpt.base.text import pluralize
from ckpt.processes import sockets
from ckpt.processes.forks import Forkable
from ckpt.processes.group import JOINED, LAUNCHERS, Alone, ProcessGroup
from ckpt.processes.transport import TELLING, Torch, Transport

_JOINING = timedelta(minutes=5)  # for all processes to start
_SENT = "ckpt/told"
_PORT = 29500  # torchrun's default
_LAST_PORT = 65535


@dataclass(frozen=True)
class Launch:
    """This process among `size`. `by` names the launcher, `variables` the environment variables used."""

    by: str
    rank: int
    size: int
    variables: tuple[str, str]
    #: Of rank 0, if set.
    address: str | None = None
    port: int = _PORT
    #: Differs between two launches on one node, if known.
    job: str = ""
    #: True if torchrun's agent listens at the address.
    has_agent: bool = False

    def __str__(self) -> str:
        return f"{pluralize(self.size, 'process')} of {self.by} (by {' and '.join(self.variables)})"


def launch(environment: Mapping[str, str] = os.environ) -> Launch | None:
    """Return None if the process is alone or its script has already initialized torch.distributed."""
    distributed = sys.modules.get("torch.distributed")
    if distributed is not None and distributed.is_available() and distributed.is_initialized():
        return None
    for by, *names in LAUNCHERS:
        rank, size, local_size = (environment.get(name, "") for name in names)
        if not all(environment.get(name, "").isdecimal() for name in names if name):
            continue
        if int(size) < 2:
            return None
        address, port = environment.get("MASTER_ADDR"), environment.get("MASTER_PORT", "")
        found = int(port) if port.isdecimal() else _PORT
        job, nodes, is_local, has_agent = "", "", size == local_size, False
        if by == "srun":
            numbers = [environment.get(name, "0") for name in ("SLURM_JOB_ID", "SLURM_STEP_ID")]
            job, nodes = ".".join(numbers), environment.get("SLURM_STEP_NODELIST", "")
            is_local = environment.get("SLURM_STEP_NUM_NODES") == "1"
            if not port:  # avoid a collision between two steps on one node
                found = 20000 + (int(numbers[0]) * 31 + int(numbers[1])) % 20000
        elif by == "mpirun":
            job = environment.get("PMIX_NAMESPACE", "")
        elif environment.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
            # A restart has the same port, and the agent has ended all processes before.
            job, has_agent = f"{found}-{environment.get('TORCHELASTIC_RESTART_COUNT')}", True
        if is_local and (has_agent or not address) and sys.platform == "linux":
            address, has_agent = f"{sockets.ABSTRACT}ckpt-{job or found}", False
        address = address or _first_host(nodes) or ("127.0.0.1" if is_local else None)
        return Launch(by, int(rank), int(size), (names[0], names[1]), address, found, job, has_agent)
    return None


def _first_host(nodes: str) -> str:
    """Return rack03n1 for Slurm's `rack[03-05,7]n[1-2],other`."""
    first = re.match(r"(?:[^,\[]|\[[^\]]*\])*", nodes)
    return re.sub(r"\[([^\],-]+)[^\]]*\]", r"\1", first[0]) if first else ""


def silence_all_but_one() -> None:
    """Silence all processes except the first."""
    start = launch()
    if start is not None and start.rank:
        sys.stdout = sys.stderr = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115


@contextlib.contextmanager
def joined(start: Launch | None) -> Iterator[Alone]:
    """Join the processes started with this one. An error in one process is raised in all.

    Raise UsageError if the address is missing, or torch under torchrun; StorageError if not all processes come.
    """
    if start is None:
        yield Forkable()
        return
    with contextlib.ExitStack() as stack:
        try:
            transport = _join(start, stack)
        except CkptError:
            sys.stderr = sys.__stderr__ or sys.stderr  # each process reports its own problem
            raise
        with ProcessGroup(transport) as group:
            before = JOINED.set(group)
            try:
                yield group
            finally:
                JOINED.reset(before)


def _join(start: Launch, stack: contextlib.ExitStack) -> Transport:
    alone = f"to use one process, start it without {' and '.join(start.variables)}"
    for what, number, last in (("rank", start.rank, start.size - 1), ("port", start.port, _LAST_PORT)):
        if number > last:
            raise UsageError(
                f"this {what} is out of range", expected=f"at most {last}, of {start}", found=number, hint=alone
            )
    if start.address is None:
        raise UsageError(
            "the address of rank 0 is not set",
            expected="MASTER_ADDR, the host of the first process",
            found=str(start),
            hint=f"mpirun -x MASTER_ADDR=HOST (Open MPI), or -genv MASTER_ADDR HOST; {alone}",
        )
    try:
        if start.has_agent:
            return stack.enter_context(_by_torch(start, start.address, alone))
        met = sockets.meet(start.rank, start.size, start.job, start.address, start.port, _JOINING)
        return stack.enter_context(met)
    except (OSError, RuntimeError) as error:
        raise StorageError(
            "the processes did not find each other",
            path=start.address if start.address.startswith(sockets.ABSTRACT) else f"{start.address}:{start.port}",
            rank=start.rank,
            expected=str(start),
            found=str(error).partition("\n")[0],
            hint=f"check that every process runs this command and can reach the port; {alone}",
        ) from None


@contextlib.contextmanager
def _by_torch(start: Launch, address: str, alone: str) -> Iterator[Transport]:
    """Meet in the store of torchrun's agents.

    They keep its address when they restart processes (torch 2.13), so rank 0 may run on any node.
    """
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # hides torch's warnings; errors are raised anyway
    try:
        import torch.distributed as distributed
    except ImportError as error:
        raise UsageError(
            "several processes need torch to work together under torchrun, and it cannot be imported",
            expected=f"torch in the environment of all {start}",
            found=str(error),
            hint=f"pip install torch, or use srun or mpirun; {alone}",
        ) from None
    # torch's own wait is in C++ and ignores Ctrl-C and SIGTERM
    sockets.connect(address, start.port, time.monotonic() + _JOINING.total_seconds()).close()
    store, rank, size = next(distributed.rendezvous("env://", timeout=_JOINING))
    store = distributed.PrefixStore(_attempt(store, rank, size), store)
    distributed.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=_JOINING)
    try:
        yield Torch(distributed, store)
    except CkptError:
        _let_the_first_tell(store, rank)
        raise
    finally:
        with contextlib.suppress(RuntimeError):
            distributed.destroy_process_group()


def _let_the_first_tell(store: Any, rank: int) -> None:
    """Let the first process print the common error and end first: launchers kill the remaining ones."""
    if rank == 0:
        atexit.register(_call_if_alive, store.set, _SENT, "")
    else:
        _call_if_alive(store.wait, [_SENT], TELLING)


def _call_if_alive(ask: Callable[..., object], *what: object) -> None:
    with contextlib.suppress(RuntimeError):
        ask(*what)


def _attempt(store: Any, rank: int, size: int) -> str:
    """Return a unique key prefix for these processes in the store.

    If torchrun's agent restarts its processes, they get the same store (torch 2.13) with the addresses of dead
    processes. So the first process answers every process's token with the prefix, and each confirms it.
    """
    mine = uuid4().hex
    if rank:
        store.set(f"ckpt/joins/{rank}", mine)
        store.wait([f"ckpt/answer/{mine}"], _JOINING)
        name: str = store.get(f"ckpt/answer/{mine}").decode()
        store.set(f"{name}/{rank}", "")
        return name
    missing, name, end = set(range(1, size)), f"ckpt/{mine}", time.monotonic() + _JOINING.total_seconds()
    while missing := {other for other in missing if not store.check([f"{name}/{other}"])}:
        if time.monotonic() > end:
            raise RuntimeError(f"of {pluralize(size, 'rank')} did not come: {', '.join(map(str, sorted(missing)[:8]))}")
        for other in (other for other in missing if store.check([f"ckpt/joins/{other}"])):
            store.set(f"ckpt/answer/{store.get(f'ckpt/joins/{other}').decode()}", name)
        time.sleep(0.01)
    return name
