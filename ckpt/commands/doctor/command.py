"""`ckpt doctor`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

from ckpt.base.errors import CkptError, shown
from ckpt.base.flags import Positional
from ckpt.options import command as opt
from ckpt.options.command import BEFOREHAND, Command
from ckpt.options.printing import print_lines, terminal_width


def doctor(
    path: Annotated[
        Path | None,
        Positional(metavar="PATH", help="A checkpoint or run folder: which commands work on it?"),
    ] = None,
    as_json: opt.JsonOption = False,
) -> None:
    """Show what this installation and this machine have, and which commands work on a checkpoint."""
    from ckpt.commands.doctor import diagnosis

    def show(found: diagnosis.Diagnosis) -> None:
        if as_json:
            print(shown(json.dumps(found.to_json(), indent=2)), flush=True)
        else:
            print_lines(found.lines(terminal_width()))

    try:
        show(diagnosis.doctor(path))
    except CkptError:  # print the known facts anyway
        show(diagnosis.Diagnosis(diagnosis.gather(path)))
        raise


COMMAND = Command(
    name="doctor",
    section=BEFOREHAND,
    function=doctor,
    examples=(
        ("ckpt doctor", "versions, extras, FUSE, free space, and a block for a bug report"),
        ("ckpt doctor outputs", "which commands work on this run, and what stands in the way of the others"),
    ),
    guide="doctor.md",
    place=3,
    python="ckpt.commands.doctor.diagnosis:doctor",
)
