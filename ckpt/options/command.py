"""Command declaration, and options of several commands. `ckpt.plan.groups` has options shared with functions."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, is_dataclass
from functools import cache
from pathlib import Path
from typing import Annotated, Any, Literal, get_origin

from ckpt.base.flags import HOW, Flag, OptionGroup, Positional

GROUP = "ckpt.commands"


@dataclass(frozen=True)
class Command:
    """A command, declared in its folder's `command.py` or in another package.

    Other packages register commands in the entry-point group `ckpt.commands`, as `module:OBJECT`.

    Example:
        COMMAND = Command("greet", "Other commands", greet, (("ckpt greet outputs", "say hello"),))

    Attributes:
        name: Word on the command line, such as `merge-lora`.
        section: Title in `ckpt --help`, one of `SECTIONS` or a new one.
        function: Function that runs it. A parameter is an argument or option, in typer's notation or with a
            `ckpt.base.flags.Flag`. A dataclass parameter gives one option per field. The docstring is the help.
        examples: Commands for the end of the help, with explanations.
        guide: Documentation page.
        urls: Parameters that may be URLs.
        texts: Parameters that are never paths or URLs.
        writes: True if its result is files instead of printed text.
        format_options: Kinds of formats' options that it takes, in the parameter `options`.
        place: Position in its section, before the name.
        python: Equivalent function in the package `ckpt`, as `module:function`.
        start: Called before the options are read.
    """

    name: str
    section: str
    function: Callable[..., None]
    examples: tuple[tuple[str, str], ...]
    guide: str = "command-line.md"
    urls: tuple[str, ...] = ()
    texts: tuple[str, ...] = ()
    writes: bool = False
    format_options: tuple[Literal["reading", "writing"], ...] = ()
    place: int = 100
    python: str | None = None
    start: Callable[[], None] = lambda: None


#: In help order. New ones follow.
CONVERT, LOOK, BEFOREHAND = SECTIONS = ("Convert and go on", "Look and compare", "Know beforehand")


@cache
def split_groups(
    function: Callable[..., Any],
) -> tuple[dict[str, inspect.Parameter], dict[str, tuple[type, list[str]]]]:
    """Split groups into fields, and return the groups with their fields."""
    parameters: dict[str, inspect.Parameter] = {}
    groups: dict[str, tuple[type, list[str]]] = {}
    for name, parameter in inspect.signature(function, eval_str=True).parameters.items():
        group: Any = parameter.annotation
        if not is_dataclass(group):
            parameters[name] = parameter
            continue
        members = {
            field: one
            for field, one in inspect.signature(group, eval_str=True).parameters.items()  # type: ignore[arg-type]
            if get_origin(one.annotation) is Annotated or not issubclass(group, OptionGroup)  # type: ignore[arg-type]
        }
        groups[name] = group, list(members)  # type: ignore[assignment]
        parameters |= members
    return parameters, groups


PathArgument = Annotated[Path, Positional(metavar="PATH", help="A checkpoint or run folder.")]
JsonOption = Annotated[bool, Flag(("--json",), help="Print the result as JSON on stdout.")]
QuietOption = Annotated[bool, Flag(("-q", "--quiet"), help="Print errors and warnings of loss only.")]
VerboseOption = Annotated[bool, Flag(("-v", "--verbose"), help="Print every tensor or file.")]


@dataclass(frozen=True)
class Outcome:
    dry_run: Annotated[bool, Flag(help="Print the plan and write nothing.", section=HOW)] = False
    as_json: JsonOption = False
    quiet: QuietOption = False
    verbose: VerboseOption = False


def by_name(arguments: Mapping[str, Any]) -> dict[str, Any]:
    return {
        name: value
        for key, argument in arguments.items()
        for name, value in (vars(argument) if is_dataclass(argument) else {key: argument}).items()
    }
