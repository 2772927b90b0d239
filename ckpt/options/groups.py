"""Options of the command line alone that several commands share; `ckpt.plan.groups` has those of functions, too."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, is_dataclass
from pathlib import Path
from typing import Annotated, Any

from ckpt.base.flags import HOW, Flag, Positional

PathArgument = Annotated[Path, Positional(metavar="PATH", help="A checkpoint, or the run folder it lies in.")]
JsonOption = Annotated[bool, Flag(("--json",), help="Print the result as JSON on stdout.")]
QuietOption = Annotated[bool, Flag(("-q", "--quiet"), help="Print errors and warnings of loss only.")]
VerboseOption = Annotated[bool, Flag(("-v", "--verbose"), help="Print every tensor or file.")]


@dataclass(frozen=True)
class Outcome:
    """What is done with a plan, and what is printed of it."""

    dry_run: Annotated[bool, Flag(help="Print the plan and write nothing.", section=HOW)] = False
    as_json: JsonOption = False
    quiet: QuietOption = False
    verbose: VerboseOption = False


def by_name(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of a command, with the options of its groups each by its own name."""
    return {
        name: value
        for key, argument in arguments.items()
        for name, value in (vars(argument) if is_dataclass(argument) else {key: argument}).items()
    }
