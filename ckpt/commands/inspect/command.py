"""`ckpt inspect`."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from ckpt.base.errors import CorruptError, UnsafeError, UsageError, shown
from ckpt.base.flags import SHOWN, WRITTEN, Flag
from ckpt.base.text import pluralize
from ckpt.base.words import Message
from ckpt.commands.drawings import check_place, write
from ckpt.options import command as opt
from ckpt.options.command import LOOK, Command
from ckpt.options.printing import print_lines, print_table, terminal_width
from ckpt.plan.groups import ConfigOption, FormatOption, Only, TagOption

if TYPE_CHECKING:
    from ckpt.commands.check.checking import Checked
    from ckpt.commands.inspect.inspecting import Inspection
    from ckpt.plan.checkpoint import Checkpoint
    from ckpt.plan.tiling import Damage


@dataclass(frozen=True)
class Drawn:
    picture: Annotated[
        Path | None,
        Flag(metavar="OUT.svg", help="Draw who holds what; exit code 4 if something is damaged.", section=SHOWN),
    ] = None
    html: Annotated[
        Path | None,
        Flag(metavar="OUT.html", help="Write a page to search and zoom; exit code as --picture.", section=SHOWN),
    ] = None
    only: Annotated[Only, Flag(help="Draw only these tensors.", section=SHOWN)] = "all"
    overwrite: Annotated[bool, Flag(help="Replace an existing picture or page.", section=WRITTEN)] = False

    def check(self, checkpoint: Checkpoint) -> None:
        for place, suffix in ((self.picture, ".svg"), (self.html, ".html")):
            if place is not None:
                check_place(place, suffix, checkpoint)


def inspect(
    *,
    path: opt.PathArgument,
    format: FormatOption = "auto",
    tag: TagOption = None,
    config: ConfigOption = None,
    tensors: Annotated[bool, Flag(help="List every tensor.", section=SHOWN)] = False,
    tensor: Annotated[
        list[str] | None,
        Flag(
            metavar="NAME",
            help="List these tensors and the place of each part; patterns like '*.q_proj.weight' work; repeatable.",
            complete="tensors",
            section=SHOWN,
        ),
    ] = None,
    everything: Annotated[bool, Flag(("--all",), help="Don't shorten lists and values.", section=SHOWN)] = False,
    csv: Annotated[bool, Flag(help="Print a table as CSV, a row for each tensor.", section=SHOWN)] = False,
    drawn: Drawn,
    as_json: opt.JsonOption = False,
    quiet: opt.QuietOption = False,
) -> None:
    """Describe a checkpoint. Options draw its parts on the ranks."""
    from ckpt.commands.inspect import inspecting, overview
    from ckpt.move.listing import listed_once
    from ckpt.state.kept_dtypes import parts_error

    if drawn.picture is None and drawn.html is None and (drawn.only != "all" or drawn.overwrite):
        raise UsageError(Message("{only} and {overwrite=True} go with --picture or --html"))
    if csv and as_json:
        raise UsageError("--csv and --json can't be combined", hint="give only one")
    with listed_once():
        try:
            found = inspecting.inspect(
                path, format, tag=tag, config=config, tensors=tensors, tensor=tensor or (), everything=everything
            )
        except (CorruptError, UnsafeError):  # the table shows the other steps too
            if run := inspecting.run_of(path, tag, everything):
                if as_json:
                    print(shown(json.dumps(inspecting.run_json(run), indent=2)))
                elif not quiet:
                    _print_run(run)
                sys.stdout.flush()
            raise
        damaged = _draw(found, drawn, quiet) or parts_error(found.checkpoint, CorruptError, reads=False)
        if csv:
            print(shown(found.csv()), end="")
        elif as_json:
            print(shown(json.dumps(found.to_json(), indent=2)))
        elif not quiet:
            print_lines(found.facts(terminal_width()))
            if found.run:
                print()
                _print_run(found.run)
            if tensors:
                print()
                print_table(overview.HEADS, overview.rows(found.checkpoint), right=overview.RIGHT)
            for one in found.parts():
                print_lines(["", *one])
        if damaged is not None:
            sys.stdout.flush()
            raise damaged


def _print_run(run: Sequence[Checked]) -> None:
    from ckpt.commands.check.checking import HEADS

    print_table(HEADS, [one.row() for one in run], right=("step", "size"))


def _draw(found: Inspection, requested: Drawn, quiet: bool) -> CorruptError | None:
    """Return an error if the picture or page shows damage."""
    requested.check(found.checkpoint)
    damaged: Sequence[Damage] = ()
    if requested.html is not None:
        page, damaged = found.page(requested.only)
        write(requested.html, page, overwrite=requested.overwrite, quiet=quiet)
    if requested.picture is not None:
        from ckpt.commands.inspect.rows import picture as picture_of
        from ckpt.commands.inspect.svg import draw

        drawn = picture_of(found.checkpoint, only=requested.only)
        damaged = drawn.damaged
        write(requested.picture, draw(drawn, found.checkpoint), overwrite=requested.overwrite, quiet=quiet)
    if not damaged:
        return None
    first, count = damaged[0], len(damaged)
    what = "a tensor is not covered" if count == 1 else f"{pluralize(count, 'tensor')} are not covered"
    return CorruptError(
        f"{what} exactly once by stored parts",
        path=found.checkpoint.path,
        fqn=first.fqn,
        expected="every element covered once",
        found=f"{first.role}: {'; '.join(first.faults[:4])}",
        hint=f"see the red parts in {requested.picture or requested.html}",
    )


COMMAND = Command(
    name="inspect",
    section=LOOK,
    function=inspect,
    examples=(
        ("ckpt inspect outputs --tensor '*.q_proj.weight'", "where the files hold every part of these tensors"),
        ("ckpt inspect outputs --html outputs.html", "a page of all tensors, ranks and steps, to search and zoom"),
    ),
    guide="command-line.md",
    urls=("path", "config"),
    texts=("tensor",),
    place=1,
    python="ckpt.commands.inspect.inspecting:inspect",
)
