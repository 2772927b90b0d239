"""`ckpt mount`."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

from ckpt.base.errors import UsageError, printable, shown
from ckpt.base.flags import HOW, Flag, Positional
from ckpt.options import command as opt
from ckpt.options.command import CONVERT, Command
from ckpt.options.printing import say, say_source
from ckpt.plan.groups import Precision, Selection, Sharding


def mount(
    *,
    target: Annotated[
        str,
        Positional(metavar="TO", help="The format to show; see `ckpt formats`.", complete="targets"),
    ],
    path: opt.PathArgument,
    view: Annotated[Path, Positional(metavar="VIEW", help="An empty folder, or the name of a new one.")],
    selection: Selection,
    precision: Precision,
    sharding: Sharding,
    foreground: Annotated[
        bool,
        Flag(help="Serve it from this process, until it is unmounted.", section=HOW),
    ] = False,
    as_json: opt.JsonOption = False,
    quiet: opt.QuietOption = False,
    options: Mapping[str, Any],
) -> None:
    """Mount a checkpoint as a read-only folder of another format; nothing is copied.

    `fusermount3 -u VIEW` ends it.
    """
    from ckpt import api
    from ckpt.runs.plan_lines import loss_lines
    from ckpt.stores import placeholder_files

    if placeholder_files.is_standin(str(path)) and not foreground:
        hint = "--foreground serves it from this process; in a shell, add & at the end"
        raise UsageError("a store cannot be served by a background process", path=path, hint=hint)
    mounted = api.mount(path, target, view, **vars(selection), **vars(precision), **vars(sharding), **options)
    conversion = mounted.conversion  # from here on the output is true: another process will serve the files
    say_source(conversion.source, quiet=quiet)
    if not quiet:
        say(*loss_lines(conversion.to_json()))
        print(printable(f"reads as {target} at {view}; `fusermount3 -u {view}` ends it"), file=sys.stderr, flush=True)
    if as_json:
        print(shown(json.dumps(conversion.to_json(str(view)), indent=2)), flush=True)
    mounted.serve(foreground=foreground)


COMMAND = Command(
    name="mount",
    section=CONVERT,
    function=mount,
    examples=(
        ("ckpt mount hf outputs view", "a run as a folder that from_pretrained reads"),
        ("ckpt mount dcp outputs view --tag global_step2", "one step of it as torch's own format"),
    ),
    guide="views.md",
    urls=("path", "config"),
    writes=True,
    format_options=("reading", "writing"),
    place=3,
    python="ckpt.api:mount",
)
