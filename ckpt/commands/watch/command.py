"""`ckpt watch`."""

from __future__ import annotations

import json
import os
import sys
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from ckpt.base.flags import Flag, Positional
from ckpt.base.text import pluralize
from ckpt.options import command as opt
from ckpt.options.command import CONVERT, Command

if TYPE_CHECKING:
    from ckpt.commands.watch.watcher import Finding

_SECONDS = "S"


def watch(
    run: Annotated[Path, Positional(metavar="RUN", help="The run's --output.")],
    silent: Annotated[float, Flag(metavar=_SECONDS, help="Seconds without a beat before a rank is frozen.")] = 30,
    stuck: Annotated[float, Flag(metavar=_SECONDS, help="Seconds in one step and phase before a run is stuck.")] = 600,
    every: Annotated[float, Flag(metavar=_SECONDS, help="Seconds between checks.")] = 2,
    webhook: Annotated[str | None, Flag(metavar="URL", help="Post findings to this URL, as JSON.")] = None,
    as_json: opt.JsonOption = False,
) -> None:
    """Name the rank of a training that died or stalled, with its stack. Exit code 0: all ended, 1: one did not."""
    from ckpt.commands.watch import watcher

    wrong: list[Finding] = []

    def report(findings: list[Finding]) -> None:
        wrong.extend(findings)
        if webhook:  # first: the terminal may be gone
            watcher.call(webhook, run, findings)

    watched = watcher.watch(run, silent, stuck, every, report)
    if as_json:
        facts = {"run": str(run), "ranks": len(watched.ranks), "had_ended": watched.had_ended}
        _say(json.dumps({**facts, "findings": [asdict(one) for one in wrong]}))
    else:
        done = f"{run}: all done, {pluralize(len(watched.ranks), 'rank')}"
        done += ", before this watch" if watched.had_ended else ""
        _say("\n".join(map(str, wrong)) or done)
    if wrong:
        import typer

        raise typer.Exit(1)


def _say(text: str) -> None:
    """Print, unless the reader has closed the pipe (`| head`)."""
    try:
        print(text, flush=True)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # Python flushes again at exit


COMMAND = Command(
    name="watch",
    section=CONVERT,
    function=watch,
    examples=(
        ("ckpt watch outputs", "until the training ends, or a rank dies or stalls"),
        ("ckpt watch outputs --webhook https://chat.example.org/hooks/1", "and tell a chat about it"),
    ),
    guide="operations.md",
    texts=("webhook",),
    place=7,
)
