"""Hints from errors, tried like a user would.

A command in a hint is run, an option is added, in a copy of the test's folder and once for each wording. If the same
error comes again, the hint does not help. A hint without an action must match a kind in `tests.support.advice`.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import typer

from ckpt.cli import app
from tests.support import advice
from tests.support.places import REPOSITORY

#: Words for the user to fill in: `--config ORG/NAME`, `ckpt check RUN`.
_PLACEHOLDER = re.compile(r"\.\.\.|\b[A-Z][A-Z_]+\b|<\w+>|^org/name$")
_BACKTICKED = re.compile(r"`([^`]+)`")
_OPTION = re.compile(r"(?<![\w`-])(--[a-z][a-z-]+|-o)(?:[ =]([^\s,;)`']+))?")
#: Words after an option that are not its value.
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
_CLAUSE = re.compile(r"[;\n]|(?<=[.?]) ")
#: Repeatable options: one in a hint is added to the others.
_REPEATED = ("--accept-setting", "--ignore-file")
#: Marks for clauses about another program's options: Megatron-LM, pip, docker.
_OTHER_PROGRAM = re.compile(
    r"[Mm]egatron|NeoX|-parallel-size|pip install|container|train(?:ed|ing)? with|hf download|save (?:it|them) with --"
)
#: A test's folder, or one of a fixture. xdist has one folder for each worker.
_TEST_FOLDER = re.compile(r"/\S*?/pytest-\d+/(?:popen-gw\d+/)?(?:module\d+/)?[^/\s]+")
#: Commands with a dry run.
_DRY = ("convert", "merge-lora")
#: Commands that talk to a server, serve a folder, or wait for an answer.
_NOT_RUN = ("push", "mount", "doctor", "clean")
#: Largest test folder to copy for a trial, in bytes.
_MAX_COPIED = 64 << 20
_MAX_TRIED = 6
#: Parallel sizes to try if a hint asks for another one.
SIZES = (1, 2, 3, 4, 8)

#: Runs a command in a folder, and returns its stderr.
Run = Callable[[list[str], Path | None], str]

_tried: set[str] = set()
_numbers = itertools.count()
_is_trying = False
#: File for one JSON line per wording, if `pytest --hints` asks for it.
record_file: str | None = None


@dataclass(frozen=True)
class Told:
    """An error: its first line and its hint."""

    what: str
    hint: str


@dataclass(frozen=True)
class Trial:
    """Action that a hint proposes. `run` returns the next error, "" if there is none, or None if it could not run."""

    said: str
    run: Callable[[], str | None]


def told(err: str) -> Told | None:
    """Return the error at the end of a command's output, or None if it has no hint."""
    found = re.search(r"^error: (.*?)$(?:.*?)^hint: (.*)\Z", err, re.DOTALL | re.MULTILINE)
    return Told(found[1], found[2].strip()) if found else None


def is_trying() -> bool:
    """Return True while a hint is tried."""
    return _is_trying


def check(place: str, error: Told, problems: Sequence[str], trials: Callable[[], Iterable[Trial]]) -> None:
    """Raise AssertionError if a trial ends with the same error, or if a hint without trials is of no known kind."""
    global _is_trying
    wording = re.sub(r"\d+|/\S+", "N", f"{place}: {error.what}: {error.hint}")
    if wording in _tried:
        return
    _tried.add(wording)
    _is_trying = True
    problems, tried, proposed = [*problems], [], []
    began = time.perf_counter()
    try:
        for trial in itertools.islice(trials(), _MAX_TRIED):
            proposed.append(trial.said)
            if (again := trial.run()) is not None:
                tried.append(trial.said)
                if again == error.what:
                    problems.append(f"{trial.said} ends with the same error")
    finally:
        _is_trying = False
    kind = None if tried else "not tried here" if proposed else advice.kind(error.hint)
    if not tried and kind is None:
        problems.append("nothing to try, and of no kind in tests/support/advice.py")
    if record_file is not None:
        seconds = round(time.perf_counter() - began, 3)
        line = {
            "place": place,
            "what": error.what,
            "hint": error.hint,
            "tried": tried,
            "kind": kind,
            "seconds": seconds,
        }
        with open(record_file, "a", encoding="utf-8") as file:
            file.write(json.dumps(line | {"problems": problems}) + "\n")
    assert not problems, f"{place}: {error.what}\nhint: {error.hint}\n" + "\n".join(problems)


def check_hint(args: Sequence[str], cwd: Path | None, err: str, run: Run) -> None:
    """Raise AssertionError if the hint in `err`, printed by `ckpt ARGS`, does not help."""
    error = told(err)
    if error is None or _is_trying or not args or "--json" in args:
        return
    words = [str(arg) for arg in args]
    unknown = [f"`ckpt {words[0]}` has no option {name}" for name in _unknown_options(words[0], error.hint)]
    check(f"ckpt {words[0]}", error, unknown, lambda: _trials(words, cwd, error, run))


def _unknown_options(command: str, hint: str) -> list[str]:
    known = _options(command)
    named = [one for one in ("convert", "merge-lora") if one in hint]
    elsewhere = {name for one in named for name in _options(one)}
    return [name for name in options_in(hint) if known and name not in known.keys() | elsewhere]


def _trials(args: list[str], cwd: Path | None, error: Told, run: Run) -> Iterator[Trial]:
    """Yield each command in the hint, and the failed one with each option in the hint."""
    if error.what.startswith("unknown option "):  # the hint suggests the right option
        args = [word for word in args if word.partition("=")[0] != error.what.rpartition(" ")[2]]
    known, outside = _options(args[0]), without_backticks(error.hint)
    commands = [shlex.split(text)[1:] for text in commands_in(error.hint)]
    dropped = re.findall(r"(?:without|leave out|leave) (--[a-z-]+)", outside)
    commands += [_without(args, name) for name in dropped if name in args]
    args = functools.reduce(_without, dropped, args)
    other = re.findall(r"(?:another|a smaller) (--(?!max-)[a-z-]+)(?! NAME)", outside)
    options = {name: values for name, values in options_in(error.hint).items() if name not in (*dropped, *other)}
    for name in options.keys() & known.keys():
        values = list(filter(None, options[name]))
        if known[name]:
            commands.append([*args, name])
        elif f" or {name} " in outside:
            commands += [[*_without(args, name), name, value] for value in values]
        elif values:
            second = [f"{name[:-2]}-b", values[0]] if name.endswith("-a") else []
            kept = args if name in _REPEATED else _without(args, name)
            commands.append([*kept, *(word for value in values for word in (name, value)), *second])
    for meant in meant_words(error.hint):
        wrong = wrong_word(error.what, args)
        commands += [[meant if word == wrong else word for word in args]] if wrong else []
    if re.search(r"\b(?:an)?other (?:folder|place|name)\b.*-o\b", outside):
        commands.append([*_without(args, "-o"), "-o", str(unused([*args, str(cwd or "")]))])
    for path in paths_in(error.hint, args, cwd or Path.cwd()):
        source = next((word for word in args if Path(word).with_suffix("") == Path(path).with_suffix("")), None)
        source = source or next((word for word in reversed(args) if os.path.exists((cwd or Path.cwd()) / word)), None)
        commands += [[path if word == source else word for word in args]] if source else []
    for words in commands:
        if can_be_tried(words):
            yield Trial(f"`ckpt {shlex.join(words)}`", functools.partial(_next_error, words, cwd, run, args))
    for name in other:
        tried = [[*_without(args, name), name, str(size)] for size in SIZES]
        again = functools.partial(
            first_other, error.what, [functools.partial(_next_error, one, cwd, run) for one in tried]
        )
        yield Trial(f"{name} {', '.join(map(str, SIZES))}", again)


def meant_words(hint: str) -> list[str]:
    """Return the words a hint suggests: `did you mean hf?`."""
    found = re.findall(r"did you mean ([^?]+)\?|this looks like (.*)", hint)
    return [word for pair in found for word in re.split(r", | or ", "".join(pair).strip())]


def wrong_word(what: str, words: Sequence[str]) -> str | None:
    """Return the command's word quoted in its error or at its end."""
    quoted = re.findall(r"'([^']*)'|(\S+)$|^no (\S+) checkpoint", what)
    return next((word for pair in quoted for word in pair if word in words), None)


def paths_in(hint: str, words: Iterable[str], cwd: Path) -> list[str]:
    """Return the paths in a hint that asks for another path: absolute, relative, or relative to one of `words`."""
    if not re.search(r"\bgive\b|such as|is in ", hint):
        return []
    places = [cwd, *(cwd / word for word in words if os.path.isdir(cwd / word))]
    elsewhere = re.sub(r"\bcopy of \S+", "", without_backticks(hint))
    found = [token.strip("`'\"(),;:.?") for token in elsewhere.split()]
    there = [
        place / token
        for token in found
        if "/" in token or "." in token or "-" in token or "_" in token
        for place in places
        if os.path.exists(place / token)
    ]
    return [str(path) for path in dict.fromkeys(there)]


def unused(words: Sequence[str]) -> Path:
    """Return an unused path in the test's folder, found in `words` or the working directory."""
    folders = [found for text in (*words, os.getcwd()) for found in _TEST_FOLDER.findall(text)]
    return Path(folders[0] if folders else "/nonexistent") / f"hint-output-{next(_numbers)}"


def _next_error(words: list[str], cwd: Path | None, run: Run, failed: Sequence[str] = ()) -> str | None:
    printed = try_command(words, cwd, run, failed)
    return None if printed is None else getattr(told(printed), "what", "")


def first_other(what: str, calls: Sequence[Callable[[], str | None]]) -> str | None:
    """Return the first result that differs from the error `what`, or `what` if every call ends with it."""
    return next((again for call in calls if (again := call()) != what), what)


def commands_in(hint: str) -> list[str]:
    """Return ckpt commands in a hint: lines of their own, and in backticks."""
    lines = [line.strip() for line in hint.splitlines()]
    return [text for text in (*lines, *_BACKTICKED.findall(hint)) if text.startswith("ckpt ")]


def without_backticks(hint: str) -> str:
    """Return a hint without its commands and without backticks around options."""
    lines = [line for line in hint.splitlines() if not line.strip().startswith("ckpt ")]
    return _BACKTICKED.sub(lambda found: found[0] if found[1].startswith("-") else " ", "\n".join(lines)).replace(
        "`", " "
    )


def options_in(hint: str) -> dict[str, list[str]]:
    """Return the options in a hint, each with its possible values. Skip other programs' options."""
    options: dict[str, list[str]] = {}
    for clause in _CLAUSE.split(without_backticks(hint)):
        if not _OTHER_PROGRAM.search(clause.strip()):
            for name, text in _OPTION.findall(clause):
                options.setdefault(name, []).append(_value(text))
    return options


def _value(text: str) -> str:
    """Return the value after an option in a hint, or "" if it is an ordinary word."""
    value = text.strip("?.")
    return "" if value in _WORDS else value


def _without(args: list[str], option: str) -> list[str]:
    """Return the arguments without `option` and its value."""
    if option not in args:
        return args
    at = args.index(option)
    return [*args[:at], *args[at + (1 if _options(args[0]).get(option) else 2) :]]


def can_be_tried(words: list[str]) -> bool:
    """Return False for a command with words to fill in, or if it reaches outside the test."""
    return bool(words) and words[0] not in _NOT_RUN and not any(map(_PLACEHOLDER.search, words))


def try_command(words: list[str], cwd: Path | None, run: Run, failed: Sequence[str] = ()) -> str | None:
    """Run a command on a copy of the test's folder. Return its stderr, or None if it can't be run.

    A command without arguments runs inside the folder named by `failed`: the repository holds every fixture.
    """
    inside = failed if len(words) == 1 and cwd is None else ()
    if words[0] in _DRY and "--dry-run" not in words:
        words = [*words, "--dry-run"]
    with copied(" ".join([*words, *inside, str(cwd or "")]), enter=bool(inside)) as moved:
        if moved is None or (words[0] == "resume" and not moved.is_copy):
            return None
        return run([moved(word) for word in words], Path(moved(str(cwd))) if cwd else None)


@dataclass(frozen=True)
class Moved:
    """Copy of a test's folder. Calling it replaces the folder's paths in a text."""

    folder: str
    copy: str

    @property
    def is_copy(self) -> bool:
        return self.folder != self.copy

    def holds(self, text: str) -> bool:
        return text.startswith(self.copy)

    def __call__(self, text: str) -> str:
        return text.replace(self.folder, self.copy) if self.is_copy and self.copy not in text else text


@contextlib.contextmanager
def copied(text: str, enter: bool = False) -> Iterator[Moved | None]:
    """Copy the test's folder, named in `text` or the working directory. Yield None if it is too large.

    `enter` makes the copy the working directory.
    """
    before = os.getcwd()
    folders = {found for found in _TEST_FOLDER.findall(f"{text} {before}") if os.path.isdir(found)}
    if len(folders) > 1 or not all(map(_can_be_copied, folders)):
        yield None
        return
    if not folders:
        yield Moved("", "")
        return
    folder = folders.pop()
    copy = f"{folder}-hint{next(_numbers)}"
    shutil.copytree(folder, copy, symlinks=True)
    try:
        if enter or before.startswith(folder):
            os.chdir(before.replace(folder, copy, 1) if before.startswith(folder) else copy)
        yield Moved(folder, copy)
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
    """Return the options of a command, each True if it takes no value; empty if the command is unknown."""
    group = typer.main.get_command(app)
    found = group.get_command(None, command)
    if found is None:
        return {}
    flags = {name for one in found.params if getattr(one, "is_flag", False) for name in one.opts}
    # outside the test's folder: its defaults may be wrong on purpose
    env = {name: value for name, value in os.environ.items() if not name.startswith("CKPT_")}
    env["PYTHONPATH"] = str(REPOSITORY)
    words = [sys.executable, "-m", "ckpt", command, "--help"]
    printed = subprocess.run(words, cwd=REPOSITORY, env=env, capture_output=True, text=True, check=False)
    return {name: name in flags for name in re.findall(r"(?<![\w-])(--?[a-z][a-z-]*)", printed.stdout)}
