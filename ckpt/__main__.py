"""Entry point of `ckpt` and `python -m ckpt`."""

from __future__ import annotations

import gc
import json
import signal
import sys
import traceback
from types import FrameType

from ckpt.base import streams

#: Exit codes not covered by `ckpt.base.errors`.
USAGE, STORAGE, INTERNAL = 2, 7, 70


def main() -> None:
    """Run the command line. Every failure, even during imports, ends with a message and an exit code."""
    streams.prepare()
    code = _run()
    if (fault := streams.flush_output()) is not None and not code:
        print(f"error: standard output could not be written: {fault}", file=sys.stderr)
        code = STORAGE
    gc.freeze()  # only modules are left, and Python would search them for cycles before it exits
    sys.exit(code)


def _run() -> int:
    signal.signal(signal.SIGTERM, _terminate)
    # A description has millions of small objects without cycles, and collection took half of a plan's time.
    gc.set_threshold(20_000_000, 50, 1000)
    try:
        from ckpt.cli import main as run

        run()
    except SystemExit as stop:
        if isinstance(ended := getattr(stop.__context__, "__cause__", None), KeyboardInterrupt):
            return streams.say_ended(ended)  # typer turns an interrupt outside a command into exit code 130
        return stop.code if isinstance(stop.code, int) else int(stop.code is not None)
    except KeyboardInterrupt as interrupt:  # for example while commands are imported
        return streams.say_ended(interrupt)
    except Exception as error:  # the errors of ckpt already became exit codes
        return _say(error)
    return 0


def _terminate(number: int, frame: FrameType | None) -> None:
    raise streams.TerminatedError("terminated; the destination is unchanged")


def _say(error: Exception) -> int:
    """Print the error that ended the command, and return the exit code."""
    from ckpt.base.errors import json_error, printable

    name = "storage"
    if isinstance(error, MemoryError):
        what, hint, code = "there is not enough memory", "a smaller --max-memory, or fewer --workers", STORAGE
    elif isinstance(error, RuntimeError) and "start new thread" in str(error):
        what, hint, code = "the system starts no more threads", "fewer --workers", STORAGE
    elif isinstance(error, OSError):
        what, hint, code = error.strerror or str(error), "is there space, and a place to print to?", STORAGE
    elif isinstance(error, ModuleNotFoundError) and error.name == "fcntl":
        what, code, name = "ckpt does not run on Windows itself", USAGE, "usage"
        hint = "run it in WSL: `wsl --install`, then pip install it in that Linux"
    elif isinstance(error, ImportError):
        what, hint, code = f"a package cannot be imported: {error}", "is it installed, and whole?", STORAGE
    else:
        places = [f"{frame.filename}:{frame.lineno}" for frame in traceback.extract_tb(error.__traceback__)[-3:]]
        what = f"an error of ckpt itself: {type(error).__name__}: {error}\n  at: {', '.join(places)}"
        hint, code, name = "please report it with the command and these lines", INTERNAL, "internal"
    notes = getattr(error, "__notes__", ())
    if streams.wants_json():
        said = json_error(name, printable(what, 2000), code, hint="; ".join([hint, *notes]))
        print(json.dumps(said), file=sys.stderr)
    else:
        print(f"error: {printable(what, 2000)}\n\nhint: {hint}", *notes, sep="\n", file=sys.stderr)
    return code


if __name__ == "__main__":
    main()
