"""What the commands print: plans, outcomes and sources."""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from ckpt.base.errors import printable, shown
from ckpt.base.progress import progress
from ckpt.base.streams import coloured, folded, width_of
from ckpt.base.text import aligned, counted, note_lines

if TYPE_CHECKING:
    from ckpt.api import Conversion, Converted
    from ckpt.base.results import Returned
    from ckpt.options.groups import Outcome
    from ckpt.plan.checkpoint import Checkpoint
    from ckpt.plan.groups import Sides

Planned = TypeVar("Planned", bound="Conversion")
Written = TypeVar("Written", bound="Converted")


def terminal_width() -> int | None:
    """Return the columns of stdout, or None unless it is a terminal."""
    return width_of(sys.stdout)


def print_lines(lines: Iterable[str]) -> None:
    """Print a report on stdout, folded between words if that is a terminal."""
    print("\n".join(folded(line, sys.stdout) for line in lines), flush=True)


def print_table(heads: Sequence[str], rows: Sequence[Sequence[str]], right: Sequence[str] = ()) -> None:
    """A table on stdout, the columns called `right` to the right; on a terminal long cells are folded to fit it."""
    if (width := terminal_width()) is None:
        print("\n".join(aligned(heads, rows, right)))
        return
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    for head in heads:
        table.add_column(head, justify="right" if head in right else "left", overflow="fold")
    for row in rows:
        table.add_row(*map(Text, row))
    Console(width=width, color_system="auto" if coloured(sys.stdout) else None, highlight=False).print(table)


def carry_out(
    plan: Callable[[], Planned],
    convert: Callable[..., Written],
    destination: Path,
    outcome: Outcome,
    show: Callable[[Planned], None],
) -> Written | None:
    """Call `convert`, a function of the package that plans and writes, and say on stderr what it does and has written.

    `show` is called with what was planned. A dry run calls `plan` instead, prints what it planned, and returns None.
    """
    from ckpt.runs import unread_files
    from ckpt.runs.plan_lines import plan_lines

    with contextlib.ExitStack() as shown_now:
        meter = shown_now.enter_context(progress(0, "plan", quiet=outcome.quiet))

        def planned(conversion: Planned) -> None:
            nonlocal meter
            shown_now.close()
            show(conversion)
            conversion.check_destination(destination)
            meter = shown_now.enter_context(progress(0, "check", quiet=outcome.quiet))

        if outcome.dry_run:
            conversion = plan()
            planned(conversion)
            shown_now.close()
            report = conversion.to_json(str(destination))
            if outcome.as_json:
                print(shown(json.dumps(report, indent=2)))
            else:
                print_lines(plan_lines(report, outcome.verbose))
            return None
        written = convert(
            planned=planned,
            progress=lambda count: meter(count),
            phase=lambda *what: meter.phase(*what),
            say=None if outcome.quiet else lambda line: meter.say(f"note: {line}"),
        )
    if outcome.quiet:  # what may be lost is reported even then
        state = [one for one in written.to_json()["not_read"] if one["kind"] == unread_files.STATE]
        say(*unread_files.lines(state, verbose=outcome.verbose))
    else:
        say(*written.outcome(outcome.verbose))
    return written


def say_result(report: dict[str, Any], outcome: Outcome) -> None:
    """Print on stdout where the result is, or the report as JSON; then say what can load it."""
    from ckpt.runs.plan_lines import loads_lines

    where = shown(json.dumps(report, indent=2)) if outcome.as_json else printable(report["destination"])
    print(where, flush=True)
    if not outcome.quiet or (report["loads"] and report["loads"]["can"] is False):  # a folder of no use is no success
        say(*loads_lines(report))


#: How lines begin, and the style of this beginning on a terminal.
_STYLES: dict[str, dict[str, Any]] = {
    "note:": {"fg": "yellow"},
    "notes:": {"fg": "yellow"},
    "not in the target:": {"fg": "yellow"},
    "not read:": {"fg": "yellow", "bold": True},
    "not checked:": {"fg": "yellow", "bold": True},
    "from_pretrained cannot load this folder:": {"fg": "yellow", "bold": True},
    "SentenceTransformer cannot load this folder:": {"fg": "yellow", "bold": True},
    "wrote": {"fg": "green"},
    "from_pretrained can load this folder": {"fg": "green"},
    "SentenceTransformer can load this folder": {"fg": "green"},
}


def say(*lines: str) -> None:
    """Print lines on stderr: on a terminal folded to its width between words, and what matters in colour."""
    for line in lines:
        print(in_colour(folded(line)), file=sys.stderr)


def in_colour(text: str) -> str:
    """Return `text` with its beginning in colour, if stderr takes colours."""
    start = next((one for one in _STYLES if text.startswith(one)), "") if coloured(sys.stderr) else ""
    import typer

    return typer.style(start, **_STYLES[start]) + text.removeprefix(start) if start else text


def say_notes(notes: Sequence[str], *, verbose: bool = True) -> None:
    """Print notes on stderr, a line each if `verbose`, otherwise the short forms of all in one line."""
    say(*note_lines(notes, verbose))


def say_source(checkpoint: Checkpoint, prefix: str = "", *, quiet: bool = False, verbose: bool = False) -> None:
    """Print on stderr what was opened, and what is to be known about it; if `quiet`, only what was passed over."""
    if quiet:
        say_notes(checkpoint.passed_over)
        return
    ranks = f", {counted(checkpoint.world_size, 'rank')}" if checkpoint.world_size else ""
    step = f", step {checkpoint.state.step}" if checkpoint.state.step is not None else ""
    framework = f" ({checkpoint.framework})" if checkpoint.framework else ""
    say(printable(f"{prefix}{checkpoint.path}: {checkpoint.format}{framework}{ranks}{step}"))
    say_notes(checkpoint.notes, verbose=verbose)


def open_sides(a: Path, b: Path, sides: Sides, quiet: bool, verbose: bool) -> tuple[Checkpoint, Checkpoint]:
    """Both checkpoints, after saying what they are."""
    from ckpt import api

    one, other = api.open_sides(a, b, sides)
    say_source(one, "A: ", quiet=quiet, verbose=verbose)
    say_source(other, "B: ", quiet=quiet, verbose=verbose)
    return one, other


def conclude(report: Returned, lines: Iterable[str], as_json: bool, quiet: bool) -> None:
    """Print a report, as its `lines` or as JSON, and exit with its code."""
    if as_json:
        print(shown(json.dumps(report.to_json(), indent=2)))
    elif not quiet:
        print_lines(lines)
    if report.exit_code:
        import typer

        raise typer.Exit(report.exit_code)
