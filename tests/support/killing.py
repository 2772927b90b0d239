"""Processes killed before their Nth system call, and system calls that fail."""

from __future__ import annotations

import contextlib
import functools
import importlib
import operator
import os
import pickle
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

from ckpt.move import files
from tests.support.places import REPOSITORY

#: Calls that change the disk, and the calls around them.
CALLS = ("mkdir", "open", "ftruncate", "pwrite", "fsync", "rename", "unlink", "rmdir", "close", "scandir")


def in_small_process(test: Callable[..., None]) -> Callable[..., None]:
    """Let a test's body run in a new process: with all that other tests have imported, a fork takes ten times as long.

    Its arguments are pickled. What fixtures change in modules isn't there; what the body changes need not be undone.
    """

    @functools.wraps(test)
    def run(*args: Any, **given: Any) -> None:
        asked = pickle.dumps((test.__module__, test.__qualname__, args, given))
        command = [sys.executable, "-m", "tests.support.killing"]
        done = subprocess.run(command, cwd=REPOSITORY, input=asked, capture_output=True, check=False)
        assert not done.returncode, done.stderr.decode()

    return run


def main() -> None:
    """Run the body of a test that `in_small_process` was asked for."""
    importlib.import_module("tests.conftest")  # no waiting for the disk
    module, name, args, given = pickle.load(sys.stdin.buffer)
    operator.attrgetter(name)(importlib.import_module(module)).__wrapped__(*args, **given)


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


if __name__ == "__main__":
    main()
