"""Several threads that take jobs from one heap, or from one that is still being filled."""

from __future__ import annotations

import os
import queue
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import Generic, TypeVar

from ckpt.move.source import in_use

_Job = TypeVar("_Job")


def num_cores() -> int:
    """How many of the processor's cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def in_threads(work: Callable[[Iterator[_Job]], None], jobs: Iterable[_Job], workers: int = 0) -> None:
    """Let several threads take `jobs` one after the other; the first error of any of them is raised."""
    from concurrent.futures import ThreadPoolExecutor  # with logging, only when there is something to be done

    left: queue.SimpleQueue[_Job] = queue.SimpleQueue()
    for job in jobs:
        left.put(job)
    stop = threading.Event()

    def take() -> Iterator[_Job]:
        while not stop.is_set():
            try:
                yield left.get_nowait()
            except queue.Empty:
                return

    def run() -> None:
        try:
            work(take())
        except BaseException:
            stop.set()
            raise

    # what is in a store is waited for, and the more is asked for at a time the sooner it is there
    num_threads = workers or max(1, min(8, 8 if in_use() else num_cores()))
    with ThreadPoolExecutor(num_threads) as pool:
        try:
            for done in [pool.submit(run) for _ in range(num_threads)]:
                done.result()
        finally:
            stop.set()  # Ctrl-C: the others end after the piece in hand


class Jobs(Generic[_Job]):
    """Jobs that one thread puts and several take: up to `size`, and of heavy ones as many, up to `num_heavy` at a time.

    Iterating takes them, and ends when all are taken and no more will come.  Whoever has done a heavy one takes the
    next itself: to wake another thread for it would cost more than a job may take.
    """

    def __init__(self, size: int, num_heavy: int) -> None:
        self._size, self._num_heavy = size, num_heavy
        self._light: deque[_Job] = deque()
        self._heavy: deque[_Job] = deque()
        self._num_running = 0  # heavy ones that are being done
        self._is_closed = False
        lock = threading.Lock()
        self._more, self._room = threading.Condition(lock), threading.Condition(lock)

    def put(self, job: _Job, *, is_heavy: bool, timeout: float) -> bool:
        """Whether there was room within `timeout` seconds."""
        jobs = self._heavy if is_heavy else self._light
        with self._room:
            if not self._room.wait_for(lambda: len(jobs) < self._size, timeout):
                return False
            jobs.append(job)
            if not is_heavy or self._num_running < self._num_heavy:
                self._more.notify()
        return True

    def close(self, *, drop: bool = False) -> None:
        """Say that no more jobs will come; with `drop`, the waiting jobs are not done either."""
        with self._more:
            self._is_closed = True
            if drop:
                self._light.clear()
                self._heavy.clear()
            self._more.notify_all()

    def __iter__(self) -> Iterator[_Job]:
        is_heavy = False
        while True:
            with self._more:
                self._num_running -= is_heavy
                self._more.wait_for(lambda: self._is_closed or self._next() is not None)
                jobs = self._next()
                if jobs is None:  # what is left is taken by those who are at heavy ones
                    return
                job, is_heavy = jobs.popleft(), jobs is self._heavy
                self._num_running += is_heavy
                self._room.notify()
            yield job

    def _next(self) -> deque[_Job] | None:
        """The queue to take the next job from: a heavy job only while few enough of those run."""
        if self._heavy and self._num_running < self._num_heavy:
            return self._heavy
        return self._light or None
