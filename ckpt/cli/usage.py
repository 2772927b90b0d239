"""Usage errors in ckpt's own form: typer's messages look different."""

from __future__ import annotations

import contextlib
import json
import re
import sys
from collections.abc import Iterator
from typing import Any

import typer

from ckpt.base import streams
from ckpt.base.errors import CkptError, UsageError

#: With the required option and the hint.
_MEANT = {
    "--bf16": ("--dtype", "--dtype bf16"),
    "--fp16": ("--dtype", "--dtype fp16"),
    "--fp32": ("--dtype", "--dtype fp32"),
    "--from": ("FROM", "the source format is the first argument, as in `ckpt convert FROM TO PATH`"),
    "--out": ("--output", "-o"),
    "--out-dir": ("--output", "-o"),
    "--output-dir": ("--output", "-o"),
}
#: Other programs' values, each with the option and the hint.
_MEANT_VALUES = {
    r"(?i)i?q[1-6]_.+|tq\d_0": (
        "--quantize",
        "llama.cpp makes this type: write with --quantize bf16, then run `llama-quantize model.gguf out.gguf {}`",
    ),
}


def say_error(error: CkptError, *more: str) -> None:
    """Print an error on stderr, or as one JSON object with `--json`."""
    if streams.wants_json():
        said = error.to_json()
        said["hint"] = "; ".join(filter(None, [said["hint"], *getattr(error, "__notes__", ())])) or None
        print(json.dumps(said), file=sys.stderr)
        return
    head = typer.style("error:", fg="red", bold=True) if streams.coloured(sys.stderr) else "error:"
    lines = f"{head} {error.on_command_line()}".split("\n")
    print(*map(streams.folded, lines), *more, sep="\n", file=sys.stderr)


@contextlib.contextmanager
def saying_usage_errors(command: str) -> Iterator[None]:
    try:
        yield
    except UsageError as error:
        say_error(error)
        raise typer.Exit(error.exit_code) from None
    except Exception as error:
        # typer raises several classes; NoArgsIsHelpError only prints the help
        if not hasattr(error, "format_message") or type(error).__name__ == "NoArgsIsHelpError":
            raise
        say_error(_ours(error, command))
        raise typer.Exit(UsageError.exit_code) from None


def _ours(error: Any, command: str) -> UsageError:
    context, message = error.ctx, error.format_message().replace("Value error, ", "", 1).strip()
    hint = f"see `{command} --help`"
    usage = context.get_usage().removeprefix("Usage: ") if context else None
    if found := re.match(r"No such option: (\S+)", message):
        near = " or ".join(sorted(getattr(error, "possibilities", None) or ()))
        hint = _foreign_option_hint(found[1], context) or (f"did you mean {near}?" if near else hint)
        return UsageError(f"unknown option {found[1]}", hint=hint)
    if found := re.match(r"No such command '(.*?)'\.?(?: Did you mean (.*?)\?)?$", message):
        hint = f"did you mean {found[2].replace(chr(39), '')}?" if found[2] else hint
        return UsageError(f"unknown command {found[1]!r}", hint=hint)
    if found := re.match(r"Missing (?:argument|option) '?(.*?)'?\.", message):
        return UsageError(f"{found[1]} is missing", expected=usage, hint=hint)
    if found := re.match(r"Got unexpected extra arguments?(?:\(s\))? \((.*)\)", message):
        what = "too many arguments"
        return UsageError(what, expected=usage, found=found[1], hint=hint)
    if found := re.match(r"Option '(.*)' requires an argument", message):
        return UsageError(f"option {found[1]} needs a value", hint=hint)
    if found := re.match(r"Invalid value for '?(.*?)'?: '(.*)' is not one of (.*?)\.?$", message, re.DOTALL):
        spelled = (
            (getattr(error.param, "metavar", None) or "").strip("<>").replace("|", ", ")
        )  # typer's own choices have hyphens
        expected = f"one of {spelled or found[3].replace(chr(39), '')}"
        hint = _foreign_value_hint(_name(found[1]), found[2]) or hint
        return UsageError(f"unknown value for {_name(found[1])}", expected=expected, found=found[2], hint=hint)
    if found := re.match(r"Invalid value for '?(.*?)'?: (?:Input should be )?(.*)", message, re.DOTALL):
        expected = found[2].partition(", unable")[0]
        return UsageError(f"invalid value for {_name(found[1])}", expected=expected, hint=hint)
    return UsageError(message, hint=hint)


def _name(hint: str) -> str:
    """Return `--output` for typer's `-o' / '--output`."""
    return hint.rpartition(" / ")[2].strip("'")


def _foreign_value_hint(option: str, value: str) -> str | None:
    """Return a hint for another program's value."""
    found = (hint for pattern, (of, hint) in _MEANT_VALUES.items() if of == option and re.fullmatch(pattern, value))
    return next(found, "").format(value.upper()) or None


def _foreign_option_hint(option: str, context: Any) -> str | None:
    needed, hint = _MEANT.get(option, (None, None))
    known = {name for one in context.command.params for name in (*one.opts, one.metavar)} if context else set()
    return hint if needed in known else None
