"""`ckpt resume`."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from dataclasses import replace
from os import fspath
from typing import Annotated, Any

from ckpt.base.errors import printable, shown
from ckpt.base.flags import READ, WRITTEN, Flag
from ckpt.options import command as opt
from ckpt.options.axolotl import run_and_config
from ckpt.options.command import CONVERT, Command
from ckpt.plan.groups import WORLD_SIZE, Cast, ConfigOption, TagOption


def resume(
    *,
    path: opt.PathArgument,
    format: Annotated[
        str | None,
        Flag(
            metavar="FORMAT",
            help="The format to load. [default: accelerate's setting, or the source's]",
            complete="targets",
            section=READ,
        ),
    ] = None,
    world_size: Annotated[
        int | None, replace(WORLD_SIZE, help="Number of ranks. [default: the launcher's, or the source's]")
    ] = None,
    tag: TagOption = None,
    config: ConfigOption = None,
    dtype: Annotated[Cast, Flag(help="Dtype for the weights if conversion is needed.", section=WRITTEN)] = "keep",
    model_only: Annotated[
        bool,
        Flag(help="Continue from a model without an optimizer if there is nothing else.", section=READ),
    ] = False,
    missing_ok: Annotated[bool, Flag(help="Print nothing if there is no checkpoint yet: the run begins.")] = False,
    as_json: opt.JsonOption = False,
    quiet: opt.QuietOption = False,
    options: Mapping[str, Any],
) -> None:
    """Print the folder to resume from: the newest complete checkpoint, converted only if it does not fit."""
    from ckpt.commands.resume.resuming import resume as find
    from ckpt.commands.resume.resuming import say_on_stderr
    from ckpt.processes.launch import joined, launch

    start = launch()
    if start is not None and not start.rank and not quiet:
        print(f"resuming with {start}", file=sys.stderr)
    path, config = run_and_config(path, config, quiet=quiet or (start is not None and bool(start.rank)))
    with joined(start):
        found = find(
            path,
            format=format,
            world_size=world_size,
            tag=tag,
            config=None if config is None else fspath(config),
            dtype=None if dtype == "keep" else dtype,
            model_only=model_only,
            missing_ok=missing_ok,
            say=(lambda _: None) if quiet else say_on_stderr,
            **options,
        )
    if as_json:
        print(f"{shown(json.dumps({'path': found}))}\n", end="")
    elif found is not None:
        print(f"{printable(found)}\n", end="")  # one write: the other processes print it too


COMMAND = Command(
    name="resume",
    section=CONVERT,
    function=resume,
    examples=(
        ("ckpt resume outputs", "the folder to go on from on the ranks that there are"),
        ("ckpt resume outputs --format dcp --world-size 4", "to go on under FSDP on 4 ranks"),
    ),
    guide="resume.md",
    urls=("config",),
    format_options=("writing",),
    place=2,
    python="ckpt.commands.resume.resuming:resume",
)
