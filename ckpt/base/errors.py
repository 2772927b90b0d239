"""One exception class per exit code.

    CkptError
    |- UsageError       2  wrong arguments or options
    |  |- SeveralRunsError  the folder of several runs was given
    |  `- UnknownArchitectureError  no table or library knows the model's tensors
    |- NotFoundError    3  a missing path, or a format ckpt doesn't know
    |- CorruptError     4  a checkpoint that is damaged or contradicts itself
    |  |- SourceGoneError  a source file disappeared during the read
    |  `- IncompleteError  an unfinished save: files are missing, empty or cut off
    |     `- NeverWholeError  the trainer saves no complete training state
    |- UnsafeError      5  content that would run code or reach outside its folder
    |- LossError        6  going on would lose information
    |  |- HalfError        optimizer states without their model
    |  `- SeveralModelsError  one state dict with several models
    `- StorageError     7  the disk: no space, no permission, an I/O error

Exit code 1 is no error: `ckpt verify` found a difference. Code 70 is an error in ckpt itself, 130 is Ctrl-C, 141
SIGPIPE, 143 SIGTERM.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Sequence
from typing import Any

from ckpt.base.words import in_python

#: URL to show in messages, by the local path prefix for a store's cached files.
SHOWN: dict[str, str] = {}


#: User and password in a URL.
_PASSWORD = re.compile(r":/{1,2}[^/\s@:]*:[^/\s@]*@")
#: A hint's commands repeat paths (up to 4,096 characters each) and must not be cut.
_MAX_HINT = 20_000


class CkptError(Exception):
    """An error with its place, the expected and found values, and a hint.

    `path` is a file, optionally with `rank` and `fqn`. `code` stays the same in every release; docs/errors.md lists all
    codes.
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
        return _restored, (type(self), self.args), self.__dict__

    def facts(self, said: Callable[[str], str] = str) -> dict[str, str]:
        """Return the known facts, in display order and in the words of `said`."""
        parts = {
            "file": self.path,
            "rank": self.rank,
            "tensor": self.fqn,
            "expected": self.expected,
            "found": self.found,
        }
        return {
            name: printable(said(value if isinstance(value, str) else str(value)))
            for name, value in parts.items()
            if value is not None
        }

    def to_json(self) -> dict[str, Any]:
        """Return the error for `--json`."""
        facts, hint = self.facts(), None if self.hint is None else printable(self.hint, _MAX_HINT)
        parts = {name: facts.get(name) for name in ("expected", "found")}
        where = {name: facts.get(name) for name in ("file", "rank", "tensor")}
        return json_error(self.code, printable(self.what), self.exit_code, where=where, **parts, hint=hint)

    def __str__(self) -> str:
        """Return the message with Python's keywords: `world_size`, not `--world-size`."""
        return self._text(in_python)

    def on_command_line(self) -> str:
        """Return the message with the command line's options."""
        return self._text(str)

    def _text(self, said: Callable[[str], str]) -> str:
        facts = (f"  {name}: {value}" for name, value in self.facts(said).items())
        lines = [printable(said(self.what)), *facts]
        if self.hint:
            lines += ["", f"hint: {printable(said(self.hint), _MAX_HINT)}"]
        return "\n".join(lines)


def json_error(code: str, what: str, exit: int, **parts: Any) -> dict[str, Any]:
    """Return an error's JSON form. Its keys are always the same."""
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
    """Several runs in one folder. `runs` lists them by name."""

    code = "several-runs"

    def __init__(self, path: os.PathLike[str], runs: Sequence[str | os.PathLike[str]]) -> None:
        found = ", ".join(os.path.relpath(run, path) for run in runs[:8]) + (", ..." if len(runs) > 8 else "")
        super().__init__("the folder has several runs", path=path, found=found, hint="give the folder of one")
        self.runs = tuple(os.fspath(run) for run in runs)


class UnknownArchitectureError(UsageError):
    """No table or library knows the tensors."""

    code = "unknown-architecture"


class NotFoundError(CkptError):
    exit_code = 3
    code = "not-found"


class CorruptError(CkptError):
    exit_code = 4
    code = "corrupt"


class SourceGoneError(CorruptError):
    """A source file disappeared during the read. It may come back, for example on a network disk."""

    code = "source-gone"


class IncompleteError(CorruptError):
    code = "incomplete"


class NeverWholeError(IncompleteError):
    """A complete model or adapter lies in the same folder."""

    code = "never-whole"


class UnsafeError(CkptError):
    exit_code = 5
    code = "unsafe"


class LossError(CkptError):
    exit_code = 6
    code = "loss"


class HalfError(LossError):
    code = "half"


class SeveralModelsError(LossError):
    """Several models in one state dict. The user has to pick one of `tags`."""

    def __init__(self, what: str, *, tags: Sequence[str] = (), **facts: Any) -> None:
        super().__init__(what, **facts)
        self.tags = tuple(tags)


class StorageError(CkptError):
    exit_code = 7
    code = "storage"


def printable(text: str, limit: int = 400) -> str:
    """Return `text` with escaped control characters and at most `limit` characters.

    Names from files must not move the cursor, colour the terminal or fill the screen.
    """
    text = shown(text)
    if len(text) > limit:
        text = f"{text[:limit]}... ({len(text)} characters)"
    return "".join(c if c.isprintable() or c == "\n" else c.encode("unicode_escape").decode() for c in text)


def shown(text: str) -> str:
    """Return `text` with URLs in place of cached store paths, and without passwords in URLs."""
    for path, url in SHOWN.items():
        text = text.replace(path, url)
    return _PASSWORD.sub("://***@", text) if "@" in text else text
