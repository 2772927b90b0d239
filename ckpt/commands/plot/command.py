"""`ckpt plot`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

from ckpt.base.errors import CorruptError, shown
from ckpt.base.flags import WRITTEN, Flag, Positional
from ckpt.base.text import pluralize
from ckpt.commands.drawings import check_place, write
from ckpt.options import command as opt
from ckpt.options.command import LOOK, Command


def plot(
    runs: Annotated[
        list[Path],
        Positional(metavar="RUN", help="Run folders; each is compared with the first."),
    ],
    output: Annotated[
        Path,
        Flag(("-o", "--output"), metavar="OUT.svg", help="The picture to write.", section=WRITTEN),
    ] = Path("loss.svg"),
    as_json: opt.JsonOption = False,
) -> None:
    """Draw the losses of runs over each other, and say how far apart they are."""
    from ckpt.commands.plot.curves import draw, furthest, losses_of, starts_of

    check_place(output, ".svg")
    drawn = {}
    for run in runs:
        try:
            drawn[str(run)] = starts_of(run)
        except (ValueError, KeyError) as error:
            raise CorruptError("can't read the recorded losses", path=run, found=str(error)) from error
    write(output, draw(drawn), overwrite=True, quiet=True)
    (first, starts), *others = drawn.items()
    compared: list[dict[str, Any]] = []
    for name, other in others:
        number, step, apart = furthest(losses_of(starts), losses_of(other))
        compared.append({"run": name, "with": first, "steps": number, "step": step, "apart": apart})
        where = f", furthest apart in step {step}, by {apart:.1e} of the loss" if apart else ", every loss the same"
        if not as_json:
            print(f"{name}: {pluralize(number, 'step')} in common with {first}{where}")
    print(shown(json.dumps({"picture": str(output), "compared": compared})) if as_json else output)


COMMAND = Command(
    name="plot",
    section=LOOK,
    function=plot,
    examples=(
        ("ckpt plot outputs", "the losses of a run, with a mark where it was resumed"),
        ("ckpt plot outputs others -o both.svg", "two runs over each other"),
    ),
    guide="pages.md",
    writes=True,
    place=6,
)
