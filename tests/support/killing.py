"""Processes killed before their Nth system call, and system calls that fail."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Callable, Iterator
from typing import Any

from ckpt.move import files

#: Calls that change the disk, and the calls around them.
CALLS = ("mkdir", "open", "ftruncate", "pwrite", "fsync", "rename", "unlink", "rmdir", "close", "scandir")


class Killer:
    """Kills this process (`kill -9`) before its Nth system call."""

    def __init__(self, number: int) -> None:
        self.left = number
        self.lock = threading.Lock()

    def call(self, real: Callable[..., Any]) -> Callable[..., Any]:
        def counted(*args: Any, **kwargs: Any) -> Any:
            with self.lock:
                self.left -= 1
                if not self.left:
                    os.kill(os.getpid(), signal.SIGKILL)
            return real(*args, **kwargs)

        return counted


def killed_before_call(number: int, action: Callable[[], None]) -> bool:
    """Run `action` in a child killed before its Nth call. Return False if it ended earlier."""
    child = os.fork()
    if not child:
        status = 1
        try:
            os.fsync = lambda descriptor: None  # a killed process loses no written data
            killer = Killer(number)
            for name in CALLS:
                setattr(os, name, killer.call(getattr(os, name)))
            files._exchange = killer.call(files._exchange)
            action()
            status = 0
        finally:
            os._exit(status)
    _, ended = os.waitpid(child, 0)
    if os.WIFSIGNALED(ended):
        assert os.WTERMSIG(ended) == signal.SIGKILL
        return True
    assert os.WEXITSTATUS(ended) == 0, "the process failed where it should have been killed or gone on"
    return False


@contextlib.contextmanager
def failing_at_call(name: str, number: int, code: int) -> Iterator[None]:
    """Let call `number` to `os.NAME` in this process fail with the error `code`; `close` still closes."""
    real, left, lock = getattr(os, name), number, threading.Lock()

    def counted(*args: Any, **kwargs: Any) -> Any:
        nonlocal left
        with lock:
            left -= 1
            is_due = left == 0
        if is_due and name != "close":
            raise OSError(code, os.strerror(code))
        done = real(*args, **kwargs)
        if is_due:
            raise OSError(code, os.strerror(code))
        return done

    setattr(os, name, counted)
    try:
        yield
    finally:
        setattr(os, name, real)
