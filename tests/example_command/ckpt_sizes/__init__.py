"""`ckpt sizes`: bytes per dtype in a checkpoint. An example of a command from another package."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import dataclass
from typing import Annotated

import typer

from ckpt.base.flags import SHOWN
from ckpt.options import command as opt
from ckpt.options.command import LOOK, Command
from ckpt.options.printing import print_table, say_source
from ckpt.plan.groups import Selection


@dataclass(frozen=True)
class Counted:
    """Selection of tensors to count."""

    role: Annotated[
        str | None, typer.Option(metavar="ROLE", help="Count only tensors of this role.", rich_help_panel=SHOWN)
    ] = None


def sizes(*, path: opt.PathArgument, read: Selection, counted: Counted, as_json: opt.JsonOption = False) -> None:
    """Show how many bytes of each dtype a checkpoint holds."""
    import ckpt

    checkpoint = ckpt.open(path, read.format, tag=read.tag, config=read.config, accept_settings=read.accept_settings)
    found: Counter[str] = Counter()
    for tensor in checkpoint.tensors.values():
        if counted.role in (None, tensor.role):
            found[tensor.dtype.name] += tensor.nbytes
    say_source(checkpoint)
    if as_json:
        print(json.dumps(found))
    else:
        print_table(("dtype", "bytes"), [(name, str(size)) for name, size in sorted(found.items())], right=("bytes",))


COMMAND = Command(
    name="sizes",
    section=LOOK,
    function=sizes,
    examples=(
        ("ckpt sizes outputs", "a table"),
        ("ckpt sizes outputs --role weight --json", "the weights alone, for programs"),
    ),
    urls=("path",),
)
