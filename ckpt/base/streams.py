"""Standard streams that may be closed or full. Importing it is light: an interrupt then would show a traceback."""

from __future__ import annotations

import contextlib
import io
import json
import os
import select
import sys
from typing import TextIO

INTERRUPTED, READER_LEFT, TERMINATED = 130, 141, 143
#: stdout only says where the files are.
work_is_files = False


class TerminatedError(KeyboardInterrupt):
    """SIGTERM. It ends a command like Ctrl-C."""


#: True if the user's defaults turn on `--json`.
json_by_default = False


def wants_json() -> bool:
    """Return True if `--json` is on. Errors are then one JSON object, the last line of stderr."""
    return json_by_default or "--json" in sys.argv[1:]


def say_ended(interrupt: KeyboardInterrupt) -> int:
    is_terminated = isinstance(interrupt, TerminatedError)
    code, name = (TERMINATED, "terminated") if is_terminated else (INTERRUPTED, "interrupted")
    what = " ".join(map(str, interrupt.args)) or "interrupted; the destination is unchanged"
    notes = getattr(interrupt, "__notes__", ())
    if wants_json():
        from ckpt.base.errors import json_error  # imported late: an interrupt may come during this import

        print(json.dumps(json_error(name, what, code, hint="; ".join(notes) or None)), file=sys.stderr)
    else:
        print(what, *notes, sep="\n", file=sys.stderr)
    return code


class _Unfailing(io.RawIOBase):
    """A descriptor that never fails: bytes it cannot write are lost."""

    is_used = False

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor

    def writable(self) -> bool:
        return True

    def fileno(self) -> int:
        return self._descriptor

    def isatty(self) -> bool:
        return os.isatty(self._descriptor)

    def write(self, data: object) -> int:
        view = memoryview(data).cast("B")  # type: ignore[arg-type]
        size = len(view)
        self.is_used = True
        with contextlib.suppress(OSError):
            while view:
                view = view[os.write(self._descriptor, view) :]
        return size


def prepare() -> None:
    """Reopen closed streams and make stderr unfailing. Call it first, or a file may take a closed stream's number."""
    for descriptor in range(3):
        try:
            os.fstat(descriptor)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # takes the lowest free number
    if sys.stdout is None:
        sys.stdout = io.TextIOWrapper(_Unfailing(1), "utf-8", "backslashreplace")
    encoding = getattr(sys.stderr, "encoding", None) or "utf-8"
    sys.stderr = io.TextIOWrapper(
        _Unfailing(2),
        encoding,
        "backslashreplace",
        line_buffering=True,
        write_through=True,
    )


def flush_output() -> str | None:
    """Return the reason if the output could not be written, None on success or if the reader left."""
    try:
        sys.stdout.flush()
    except OSError as error:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        return None if isinstance(error, BrokenPipeError) else error.strerror
    closed = getattr(sys.stdout, "buffer", None)
    if isinstance(closed, _Unfailing) and closed.is_used and not work_is_files:
        return "it is closed"
    return None


def code_of_reader() -> int | None:
    """Return the exit code if our output's reader has left (SIGPIPE).

    The code is 0 if the command's result is its files: they are complete before anything is printed.
    """
    poller = select.poll()
    poller.register(1, 0)
    if not any(event & select.POLLERR for _, event in poller.poll(0)):
        return None
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    return 0 if work_is_files else READER_LEFT


def coloured(stream: TextIO) -> bool:
    """Return True for a colour terminal unless `NO_COLOR` is set (https://no-color.org)."""
    return stream.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"


def width_of(stream: TextIO) -> int | None:
    """Return None for a file or a pipe: they get unfolded lines."""
    if not stream.isatty():
        return None
    import shutil

    return shutil.get_terminal_size().columns


def folded(line: str, stream: TextIO | None = None) -> str:
    width = width_of(stream or sys.stderr)
    if width is None or len(line) <= width:
        return line
    import textwrap

    indent = " " * (len(line) - len(line.lstrip()) + 2)
    fold = textwrap.TextWrapper(width, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False)
    return fold.fill(line) or line
