"""Worker threads for a list or a queue of jobs."""

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
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def in_threads(work: Callable[[Iterator[_Job]], None], jobs: Iterable[_Job], workers: int = 0) -> None:
    """Run `jobs` in several threads, and raise the first error."""
    left: queue.SimpleQueue[_Job] = queue.SimpleQueue()
    for job in jobs:
        left.put(job)
    if left.empty():
        return
    from concurrent.futures import ThreadPoolExecutor  # imported late: it loads logging

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

    # stores are slow to answer
    num_threads = workers or max(1, min(8, 8 if in_use() else num_cores()))
    with ThreadPoolExecutor(num_threads) as pool:
        try:
            for done in [pool.submit(run) for _ in range(num_threads)]:
                done.result()
        finally:
            stop.set()  # other threads end after their current job


class Permits:
    """A semaphore that Ctrl-C can't break.

    A Condition or Semaphore takes its lock in Python code, and keeps it if Ctrl-C comes before the next statement.
    """

    def __init__(self, number: int) -> None:
        self._free: queue.SimpleQueue[None] = queue.SimpleQueue()
        for _ in range(number):
            self.give()

    def take(self, timeout: float) -> bool:
        """Return False if none was free within `timeout` seconds."""
        try:
            self._free.get(timeout=timeout)
        except queue.Empty:
            return False
        return True

    def give(self) -> None:
        self._free.put(None)


class Jobs(Generic[_Job]):
    """Queue from one producer to several consumers, for up to `size` light and `size` heavy jobs.

    At most `num_heavy` heavy jobs run at once. A thread that finished a heavy job takes the next one itself: waking
    another thread may cost more than the job. Ctrl-C may interrupt the producer anywhere.
    """

    def __init__(self, size: int, num_heavy: int) -> None:
        self._num_heavy = num_heavy
        self._light: deque[_Job] = deque()
        self._heavy: deque[_Job] = deque()
        self._num_running = 0  # running heavy jobs
        self._is_closed = False
        self._lock = threading.Lock()
        self._more = threading.Condition(self._lock)  # entered by its lock, for the reason given in `Permits`
        self._room, self._heavy_room = Permits(size), Permits(size)

    def put(self, job: _Job, *, is_heavy: bool, timeout: float) -> bool:
        """Return False if there was no room within `timeout` seconds."""
        if not (self._heavy_room if is_heavy else self._room).take(timeout):
            return False
        with self._lock:
            (self._heavy if is_heavy else self._light).append(job)
            if not is_heavy or self._num_running < self._num_heavy:
                self._more.notify()
        return True

    def close(self, *, drop: bool = False) -> None:
        """With `drop`, discard waiting jobs."""
        with self._lock:
            self._is_closed = True
            if drop:
                self._light.clear()
                self._heavy.clear()
            self._more.notify_all()

    def __iter__(self) -> Iterator[_Job]:
        is_heavy = False
        while True:
            with self._lock:
                self._num_running -= is_heavy
                self._more.wait_for(lambda: self._is_closed or self._next() is not None)
                jobs = self._next()
                if jobs is None:  # threads with heavy jobs take the rest
                    return
                job, is_heavy = jobs.popleft(), jobs is self._heavy
                self._num_running += is_heavy
            (self._heavy_room if is_heavy else self._room).give()
            yield job

    def _next(self) -> deque[_Job] | None:
        if self._heavy and self._num_running < self._num_heavy:
            return self._heavy
        return self._light or None
