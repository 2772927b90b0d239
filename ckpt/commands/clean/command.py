"""`ckpt clean`."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated

from ckpt.base.errors import shown
from ckpt.base.flags import Flag, Positional
from ckpt.options import command as opt
from ckpt.options.command import CONVERT, Command
from ckpt.options.printing import print_lines, say


def clean(
    path: Annotated[Path, Positional(metavar="[RUN]", help="The run folder.")] = Path("."),
    yes: Annotated[bool, Flag(("--yes", "-y"), help="Remove without asking.")] = False,
    as_json: opt.JsonOption = False,
) -> None:
    """Remove what ckpt left around a run: staging folders, resume copies, replaced conversions. Asks first."""
    from ckpt.commands.clean.cleaning import clean as look
    from ckpt.commands.convert.command import is_interactive

    found = look(path)
    if found.removable:
        if not yes and is_interactive():
            say(*found.lines())
            import typer

            yes = typer.confirm("remove?", err=True)
        if yes:
            found = found.remove()
    if as_json:
        print(shown(json.dumps(found.to_json(), indent=2)))
    else:
        print_lines(found.lines())
    if found.removable and not found.removed:
        print("nothing was removed; use --yes to remove without being asked", file=sys.stderr)


COMMAND = Command(
    name="clean",
    section=CONVERT,
    function=clean,
    examples=(
        ("ckpt clean outputs", "list folders that are not needed any more, and ask before they are removed"),
        ("ckpt clean outputs --yes --json", "the same in a script, without the question"),
    ),
    guide="clean.md",
    place=6,
    python="ckpt.commands.clean.cleaning:clean",
)
