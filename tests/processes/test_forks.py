"""`ckpt/processes/forks.py`: one command's forks share its work, and end with it."""

from __future__ import annotations

import errno
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path

import pytest

from ckpt.base.streams import TerminatedError
from ckpt.errors import CorruptError, StorageError
from ckpt.processes import sockets
from ckpt.processes.forks import Forkable
from ckpt.processes.group import Alone

NUMBER = 3


@pytest.fixture(autouse=True)
def no_child_is_left(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Let the test process fork although it has torch, and check that each fork has ended."""
    monkeypatch.delitem(sys.modules, "torch", raising=False)
    forks: list[int] = []
    real = os.fork

    def fork() -> int:
        forks.append(real())
        return forks[-1]

    monkeypatch.setattr(os, "fork", fork)
    yield
    assert not [one for one in forks if Path(f"/proc/{one}").exists()]


def in_rank(number: int, act: Callable[[], object]) -> Callable[[Alone, int], list[int]]:
    """Return work that calls `act` in one rank and then gathers."""

    def work(group: Alone, size: int) -> list[int]:
        assert group.size == size
        if group.rank == number:
            act()
        return group.gather(os.getpid())

    return work


def raising(error: BaseException) -> Callable[[], None]:
    def act() -> None:
        raise error

    return act


def test_all_of_them_work() -> None:
    first, *others = Forkable().share(in_rank(0, lambda: None), NUMBER)
    assert first == os.getpid() and len({first, *others}) == NUMBER


@pytest.mark.parametrize("rank", range(NUMBER))
def test_an_error_names_no_rank(rank: int) -> None:
    error = CorruptError("two bytes differ", path=Path("a"), fqn="weight", hint="copy it again")
    with pytest.raises(CorruptError) as caught:
        Forkable().share(in_rank(rank, raising(error)), NUMBER)
    assert (str(caught.value), caught.value.hint) == (str(error), error.hint) and "rank" not in str(error)


def test_an_error_of_ckpt_itself_names_its_place() -> None:
    with pytest.raises(RuntimeError, match=r"TypeError: no number, at .*test_forks.py:\d+"):
        Forkable().share(in_rank(1, raising(TypeError("no number"))), NUMBER)


def test_a_killed_one_is_told() -> None:
    with pytest.raises(StorageError, match="a process that computes was killed") as caught:
        Forkable().share(in_rank(2, lambda: os.kill(os.getpid(), signal.SIGKILL)), NUMBER)
    assert caught.value.found == "SIGKILL" and "--max-memory" in str(caught.value.hint)


@pytest.mark.parametrize("stop", [KeyboardInterrupt, TerminatedError])
def test_the_first_one_is_interrupted(stop: type[BaseException]) -> None:
    with pytest.raises(stop):
        Forkable().share(in_rank(0, raising(stop())), NUMBER)


def test_a_signal_does_not_stop_a_fork() -> None:
    def stop() -> None:
        os.kill(os.getpid(), signal.SIGINT)
        os.kill(os.getpid(), signal.SIGTERM)

    assert len(Forkable().share(in_rank(1, stop), NUMBER)) == NUMBER


def test_a_parent_that_ignores_its_childrens_end_is_no_error() -> None:
    before = signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # a new process inherits it
    try:
        assert len({*Forkable().share(in_rank(0, lambda: None), NUMBER)}) == NUMBER
    finally:
        signal.signal(signal.SIGCHLD, before)


def test_one_that_ctrl_z_stopped_for_long_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sockets, "SILENCE", timedelta(seconds=0.1))

    def work(group: Alone, size: int) -> list[int]:
        pids = group.gather(os.getpid())
        if group.rank == 0:
            for number in (signal.SIGSTOP, signal.SIGCONT):
                os.kill(pids[1], number)
                time.sleep(0.6)  # the time of two exchanges, and more than the silence
        return group.gather(group.rank)

    assert Forkable().share(work, NUMBER) == [*range(NUMBER)]


@pytest.mark.parametrize("at", [1, 2])
def test_without_forks_it_works_alone(at: int, monkeypatch: pytest.MonkeyPatch) -> None:
    real, calls = os.fork, iter(range(1, NUMBER))

    def fork() -> int:
        if next(calls) == at:
            raise BlockingIOError("Resource temporarily unavailable")
        return real()

    monkeypatch.setattr(os, "fork", fork)
    assert Forkable().share(in_rank(0, lambda: None), NUMBER) == [os.getpid()]


def test_torchs_threads_are_not_forked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", threading)
    assert Forkable().share(in_rank(0, lambda: None), NUMBER) == [os.getpid()]


def test_an_interrupt_does_not_wait_for_a_computation() -> None:
    """A fork notices nothing while it computes."""

    def work(group: Alone, size: int) -> None:
        group.gather(None)
        if group.rank:
            time.sleep(60)
        raise KeyboardInterrupt

    start = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        Forkable().share(work, NUMBER)
    assert time.monotonic() - start < 30


def test_forks_end_with_a_first_one_that_is_killed(tmp_path: Path) -> None:
    def work(group: Alone, size: int) -> None:
        forks = group.gather(os.getpid())
        if group.rank:
            time.sleep(60)
        (tmp_path / "forks").write_text(" ".join(map(str, forks[1:])))
        os.kill(os.getpid(), signal.SIGKILL)

    if not (process := os.fork()):
        try:
            Forkable().share(work, NUMBER)
        finally:
            os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]) == -signal.SIGKILL
    forks, end = (tmp_path / "forks").read_text().split(), time.monotonic() + 30
    while any(is_running(fork) for fork in forks):
        assert time.monotonic() < end
        time.sleep(0.01)


def is_running(process: str) -> bool:
    """Return False for an ended process, also before its new parent has taken note."""
    state = Path(f"/proc/{process}/stat")
    return state.exists() and state.read_text().rpartition(")")[2].split()[0] != "Z"


def test_an_error_of_the_system_stays_one() -> None:
    error = OSError(errno.EMFILE, "Too many open files")
    with pytest.raises(OSError, match="Too many open files") as caught:
        Forkable().share(in_rank(0, raising(error)), NUMBER)
    assert caught.value is error
