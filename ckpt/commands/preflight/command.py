"""`ckpt preflight`."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Annotated

from ckpt.base.errors import printable, shown
from ckpt.base.flags import Flag, Positional
from ckpt.base.text import pluralize
from ckpt.options import command as opt
from ckpt.options.command import BEFOREHAND, Command


def preflight(
    folder: Annotated[Path, Positional(metavar="FOLDER", help="The folder for checkpoints.")],
    data: Annotated[
        list[Path] | None, Flag(metavar="PATH", help="A file or folder of the dataset; repeatable.")
    ] = None,
    need_gb: Annotated[float, Flag(metavar="GB", help="Required free space.")] = 1,
    timeout: Annotated[float, Flag(metavar="S", help="Seconds to wait for all nodes.")] = 40,
    nodes: Annotated[
        str | None, Flag(metavar="NAME,...", help="Names of all nodes. [default: from Slurm's step]")
    ] = None,
    number: Annotated[
        int | None, Flag(metavar="N", min=0, help="This node's number. [default: SLURM_NODEID, or 0]")
    ] = None,
    port: Annotated[
        int | None, Flag(metavar="N", min=1, help="The port to meet at. [default: MASTER_PORT, or 29400]")
    ] = None,
    as_json: opt.JsonOption = False,
) -> None:
    """Compare the nodes of a job before training: packages, data, space, network. Exit code 1: they differ."""
    from ckpt.commands.preflight.nodes import Job
    from ckpt.commands.preflight.nodes import preflight as compared

    found = compared(
        Job(
            folder,
            data or (),
            need_gb,
            timeout,
            nodes.split(",") if nodes else (),
            int(os.environ.get("SLURM_NODEID", "0")) if number is None else number,
            int(os.environ.get("MASTER_PORT", "29400")) if port is None else port,
        )
    )
    if found is None:
        return
    count, problems = found
    if as_json:
        print(shown(json.dumps({"nodes": count, "problems": problems})))
    else:
        for line in [*problems, f"{pluralize(count, 'node')}, {pluralize(len(problems), 'problem')}"]:
            print(printable(f"preflight: {line}"), file=sys.stderr)
    if problems:
        import typer

        raise typer.Exit(1)


COMMAND = Command(
    name="preflight",
    section=BEFOREHAND,
    function=preflight,
    examples=(
        ("ckpt preflight outputs --data corpus", "on each node of a job, by srun, before it begins"),
        ("ckpt preflight outputs --nodes localhost --need-gb 500", "is there room, on this machine alone?"),
    ),
    guide="training.md",
    place=4,
)
