"""Shared options for the command line only. `ckpt.plan.groups` has options shared with functions."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, is_dataclass
from pathlib import Path
from typing import Annotated, Any

from ckpt.base.flags import HOW, Flag, Positional

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
