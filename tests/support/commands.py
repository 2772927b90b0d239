"""The command line as users run it, in this process for speed, and snapshots of folders."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import io
import os
import stat
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import typer

from ckpt.cli import app, parser
from ckpt.plan import registry
from tests.support.hints import check_hint
from tests.support.places import REPOSITORY


@dataclass(frozen=True)
class Result:
    code: int
    out: str
    err: str


@functools.cache
def _command() -> Any:
    """Build `app` and each of its commands once: typer inspects every parameter, most of a short run's time."""
    setattr(parser, "_built", _built_once(parser._built))  # noqa: B010
    return typer.main.get_command(app)


def _built_once(build: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Return `build` with its results kept, as long as the installed formats declare the same options."""
    kept: dict[Any, Any] = {}

    def built(command: Any) -> Any:
        declared = tuple((owner, *formats) for owner, formats in registry.declared_options().items())
        if (command, declared) not in kept:
            kept[command, declared] = build(command)
        return kept[command, declared]

    return built


def ckpt(*args: str | Path) -> Result:
    """Run `ckpt ARGS` and return the output. Any exception except an exit propagates: a user would see a traceback."""
    out, err = io.StringIO(), io.StringIO()
    code = _run(args, out, err)
    check_hint([*map(str, args)], None, err.getvalue(), _run_for_hint)
    return Result(code, out.getvalue(), err.getvalue())


def _run_for_hint(words: list[str], cwd: Path | None) -> str:
    """Return `ckpt WORDS`'s stderr."""
    return process(*words, cwd=cwd).err if cwd is not None else ckpt(*words).err


def ckpt_in_order(*args: str | Path) -> Result:
    """Run `ckpt ARGS` with both streams in `out`, in the order of printing, like a terminal."""
    both = io.StringIO()
    return Result(_run(args, both, both), both.getvalue(), "")


def run_in_order(*args: str | Path) -> tuple[int, str]:
    """Run `ckpt ARGS` and return the exit code and all output in order; stderr lines begin with `! `."""
    both, err = io.StringIO(), io.StringIO()
    code = _run(args, both, _Marked(both, err))
    check_hint([*map(str, args)], None, err.getvalue(), _run_for_hint)
    return code, both.getvalue()


class _Marked(io.StringIO):
    """A stderr that also copies each line, marked, to another stream."""

    def __init__(self, both: io.StringIO, plain: io.StringIO) -> None:
        super().__init__()
        self.both, self.plain, self.begins = both, plain, True

    def write(self, text: str) -> int:
        self.plain.write(text)
        for line in text.splitlines(keepends=True):
            self.both.write(f"! {line}" if self.begins else line)
            self.begins = line.endswith("\n")
        return len(text)


def _run(args: Sequence[str | Path], out: io.StringIO, err: io.StringIO) -> int:
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            _command()([str(arg) for arg in args], prog_name="ckpt")
        except SystemExit as stop:
            return stop.code if isinstance(stop.code, int) else 1
    return 0


def process(*args: str | Path, script: str | None = None, cwd: Path | None = None) -> Result:
    """Run `python -m ckpt ARGS`, or a Python script with these arguments, in a new process."""
    start = ["-m", "ckpt"] if script is None else ["-c", script]
    env = os.environ | {"PYTHONPATH": str(REPOSITORY)}
    command = [sys.executable, *start, *map(str, args)]
    done = subprocess.run(command, cwd=cwd, env=env, capture_output=True, text=True, timeout=60, check=False)
    if script is None:
        check_hint([*map(str, args)], cwd, done.stderr, lambda words, place: process(*words, cwd=place).err)
    return Result(done.returncode, done.stdout, done.stderr)


def snapshot(folder: Path) -> dict[str, tuple[str, int, int]]:
    """Return content, mode and modification time for everything in `folder`, by relative path."""
    found = {}
    for path in sorted(folder.rglob("*")):
        info = path.lstat()
        if stat.S_ISREG(info.st_mode):
            content = hashlib.sha256(path.read_bytes()).hexdigest()
        else:
            content = str(path.readlink()) if path.is_symlink() else "folder"
        found[str(path.relative_to(folder))] = (content, info.st_mode, info.st_mtime_ns if content != "folder" else 0)
    return found


def contents(folder: Path) -> dict[str, str]:
    """Return a digest for every file in `folder`, by relative path."""
    return {name: content for name, (content, *_) in snapshot(folder).items()}
