"""Hints from public functions' errors, tried as keywords in a copy of the folder, once for each wording."""

from __future__ import annotations

import ast
import contextlib
import copy
import functools
import inspect
import os
import re
import shlex
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

import ckpt
from ckpt.api import Conversion
from ckpt.base.errors import CkptError
from ckpt.base.words import in_python
from ckpt.plan import registry
from ckpt.plan.options import options_of
from tests.support import hints
from tests.support.hints import Told
from tests.support.keywords import keyword_of
from tests.support.places import REPOSITORY

#: Public class names.
_CLASSES = ("CkptError", "StorageReader", "TrainerCallback")
#: Functions that talk to a server, serve a folder, or inspect the whole machine.
_NOT_CALLED = ("push", "mount", "doctor", "clean")
_WRITING = ("convert", "merge_lora", "run", "write")
#: Parameters used by a function to report to its caller.
_REPORTING = ("say", "progress", "phase", "expected", "describe", "group")
_KEYWORD = re.compile(r"(?<![\w.'\"-])([a-z]\w*)=('[^']*'|\d+|True|False)")
_TESTS = f"{REPOSITORY / 'tests'}{os.sep}"
#: The fault campaign makes system calls fail, so a trial would meet the same fault again.
_FAULTS = f"{_TESTS}faults{os.sep}"

_pid = os.getpid()


def watch() -> None:
    """Watch every public function in ckpt, and the methods that write a conversion."""
    for name in dir(ckpt):
        if name not in _CLASSES and (module := ckpt._module_of(name)) is not None:
            owner = import_module(module)
            setattr(owner, name, _watched(f"ckpt.{name}", getattr(owner, name)))
    for name in ("run", "write"):
        setattr(Conversion, name, _watched(f"Conversion.{name}", getattr(Conversion, name)))


def _watched(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        try:
            return function(*args, **kwargs)
        except CkptError as error:
            caller = sys._getframe(1).f_code.co_filename
            if caller.startswith(_TESTS) and not caller.startswith(_FAULTS) and _is_in_test():
                _check(name, function, args, kwargs, error)
            raise

    return call


def _is_in_test() -> bool:
    """Return False in a rank, a fork, a thread, or while a hint is tried."""
    distributed = getattr(sys.modules.get("torch"), "distributed", None)
    is_rank = distributed is not None and distributed.is_available() and distributed.is_initialized()
    return not (is_rank or hints.is_trying() or os.getpid() != _pid) and (
        threading.current_thread() is threading.main_thread()
    )


def _check(
    name: str, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], error: CkptError
) -> None:
    """Raise AssertionError if `error`'s hint does not help the caller."""
    text = error._text(in_python)
    problems = [f"it names the option {found[0]}" for found in hints.options_in(text)]
    if error.hint is None and not problems:
        return
    told = Told(error.what, in_python(error.hint or ""))

    def trials() -> Iterator[hints.Trial]:
        yield from _trials(name, function, args, kwargs, told)

    hints.check(name, told, problems + list(_unknown(name, function, error.hint or "")), trials)


def _unknown(name: str, function: Callable[..., Any], hint: str) -> Iterator[str]:
    """Yield a problem for each option in a hint unknown to the function and to the other functions in the hint."""
    taken = _parameters(function)
    for other in re.findall(r"ckpt\.(\w+)", hint):
        if callable(found := getattr(ckpt, other, None)):
            taken |= _parameters(found)
    for option in hints.options_in(hint):
        keyword = keyword_of(option)
        is_place = keyword == "output" and "destination" in taken
        if keyword not in taken and not is_place:
            yield f"{name} takes no {keyword}"


def _parameters(function: Callable[..., Any]) -> set[str]:
    found = inspect.signature(function).parameters
    taken = {*found}
    if "options" in found:
        taken |= {option.name for owner in registry.declared_options() for option in options_of(owner)}
    return taken


def _trials(
    name: str, function: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any], told: Told
) -> Iterator[hints.Trial]:
    """Yield each call and command in the hint."""
    try:
        bound = inspect.signature(function).bind(*args, **kwargs)
    except TypeError:
        return
    given = dict(bound.arguments)
    extra = given.pop("options", {})
    given |= extra if isinstance(extra, Mapping) else {"options": extra}
    short = name.rpartition(".")[2]
    outside = hints.without_backticks(told.hint)
    taken = _parameters(function)
    changes: list[dict[str, Any]] = []
    dropped = re.findall(r"(?:without|leave out|leave) ([a-z_]+)", outside)
    for found in _KEYWORD.finditer(outside):
        if found[1] in dropped:
            continue
        if found[1] in taken:
            changes.append({found[1]: _literal(found[2])})
    for meant in hints.meant_words(told.hint):
        wrong = hints.wrong_word(told.what, [*map(str, given), *map(str, given.values())])
        if wrong in given:
            changes.append({wrong: None, meant.replace("-", "_"): given[wrong]})
        changes += [{key: meant} for key, value in given.items() if wrong is not None and str(value) == wrong]
    if re.search(r"\b(?:an)?other (?:folder|place|name)\b.*\boutput\b", outside):
        changes.append({"output" if "output" in taken else "destination": _unused(given)})
    source = next(
        (
            key
            for key, value in given.items()
            if key != "self" and isinstance(value, str | Path) and os.path.exists(value)
        ),
        "",
    )
    paths = hints.paths_in(told.hint, [str(given[source])] if source else [], Path.cwd())
    changes += [{source: path} for path in paths if source]
    by_side = [change for change in changes if "from_a" in change or "from_b" in change]
    if len(by_side) == 2:
        changes = [change for change in changes if change not in by_side] + [by_side[0] | by_side[1]]
    changes += [{one: None} for one in dropped if one in given]
    if short not in _NOT_CALLED:
        for change in changes:
            wanted = {
                key: value for key, value in (given | dict.fromkeys(dropped) | change).items() if value is not None
            }
            said = ", ".join(f"{key}={value!r}" for key, value in change.items())
            yield hints.Trial(f"{name}({said})", functools.partial(_call, short, function, wanted))
        for axis in re.findall(r"(?:another|a smaller) (?!max_)(\w+)", outside):
            if axis in taken:
                calls = [functools.partial(_call, short, function, given | {axis: size}) for size in hints.SIZES]
                yield hints.Trial(
                    f"{name}({axis}=1, 2, 3, 4 or 8)", functools.partial(hints.first_other, told.what, calls)
                )
    for command in hints.commands_in(told.hint):
        words = shlex.split(command)[1:]
        if hints.can_be_tried(words):
            yield hints.Trial(command, functools.partial(_command, words, _places(given)))


def _places(given: Mapping[str, Any]) -> list[str]:
    return [str(value) for value in given.values() if isinstance(value, str | Path)]


def _unused(given: Mapping[str, Any]) -> Path:
    return hints.unused(_places(given))


def _literal(text: str) -> Any:
    return text[1:-1] if text.startswith("'") else ast.literal_eval(text)


def _command(words: list[str], failed: list[str]) -> str | None:
    from tests.support.commands import ckpt as run

    printed = hints.try_command(words, None, lambda typed, _: run(*typed).err, failed)
    return None if printed is None else getattr(hints.told(printed), "what", "")


def _call(short: str, function: Callable[..., Any], given: Mapping[str, Any]) -> str | None:
    """Return a call's error in a copy of the test's folder, "" if it works, or None if it can't be called."""
    wanted = {name: value for name, value in given.items() if name not in _REPORTING}
    with hints.copied(" ".join(_places(wanted))) as moved:
        if moved is None:
            return None
        wanted = {name: _moved(value, moved) for name, value in wanted.items()}
        if (short in _WRITING and not _writes_into(moved, wanted)) or (short == "resume" and not moved.is_copy):
            return None
        with contextlib.ExitStack() as stack:
            try:
                result = function(**wanted) if "self" not in wanted else function(wanted.pop("self"), **wanted)
                if hasattr(result, "__exit__"):
                    stack.enter_context(result)
            except CkptError as error:
                return error.what
        return ""


def _writes_into(moved: hints.Moved, given: Mapping[str, Any]) -> bool:
    place = given.get("output", given.get("destination", given.get("source", given.get("adapters"))))
    return (
        moved.is_copy and isinstance(place, str | Path) and (not Path(place).is_absolute() or moved.holds(str(place)))
    )


def _moved(value: Any, moved: hints.Moved) -> Any:
    if isinstance(value, str):
        return moved(value)
    if isinstance(value, Path):
        return Path(moved(str(value)))
    if type(value) in (list, tuple):
        return type(value)(_moved(one, moved) for one in value)
    if hasattr(value, "state_dict") and hasattr(value, "parameters"):
        return copy.deepcopy(value)  # the call would fill the model
    return value
