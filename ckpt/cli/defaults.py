"""The user's defaults for options: `CKPT_CONVERT_MAX_MEMORY=4GB`, or a table in pyproject.toml.

    [tool.ckpt.convert]
    max-memory = "4GB"

The command line comes first, then the environment, then the nearest pyproject.toml from the working directory upward.
Python functions ignore both.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ckpt.base.errors import UsageError
from ckpt.base.text import did_you_mean
from ckpt.cli import command_registry

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
    known = command_registry.places()
    for name, table in tables.items():
        if name not in known or not isinstance(table, dict):
            commands = [one.name for one in command_registry.all_commands()]  # in help order
            meant = None if name in known else did_you_mean(name, commands)
            hint = meant or f"put options in their command's table, as in [{TABLE}.convert]"
            expected = f"a table for a command: {', '.join(commands)}"
            what = f"[{TABLE}] has no {name!r}"
            raise UsageError(what, path=path, expected=expected, hint=hint, code="unknown-default")
    return path, tables
