"""How far a command is: one bar on a terminal, elsewhere a line every ten seconds."""

from __future__ import annotations

import contextlib
import sys
import threading
import time

from ckpt.base.sizes import show_size

_EVERY = 10.0  # seconds between lines


class Meter:
    """A progress bar for bytes.  Call it with the bytes done since the last call; it shows nothing if `quiet`."""

    def __init__(self, total: int, phase: str, *, quiet: bool) -> None:
        self._total, self._phase, self._done = total, phase, 0
        self._start = time.monotonic()
        self._bar = None
        self._end = threading.Event()
        if not quiet and sys.stderr.isatty():
            from tqdm import tqdm

            self._bar = tqdm(desc=phase, total=total, unit="B", unit_scale=True, leave=False, file=sys.stderr)
        elif not quiet:
            threading.Thread(target=self._print_lines, daemon=True).start()

    def __call__(self, count: int) -> None:
        self._done += count
        if self._bar is not None:
            self._bar.update(count)

    def phase(self, name: str) -> None:
        """What begins is shown by this name; only the first and `move` are measured in bytes."""
        self._phase, self._start = name, time.monotonic()
        if name != "move":
            self._total = 0
        if self._bar is not None:
            self._bar.set_description(name)

    def say(self, line: str) -> None:
        """Print a line on stderr, above the bar where there is one."""
        if self._bar is not None:
            self._bar.write(line, file=sys.stderr)
        else:
            print(line, file=sys.stderr)

    def close(self) -> None:
        self._end.set()
        if self._bar is not None:
            self._bar.close()

    def line(self) -> str:
        """The line to show now: phase, bytes, rate and remaining time; or the time since the phase began."""
        seconds = max(time.monotonic() - self._start, 1e-3)
        if not self._total or not self._done:
            return f"{self._phase}: {seconds:.0f} s"
        done, rate = f"{show_size(self._done)} of {show_size(self._total)}", self._done / seconds
        return f"{self._phase}: {done}, {show_size(int(rate))}/s, {(self._total - self._done) / rate:.0f} s left"

    def _print_lines(self) -> None:
        while not self._end.wait(_EVERY):
            print(self.line(), file=sys.stderr)


def progress(total: int, phase: str, *, quiet: bool) -> contextlib.closing[Meter]:
    """A meter of `total` bytes on stderr; of time where that is 0."""
    return contextlib.closing(Meter(total, phase, quiet=quiet))
