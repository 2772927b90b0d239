"""Terminal sessions in text files: typed commands, their whole output and the exit code.

A file in `tests/golden` has many sessions. Each begins with a line `== NUMBER. TITLE` and runs in its own empty folder,
`$HERE`. `$ ` begins a command, and the lines below it are its whole output in printing order: stderr lines begin with
`! `, and `[4]` is the exit code if it is not 0.

`ckpt` runs in this process, a verb calls its function, `cd` and `export` last until the session ends, and anything else
goes to `sh`. `ckpt ... | grep x` shows part of a successful command's output. A refused command must leave every file
unchanged. CKPT_GOLDEN=write in the environment writes the real output.
"""

from __future__ import annotations

import io
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from tests.support.commands import run_in_order, snapshot
from tests.support.places import FIXTURES, REPOSITORY

GOLDEN = REPOSITORY / "tests" / "golden"
_HEAD = re.compile(r"^== \d+\. (.+)$", re.MULTILINE)
#: Text that varies by run or machine, and its placeholder in the files.
_VARIES = (
    (re.compile(r"\bin \d+\.\d s, [\d.]+ [kMGT]?B/s"), "in SECONDS, RATE"),
    (re.compile(r"\b20\d\d-\d\d-\d\d \d\d:\d\d:\d\d"), "DATE"),
    (re.compile(r"(?<=ckpt )\d+\.\d+\.\w[\w.+]*"), "VERSION"),
)


@dataclass(frozen=True)
class Session:
    """One session in a file: its title and its lines."""

    file: Path
    title: str
    lines: tuple[str, ...]

    def __str__(self) -> str:
        return f"{self.file.stem}: {self.title}"

    def typed(self) -> Iterator[tuple[str, list[str]]]:
        """Yield each command with its output lines."""
        command, shown = "", list[str]()
        for line in (*self.lines, "$ "):
            if not line.startswith("$ "):
                shown.append(line)
                continue
            if command:
                yield command, shown
            command, shown = line[2:], []


def sessions(file: Path) -> list[Session]:
    """Return a file's sessions."""
    _, *parts = _HEAD.split(file.read_text())
    found = [
        Session(file, title, tuple(line for line in lines.splitlines() if line))
        for title, lines in zip(parts[::2], parts[1::2], strict=True)
    ]
    assert len({one.title for one in found}) == len(found), f"{file}: two sessions have one title"
    return found


def play(
    session: Session,
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    verbs: Mapping[str, Callable[..., object]] | None = None,
    **places: str | Path,
) -> None:
    """Run every command of `session` in `folder` and compare the output with the file.

    `places` are variables for the commands, in capitals in the file. In the output, their names replace their values.
    """
    monkeypatch.chdir(folder)
    names = {name.upper(): str(place) for name, place in places.items()} | {
        "FIXTURES": str(FIXTURES),
        "HERE": str(folder),
    }
    for name, place in names.items():
        monkeypatch.setenv(name, place)
    hidden = {place: f"${name}" for name, place in names.items()}
    lines, is_written = list[str](), os.environ.get("CKPT_GOLDEN") == "write"
    for command, shown in session.typed():
        before = snapshot(folder) if is_written or re.fullmatch(r"\[\d+\]", (shown or [""])[-1]) else None
        code, printed = _run(command, monkeypatch, verbs or {})
        for place in sorted(hidden, key=len, reverse=True):
            printed = printed.replace(place, hidden[place])
        for pattern, word in _VARIES:
            printed = pattern.sub(word, printed)
        found = [line.rstrip() for line in printed.splitlines() if line.strip(" !")] + [f"[{code}]"] * (code != 0)
        if before is not None and code not in (0, 1):
            assert snapshot(folder) == before, f"{command}: refused, and files have changed"
        assert "Traceback" not in printed, printed
        lines += [f"$ {command}", *found]
        if not is_written:
            assert found == shown, f"$ {command}\n{printed}"
    if is_written:
        _write(replace(session, lines=tuple(lines)))


def _run(command: str, monkeypatch: pytest.MonkeyPatch, verbs: Mapping[str, Callable[..., object]]) -> tuple[int, str]:
    typed, _, filtered = command.partition(" | ")
    first, *words = shlex.split(os.path.expandvars(typed), comments=True)
    if first == "ckpt":
        monkeypatch.setattr(sys, "argv", ["ckpt", *words])  # errors repeat it
        code, printed = run_in_order(*words)
        if filtered and code in (0, 1):
            done = subprocess.run(["sh", "-c", filtered], input=printed, stdout=subprocess.PIPE, text=True, check=False)
            printed = done.stdout
        return code, printed
    if first in verbs:
        verbs[first](*words)
    elif first == "cd":
        monkeypatch.chdir(words[0])
    elif first == "export":
        name, _, value = words[0].partition("=")
        monkeypatch.setenv(name, value)
    else:
        done = subprocess.run(["sh", "-c", command], capture_output=True, text=True, timeout=60, check=False)
        assert done.returncode == 0, f"{command}: {done.stderr}"
        return 0, done.stdout
    return 0, ""


def _write(session: Session) -> None:
    """Replace the session in its file, and renumber all sessions."""
    intro, *parts = _HEAD.split(session.file.read_text())
    text = io.StringIO()
    text.write(intro.rstrip() + "\n" if intro.strip() else "")
    for number, (title, lines) in enumerate(zip(parts[::2], parts[1::2], strict=True), 1):
        body = "\n".join(session.lines) if title == session.title else lines.strip()
        text.write(f"\n== {number}. {title}\n{body}\n")
    session.file.write_text(text.getvalue().lstrip("\n"))
