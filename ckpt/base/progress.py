"""Progress: a bar on a terminal, otherwise a line every ten seconds."""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import time
from typing import Any

from ckpt.base.text import show_size

_EVERY = 10.0  # seconds
_DELAY = 0.5  # seconds, so that short commands and most errors show no bar
#: Held while the bar's thread imports: a process forked in between could never import the same modules.
IMPORTING = threading.Lock()


class Meter:
    """Progress of one phase. Call it with the number of bytes done since the last call.

    It shows elapsed time if `total` is 0.
    """

    def __init__(self, total: int, phase: str, *, quiet: bool) -> None:
        self.phase(phase, total)
        self._bar: Any = None
        self._lock = threading.Lock()
        self._end = threading.Event()
        if not quiet:
            is_terminal = sys.stderr.isatty() and os.environ.get("TERM") != "dumb"
            threading.Thread(target=self._show_bar if is_terminal else self._print_lines, daemon=True).start()

    def __call__(self, count: int) -> None:
        self._done += count

    def phase(self, name: str, total: int = 0) -> None:
        self._phase, self._start, self._done = name, time.monotonic(), 0
        self.expect(total)

    def expect(self, total: int) -> None:
        self._total = total

    def say(self, line: str) -> None:
        with self._lock:
            if self._bar is None:
                print(line, file=sys.stderr)
            else:
                self._bar.console.print(line, markup=False, highlight=False, soft_wrap=True)

    def close(self) -> None:
        self._end.set()
        with self._lock:
            if self._bar is not None:
                self._bar.stop()
                self._bar = None

    def line(self) -> str:
        seconds = max(time.monotonic() - self._start, 1e-3)
        if not self._total or not self._done:
            return f"{self._phase}: {seconds:.0f} s"
        done, rate = f"{show_size(self._done)} of {show_size(self._total)}", self._done / seconds
        return f"{self._phase}: {done}, {show_size(int(rate))}/s, {(self._total - self._done) / rate:.0f} s left"

    def _print_lines(self) -> None:
        while not self._end.wait(_EVERY):
            print(self.line(), file=sys.stderr)

    def _show_bar(self) -> None:
        if self._end.wait(_DELAY):
            return
        with IMPORTING:
            from rich.console import Console
            from rich.live import Live

        with self._lock, IMPORTING:
            if self._end.is_set():
                return
            plain: dict[str, Any] = {"redirect_stdout": False, "redirect_stderr": False}
            self._bar = Live(get_renderable=self._renderable, console=Console(file=sys.stderr), transient=True, **plain)
            self._bar.start()

    def _renderable(self) -> Any:
        from rich.progress_bar import ProgressBar
        from rich.table import Table
        from rich.text import Text

        row = Table.grid(padding=(0, 1))
        bar = ProgressBar(self._total or None, self._done, width=30, pulse=not self._total)
        row.add_row(Text(self.line(), no_wrap=True, overflow="ellipsis"), bar)
        return row


def progress(total: int, phase: str, *, quiet: bool) -> contextlib.closing[Meter]:
    return contextlib.closing(Meter(total, phase, quiet=quiet))
