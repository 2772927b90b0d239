"""`ckpt diff`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from ckpt.base.flags import HOW, SHOWN, Flag, Positional
from ckpt.base.progress import progress
from ckpt.commands.drawings import HeatMap
from ckpt.options import command as opt
from ckpt.options.command import LOOK, Command
from ckpt.options.printing import conclude, open_sides, terminal_width
from ckpt.plan.groups import Only, Sides


def diff(
    *,
    a: Annotated[Path, Positional(metavar="A", help="The checkpoint before.")],
    b: Annotated[Path, Positional(metavar="B", help="The checkpoint after, in any format.")],
    sides: Sides,
    only: Annotated[Only, Flag(help="Measure only these tensors.", section=SHOWN)] = "all",
    rtol: Annotated[
        float | None,
        Flag(metavar="X", min=0, help="Allow each element to change by this fraction of its value.", section=HOW),
    ] = None,
    atol: Annotated[
        float | None,
        Flag(metavar="X", min=0, help="Allow each element to change by this amount.", section=HOW),
    ] = None,
    page: HeatMap,
    as_json: opt.JsonOption = False,
    quiet: opt.QuietOption = False,
    verbose: opt.VerboseOption = False,
) -> None:
    """Show what changed from A to B, by layer and tensor. Exit code 0, or 1 if --rtol or --atol is exceeded."""
    from ckpt import api

    one, other = open_sides(a, b, sides, quiet, verbose)
    page.check(one, other)
    with progress(0, "measure", quiet=quiet) as meter:
        report = api.diff(one, other, only=only, rtol=rtol, atol=atol, progress=meter, expected=meter.expect)
    page.write(report, quiet=quiet)
    conclude(report, report.lines(verbose, terminal_width()), as_json, quiet)


COMMAND = Command(
    name="diff",
    section=LOOK,
    function=diff,
    examples=(
        ("ckpt diff outputs outputs-hf --only weights", "how far apart two checkpoints are, by layer and tensor"),
        ("ckpt diff outputs outputs-hf --only weights --rtol 0.01", "exit code 1 where anything is further apart"),
    ),
    guide="diff.md",
    urls=("a", "b", "config"),
    place=4,
    python="ckpt.api:diff",
)
