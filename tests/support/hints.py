"""Hints of errors, typed as a user would type them: each one has to lead on.

Every command that a test runs and that ends with an error passes through `check_hint`. A command in the hint is run, an
option in it is added to the failed command. The same error again means that the hint does not help. It all happens in a
copy of the test's folder, and once for each wording of a hint.
"""

from __future__ import annotations

import functools
import itertools
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import typer

from ckpt.cli import app
from tests.support.places import REPOSITORY

#: Words that stand for something the user has to fill in: `--config ORG/NAME`, `ckpt check RUN`.
_PLACEHOLDER = re.compile(r"\.\.\.|\b[A-Z][A-Z_]+\b|<\w+>|^org/name$")
_BACKTICKED = re.compile(r"`([^`]+)`")
_OPTION = re.compile(r"(?<![\w`-])(--[a-z][a-z-]+|-o)(?:[ =]([^\s,;)`']+))?")
#: Words that follow an option and are not its value.
_WORDS = frozenset(
    [
        "a",
        "all",
        "and",
        "as",
        "for",
        "from",
        "gives",
        "if",
        "in",
        "is",
        "it",
        "makes",
        "merges",
        "of",
        "on",
        "or",
        "reads",
        "says",
        "takes",
        "the",
        "to",
        "too",
        "with",
    ]
)
_TEST_FOLDER = re.compile(r"/\S*?/pytest-\d+/[^/\s]+")
#: Commands that can be tried without writing.
_DRY = ("convert", "merge-lora")
#: Commands that talk to a server, serve a folder, or wait for an answer.
_NOT_RUN = ("push", "mount", "doctor", "clean")
#: Largest test folder that is copied for a trial, in bytes.
_MAX_COPIED = 64 << 20
_MAX_TRIED = 6

#: Runs a command in a folder, and returns what it prints on stderr.
Run = Callable[[list[str], Path | None], str]

_tried: set[str] = set()
_numbers = itertools.count()
_is_trying = False


@dataclass(frozen=True)
class Told:
    """An error as it is printed: its first line and its hint."""

    what: str
    hint: str


def told(err: str) -> Told | None:
    """Return the error at the end of what a command printed, or None if it has no hint."""
    found = re.search(r"^error: (.*?)$(?:.*?)^hint: (.*)\Z", err, re.DOTALL | re.MULTILINE)
    return Told(found[1], found[2].strip()) if found else None


def check_hint(args: Sequence[str], cwd: Path | None, err: str, run: Run) -> None:
    """Raise AssertionError if the hint in `err`, which `ckpt ARGS` printed, does not help."""
    global _is_trying
    error = told(err)
    if error is None or _is_trying or not args or "--json" in args:
        return
    wording = re.sub(r"\d+|/\S+", "N", f"{args[0]}: {error.what}: {error.hint}")
    if wording in _tried:
        return
    _tried.add(wording)
    _is_trying = True
    try:
        problems = list(_problems([str(arg) for arg in args], cwd, error, run))
    finally:
        _is_trying = False
    assert not problems, f"`ckpt {shlex.join(args)}` says: {error.what}\nhint: {error.hint}\n" + "\n".join(problems)


def _problems(
    args: list[str], cwd: Path | None, error: Told, run: Callable[[list[str], Path | None], str]
) -> list[str]:
    if error.what.startswith("there is no option "):  # the hint names the option that is meant
        args = [word for word in args if word.partition("=")[0] != error.what.rpartition(" ")[2]]
    problems = []
    lines = [line.strip() for line in error.hint.splitlines()]
    typed = [line for line in lines if line.startswith("ckpt ")]
    hint = "\n".join(line for line in lines if line not in typed)
    outside = _BACKTICKED.sub(lambda found: found[0] if found[1].startswith("-") else " ", hint).replace("`", " ")
    options: dict[str, list[str]] = {}
    for name, text in _OPTION.findall(outside):
        options.setdefault(name, []).append(_value(text))
    known = _options(args[0])
    if known and not _is_about_training(hint):
        named = [one for one in ("convert", "merge-lora") if one in hint]
        elsewhere = {name for one in named for name in _options(one)}
        problems += [f"`ckpt {args[0]}` has no option {name}" for name in options if name not in {*known, *elsewhere}]
    typed += [text for text in _BACKTICKED.findall(hint) if text.startswith("ckpt ")]
    trials = [shlex.split(text)[1:] for text in typed]
    dropped = re.findall(r"(?:without|leave out|leave) (--[a-z-]+)", hint)
    for name in options.keys() & known.keys() - {*dropped}:
        values = list(filter(None, options[name]))
        if known[name]:
            trials.append([*args, name])
        elif f" or {name} " in outside:
            trials += [[*_without(args, name), name, value] for value in values]
        elif values:
            other = [f"{name[:-2]}-b", values[0]] if name.endswith("-a") else []
            trials.append([*_without(args, name), *(word for value in values for word in (name, value)), *other])
    for words in trials[:_MAX_TRIED] if not _is_about_training(hint) else ():
        if not _can_be_tried(words):
            continue
        again = _try(words, cwd, run)
        if (same := told(again)) is not None and same.what == error.what:
            problems.append(f"`ckpt {shlex.join(words)}` ends with the same error")
    return problems


def _value(text: str) -> str:
    """Return the value that follows an option in a hint, or "" if it is an ordinary word."""
    value = text.strip("?.")
    return "" if value in _WORDS else value


def _without(args: list[str], option: str) -> list[str]:
    """Return the arguments without `option` and its value."""
    if option not in args:
        return args
    at = args.index(option)
    return [*args[:at], *args[at + 2 :]]


def _can_be_tried(words: list[str]) -> bool:
    return bool(words) and words[0] not in _NOT_RUN and not any(map(_PLACEHOLDER.search, words))


def _try(words: list[str], cwd: Path | None, run: Run) -> str:
    """Run a command on a copy of the test's folder, and return what it prints on stderr."""
    text = " ".join([*words, str(cwd or ""), os.getcwd()])
    folders = {found for found in _TEST_FOLDER.findall(text) if os.path.isdir(found)}
    if words[0] in _DRY and "--dry-run" not in words:
        words = [*words, "--dry-run"]
    if len(folders) > 1 or not all(map(_can_be_copied, folders)):
        return ""
    if not folders:
        return run(words, cwd) if words[0] != "resume" else ""
    folder = folders.pop()
    copy = f"{folder}-hint{next(_numbers)}"
    shutil.copytree(folder, copy, symlinks=True)
    before = os.getcwd()
    try:
        if before.startswith(folder):
            os.chdir(before.replace(folder, copy, 1))
        return run(
            [word.replace(folder, copy) for word in words], Path(str(cwd).replace(folder, copy)) if cwd else None
        )
    finally:
        os.chdir(before)
        shutil.rmtree(copy, ignore_errors=True)


def _can_be_copied(folder: str) -> bool:
    """Return True for a small folder without pipes and devices."""
    files = [path for path in Path(folder).rglob("*") if not path.is_symlink()]
    return all(path.is_file() or path.is_dir() for path in files) and sum(map(_size, files)) <= _MAX_COPIED


def _size(path: Path) -> int:
    return path.lstat().st_size


@functools.cache
def _options(command: str) -> dict[str, bool]:
    """Return the options of a command, each True if it takes no value; empty for what is no command."""
    commands = typer.main.get_command(app)
    found = getattr(commands, "commands", {}).get(command)
    if found is None:
        return {}
    flags = {name for one in found.params if getattr(one, "is_flag", False) for name in one.opts}
    # not in the test's folder, whose defaults may be wrong on purpose
    env = {name: value for name, value in os.environ.items() if not name.startswith("CKPT_")}
    env["PYTHONPATH"] = str(REPOSITORY)
    words = [sys.executable, "-m", "ckpt", command, "--help"]
    printed = subprocess.run(words, cwd=REPOSITORY, env=env, capture_output=True, text=True, check=False)
    return {name: name in flags for name in re.findall(r"(?<![\w-])(--?[a-z][a-z-]*)", printed.stdout)}


def _is_about_training(hint: str) -> bool:
    """Return True if the hint speaks of the options of another program: Megatron-LM's, pip's, docker's."""
    return (
        re.search(r"Megatron|megatron|-parallel-size|pip install|container|train(?:ed|ing)? with|hf download", hint)
        is not None
    )
