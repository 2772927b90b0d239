"""`ckpt formats`."""

from __future__ import annotations

import json

from ckpt.options import command as opt
from ckpt.options.command import BEFOREHAND, Command
from ckpt.options.printing import print_table


def formats(as_json: opt.JsonOption = False, quiet: opt.QuietOption = False) -> None:
    """List the formats: what can be read and written, and what carries optimizer state."""
    from ckpt.commands.formats import formats as known

    found = known.formats()
    if as_json:
        print(json.dumps(found.to_json(), indent=2))
    elif not quiet:
        print_table(known.HEADS, found.rows())


COMMAND = Command(
    name="formats",
    section=BEFOREHAND,
    function=formats,
    examples=(
        ("ckpt formats", "a table"),
        ("ckpt formats --json", "the same for programs"),
    ),
    guide="formats.md",
    place=2,
    python="ckpt.commands.formats.formats:formats",
)
