"""Several threads that take jobs from one heap."""

from __future__ import annotations

import os
import queue
import threading
from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar

from ckpt.move import standins

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
    num_threads = workers or max(1, min(8, 8 if standins.in_use() else num_cores()))
    with ThreadPoolExecutor(num_threads) as pool:
        try:
            for done in [pool.submit(run) for _ in range(num_threads)]:
                done.result()
        finally:
            stop.set()  # Ctrl-C: the others end after the piece in hand
