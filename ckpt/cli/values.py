"""Option values: the user's defaults, and a faster conversion of typed words.

Defaults come from the environment, `CKPT_CONVERT_MAX_MEMORY=4GB`, or from a table in pyproject.toml:

    [tool.ckpt.convert]
    max-memory = "4GB"

The command line comes first, then the environment, then the nearest pyproject.toml from the working directory upward.
Python functions ignore both. typer 0.29 builds a pydantic validator for every parameter, in 0.15 s; plain values need
none.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

from typer.core import TyperArgument, TyperOption

from ckpt import commands
from ckpt.base.errors import UsageError
from ckpt.base.flags import short_dtype
from ckpt.base.text import did_you_mean

FILE, TABLE = "pyproject.toml", "tool.ckpt"
#: A file can't set these, since it may be somebody else's: they write, replace or upload.
_ASKED_ONLY = frozenset(
    {
        *("output", "overwrite", "restart", "accept-base"),
        *("push", "repo-id", "private", "revision", "create-pr", "commit-message"),
    }
)


def of_command(name: str, params: list[Any]) -> dict[str, Any]:
    """Return the user's defaults by parameter name, or raise UsageError for an unknown command or option."""
    known = {opt.lstrip("-"): one for one in params for opt in one.opts if opt[:2] == "--"}
    known.pop("help", None)
    found: dict[str, Any] = {}
    path, tables = _tables()
    for key, value in tables.get(name, {}).items():
        option = _known(key, known, f"[{TABLE}.{name}] in {path}")
        if option in _ASKED_ONLY:
            raise UsageError(
                f"--{option} can't be set in a file: somebody else may have written it",
                path=path,
                found=f"{key}, [{TABLE}.{name}]",
                hint="remove it from the file, and set it on the command line or in the environment",
                code="unknown-default",
            )
        found[known[option].name] = value
    prefix = f"CKPT_{name.replace('-', '_').upper()}_"
    for variable, text in os.environ.items():
        if variable.startswith(prefix):
            key = variable.removeprefix(prefix).lower()
            param = known[_known(key, known, f"the environment: {variable}")]
            found[param.name] = text.split() if param.multiple else text
    return found


def _known(key: str, known: Mapping[str, Any], where: str) -> str:
    option = key.replace("_", "-")
    if option not in known:
        raise UsageError(
            "unknown option",
            expected="one of the command's options",
            found=f"{key}, {where}",
            hint=did_you_mean(option, list(known)),
            code="unknown-default",
        )
    return option


def _tables() -> tuple[Path | None, dict[str, dict[str, Any]]]:
    try:
        here = Path.cwd()
    except FileNotFoundError:  # the current folder was removed
        return None, {}
    path = next((place / FILE for place in (here, *here.parents) if os.path.isfile(place / FILE)), None)
    try:
        text = path.read_text("utf-8", "replace") if path else ""
    except OSError as error:
        what = "can't read the file with default options"
        raise UsageError(what, path=path, found=error.strerror) from None
    if not re.search(r"^\[?\s*\[\s*tool\s*\.\s*ckpt\b(?!-)", text, re.MULTILINE):
        return path, {}
    try:
        import tomllib
    except ModuleNotFoundError:  # Python 3.10
        import tomli as tomllib  # type: ignore[no-redef,import-not-found,unused-ignore]

    try:
        tables = tomllib.loads(text).get("tool", {}).get("ckpt", {})
    except tomllib.TOMLDecodeError as error:
        raise UsageError("invalid TOML", path=path, found=str(error)) from None
    if not isinstance(tables, dict):
        raise UsageError(
            f"[[{TABLE}]] is not a table", path=path, expected=f"[{TABLE}.convert]", code="unknown-default"
        )
    known = commands.places()
    for name, table in tables.items():
        if name not in known or not isinstance(table, dict):
            own = [one.name for one in commands.all_commands()]  # in help order
            meant = None if name in known else did_you_mean(name, own)
            hint = meant or f"put options in their command's table, as in [{TABLE}.convert]"
            expected = f"a table for a command: {', '.join(own)}"
            what = f"[{TABLE}] has no {name!r}"
            raise UsageError(what, path=path, expected=expected, hint=hint, code="unknown-default")
    return path, tables


class QuickOption(TyperOption):
    def process_value(self, ctx: Any, value: Any) -> Any:
        return _processed(self, ctx, value, super().process_value)


class QuickArgument(TyperArgument):
    def process_value(self, ctx: Any, value: Any) -> Any:
        return _processed(self, ctx, value, super().process_value)


def quicken(params: Sequence[Any]) -> None:
    kinds: dict[type, type] = {TyperOption: QuickOption, TyperArgument: QuickArgument}
    for param in params:
        param.__class__ = kinds.get(type(param), type(param))


def _processed(param: Any, ctx: Any, value: Any, process: Callable[[Any, Any], Any]) -> Any:
    """Let typer's `process` convert other values, and explain errors. Dtype options also take `bfloat16`."""
    value = short_dtype(value) or value if param.name.endswith("dtype") else value
    plain = _plain(param, value) if hasattr(param, "type_descriptor") else ...  # only since typer 0.29
    if plain is ... or (param.required and param.value_is_missing(plain)):
        return process(ctx, value)
    return plain if param.callback is None else param.callback(ctx, param, plain)


def _plain(param: Any, value: Any) -> Any:
    """Return ... if typer must handle the value."""
    annotation, is_one = param.type_descriptor.annotation, param.nargs == 1
    if param.multiple and not value:
        return param.default
    if annotation == list[str]:
        return list(value or ())
    if is_one and not param.multiple:
        if value is None or value is param.default:
            return value
        if annotation is str and isinstance(value, str):
            return value
        if annotation is int and isinstance(value, str) and re.fullmatch("[0-9]{1,9}", value):
            info = param.type_descriptor.parameter_info
            if (info.min or 0) <= int(value) <= (10**9 if info.max is None else info.max):
                return int(value)
        is_place = annotation is Path and isinstance(value, str | Path) and "\0" not in str(value)
        if is_place and (os.access(value, os.R_OK) or not os.path.exists(value)):
            return Path(value)
        if get_origin(annotation) is Literal and value in get_args(annotation):
            return value
    return ...
