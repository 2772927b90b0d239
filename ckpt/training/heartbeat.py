"""Heartbeats of every rank, in files that `ckpt watch` reads.

    OUTPUT/heartbeats/rank-R.json     the rank and its host, its phase and the phase's start, and a rising count
    OUTPUT/heartbeats/rank-R.stack    the main thread's stack at the last beat
    OUTPUT/heartbeats/rank-R.dump     stacks of all threads, written on SIGUSR2 or a request
    OUTPUT/heartbeats/request         touched by a watcher to get dumps from ranks on other machines

A thread beats, also while the rank waits for others. If a process is stopped or C code holds its interpreter, the beats
end.
"""

from __future__ import annotations

import faulthandler
import json
import os
import signal
import socket
import sys
import threading
import time
import traceback
from pathlib import Path
from typing import Any

FOLDER = "heartbeats"
REQUEST = "request"
DONE = "done"


class Heart:
    def __init__(self, output: Path, rank: int, world_size: int, every: float, started: float) -> None:
        """`every` is in seconds. `started` is equal on all ranks and new at each start."""
        self.folder, self.rank, self.every = output / FOLDER, rank, every
        self._main = threading.main_thread().ident or 0
        self.folder.mkdir(parents=True, exist_ok=True)
        self.facts: dict[str, Any] = {
            "rank": rank,
            "world_size": world_size,
            "pid": os.getpid(),
            "host": socket.gethostname(),
            "thread": f"0x{self._main:016x}",
            "every": every,
            "started": started,
            "beats": 0,
        }
        self.enter("starting", 0)
        self._stop = threading.Event()
        self._asked = self._request()
        self._thread = threading.Thread(target=self._run, name="heartbeat", daemon=True)

    def __enter__(self) -> Heart:
        self._dump = self.path("dump").open("w")  # signal handlers can't open files
        faulthandler.register(signal.SIGUSR2, file=self._dump, all_threads=True)
        self._beat()
        self._thread.start()
        return self

    def __exit__(self, kind: Any, *_: Any) -> None:
        self._stop.set()
        self._thread.join()
        self.enter(DONE if kind is None else f"failed: {kind.__name__}", self.facts["step"])
        self._beat()
        faulthandler.unregister(signal.SIGUSR2)
        self._dump.close()

    def enter(self, phase: str, step: int) -> None:
        self.facts |= {"phase": phase, "step": step, "since": time.time()}

    def path(self, kind: str) -> Path:
        return self.folder / f"rank-{self.rank}.{kind}"

    def _run(self) -> None:
        while not self._stop.wait(self.every):
            self._beat()
            if (requested := self._request()) != self._asked:
                self._asked = requested
                faulthandler.dump_traceback(self._dump, all_threads=True)

    def _beat(self) -> None:
        self.facts["beats"] += 1
        # A watcher that sees this beat finds a stack at least as new.
        frame = sys._current_frames().get(self._main)
        if frame is not None:
            _replace(self.path("stack"), "".join(traceback.format_stack(frame)))
        _replace(self.path("json"), json.dumps(self.facts | {"time": time.time()}) + "\n")

    def _request(self) -> int:
        try:
            return (self.folder / REQUEST).stat().st_mtime_ns
        except OSError:
            return 0


def _replace(path: Path, text: str) -> None:
    """Write a file atomically. Ignore errors such as a full disk: the watcher notices missing beats."""
    new = path.with_name(path.name + ".new")
    try:
        new.write_text(text)
        new.replace(path)
    except OSError:
        pass
