"""One exception class per exit code.

    CkptError
    |- UsageError       2  the command cannot mean what it says
    |  `- SeveralRunsError  the folder of several runs was given
    |- NotFoundError    3  nothing there, or nothing that is recognised
    |- CorruptError     4  a checkpoint that is damaged or contradicts itself
    |  |- SourceGoneError  a file of it has gone while it was being read
    |  `- IncompleteError  one that was not written to its end: files are missing, empty or cut off
    |- UnsafeError      5  content that would run code or reach outside its folder
    |- LossError        6  going on would lose information
    |  |- HalfError        optimizer states without their model
    |  `- SeveralModelsError  one state dict with several models
    `- StorageError     7  the disk: no space, no permission, an I/O error

Exit code 1 is no error: `ckpt verify` found a difference.  70 is an error of ckpt itself,
130 Ctrl-C, 141 SIGPIPE, 143 SIGTERM.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Sequence
from typing import Any

from ckpt.base.words import in_python

#: Beginnings of paths that are shown as others: those of files that stand for what is in a store, as its URL.
SHOWN: dict[str, str] = {}


#: A user and a password in a URL.
_PASSWORD = re.compile(r":/{1,2}[^/\s@:]*:[^/\s@]*@")
#: Characters of a hint.  Its commands repeat paths, of at most 4,096 characters, and must not be cut.
_MAX_HINT = 20_000


class CkptError(Exception):
    """What went wrong, where, what was expected and found, and what to do about it.

    `where` is a file, optionally with a rank and an fqn; all of them may be absent.  `code` names the kind of error for
    programs and does not change from release to release; docs/errors.md lists them.
    """

    exit_code = 1
    code = "error"

    def __init__(
        self,
        what: str,
        *,
        path: str | os.PathLike[str] | None = None,
        rank: int | str | None = None,
        fqn: str | None = None,
        expected: object = None,
        found: object = None,
        hint: str | None = None,
        code: str | None = None,
    ) -> None:
        super().__init__(what)
        self.code = code or self.code
        self.what = what
        self.path = None if path is None else os.fspath(path)
        self.rank = rank
        self.fqn = fqn
        self.expected = expected
        self.found = found
        self.hint = hint

    def __reduce__(self) -> tuple[object, ...]:
        """Pickle the known parts, whatever the class's arguments are: processes send each other their errors."""
        return _restored, (type(self), self.args), self.__dict__

    def facts(self) -> dict[str, str]:
        """The parts that are known, in the order in which they are shown."""
        parts = {
            "file": self.path,
            "rank": self.rank,
            "tensor": self.fqn,
            "expected": self.expected,
            "found": self.found,
        }
        return {name: printable(str(value)) for name, value in parts.items() if value is not None}

    def to_json(self) -> dict[str, Any]:
        """The error as `--json` prints it; what is not known is null."""
        facts, hint = self.facts(), None if self.hint is None else printable(self.hint, _MAX_HINT)
        parts = {name: facts.get(name) for name in ("expected", "found")}
        where = {name: facts.get(name) for name in ("file", "rank", "tensor")}
        return json_error(self.code, printable(self.what), self.exit_code, where=where, **parts, hint=hint)

    def __str__(self) -> str:
        """The message as Python has it, `world_size` and not `--world-size`."""
        return self._text(in_python)

    def on_command_line(self) -> str:
        """The message as the command line has it."""
        return self._text(str)

    def _text(self, said: Callable[[str], str]) -> str:
        facts = {name: value if name in ("file", "tensor") else said(value) for name, value in self.facts().items()}
        lines = [said(printable(self.what)), *(f"  {name}: {value}" for name, value in facts.items())]
        if self.hint:
            lines += ["", f"hint: {said(printable(self.hint, _MAX_HINT))}"]
        return "\n".join(lines)


def json_error(code: str, what: str, exit: int, **parts: Any) -> dict[str, Any]:
    """What `--json` prints of an error: always with these names, in this order."""
    nothing = {"where": {"file": None, "rank": None, "tensor": None}, "expected": None, "found": None, "hint": None}
    return {"code": code, "what": what, **nothing, **parts, "exit": exit}


def _restored(kind: type[CkptError], args: tuple[object, ...]) -> CkptError:
    error = kind.__new__(kind)
    error.args = args
    return error


class UsageError(CkptError):
    exit_code = 2
    code = "usage"


class SeveralRunsError(UsageError):
    """A folder holds several run folders, `runs`, sorted by name; the user has to name one."""

    code = "several-runs"

    def __init__(self, path: os.PathLike[str], runs: Sequence[str | os.PathLike[str]]) -> None:
        found = ", ".join(os.path.relpath(run, path) for run in runs[:8]) + (", ..." if len(runs) > 8 else "")
        super().__init__("which run? there are several here", path=path, found=found, hint="give the folder of one")
        self.runs = tuple(os.fspath(run) for run in runs)


class NotFoundError(CkptError):
    exit_code = 3
    code = "not-found"


class CorruptError(CkptError):
    exit_code = 4
    code = "corrupt"


class SourceGoneError(CorruptError):
    """A file of the source has gone while it was being read; it may be back soon, as one of a network's folder is."""

    code = "source-gone"


class IncompleteError(CorruptError):
    """What a run that is still writing leaves, or one that was killed; its run may have an older checkpoint."""

    code = "incomplete"


class NeverWholeError(IncompleteError):
    """The trainer never saved a whole training state; a whole model or adapter lies beside what it saved of one."""

    code = "never-whole"


class UnsafeError(CkptError):
    exit_code = 5
    code = "unsafe"


class LossError(CkptError):
    exit_code = 6
    code = "loss"


class HalfError(LossError):
    """A folder or file holds only optimizer states, without the model of the same save."""

    code = "half"


class SeveralModelsError(LossError):
    """A state dict holds several models; the user has to name one of `tags`."""

    def __init__(self, what: str, *, tags: Sequence[str] = (), **facts: Any) -> None:
        super().__init__(what, **facts)
        self.tags = tuple(tags)


class StorageError(CkptError):
    exit_code = 7
    code = "storage"


def printable(text: str, limit: int = 400) -> str:
    """`text` with control characters escaped and its length bounded.

    Names come from files that somebody else wrote: they must not move the cursor, colour the terminal
    or fill the screen.
    """
    text = shown(text)
    if len(text) > limit:
        text = f"{text[:limit]}... ({len(text)} characters)"
    return "".join(c if c.isprintable() or c == "\n" else c.encode("unicode_escape").decode() for c in text)


def shown(text: str) -> str:
    """`text` with URLs for the files that stand for what is in a store, and without the passwords in URLs."""
    for path, url in SHOWN.items():
        text = text.replace(path, url)
    return _PASSWORD.sub("://***@", text) if "@" in text else text
