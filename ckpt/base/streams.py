"""Standard streams that are closed or full: the work is done all the same, and no message lands in a file."""

from __future__ import annotations

import contextlib
import io
import json
import os
import select
import sys
from typing import TextIO

INTERRUPTED, READER_LEFT, TERMINATED = 130, 141, 143
#: True if the command's work is the files that it writes; then what it prints says only where they are.
work_is_files = False


class TerminatedError(KeyboardInterrupt):
    """SIGTERM, which ends a command as Ctrl-C does."""


#: Whether a default of the user's sets `--json`; the command line, which can only set it, too, is looked at itself.
json_by_default = False


def asks_for_json() -> bool:
    """Whether the command was given `--json`: errors are one JSON object then, on the last line of stderr."""
    return json_by_default or "--json" in sys.argv[1:]


def say_ended(interrupt: KeyboardInterrupt) -> int:
    """Say what ended a command so; its exit code."""
    is_terminated = isinstance(interrupt, TerminatedError)
    code, name = (TERMINATED, "terminated") if is_terminated else (INTERRUPTED, "interrupted")
    what = " ".join(map(str, interrupt.args)) or "interrupted; the destination is as it was"
    notes = getattr(interrupt, "__notes__", ())
    if asks_for_json():
        from ckpt.base.errors import json_error  # not before: this may be said while it is imported

        print(json.dumps(json_error(name, what, code, hint="; ".join(notes) or None)), file=sys.stderr)
    else:
        print(what, *notes, sep="\n", file=sys.stderr)
    return code


class _Unfailing(io.RawIOBase):
    """A descriptor to which writing never fails: what it does not take is lost."""

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
    """Open what is closed, so that no file is opened in its place, and let messages end nothing.  Call first of all."""
    for descriptor in range(3):
        try:
            os.fstat(descriptor)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # the lowest number that is free is this one
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
    """Flush stdout; what was wrong, where what was printed could not be written.  A reader that left is no fault."""
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
    """The exit code where whoever read our output has left: that of SIGPIPE; None where it is not so.

    It is 0 for a command whose work is what it writes, as that is done before it is printed.
    """
    asked = select.poll()
    asked.register(1, 0)
    if not any(event & select.POLLERR for _, event in asked.poll(0)):
        return None
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    return 0 if work_is_files else READER_LEFT


def coloured(stream: TextIO) -> bool:
    """Whether a stream is a terminal that takes colours: not where `NO_COLOR` is set (https://no-color.org)."""
    return stream.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"


def width_of(stream: TextIO) -> int | None:
    """Return the columns of a terminal, or None for a file or a pipe, which get whole lines."""
    if not stream.isatty():
        return None
    import shutil

    return shutil.get_terminal_size().columns


def folded(line: str, stream: TextIO | None = None) -> str:
    """Return `line` folded between words to the width of `stream` (stderr unless given), if that is a terminal."""
    width = width_of(stream or sys.stderr)
    if width is None or len(line) <= width:
        return line
    import textwrap

    indent = " " * (len(line) - len(line.lstrip()) + 2)
    fold = textwrap.TextWrapper(width, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False)
    return fold.fill(line) or line
