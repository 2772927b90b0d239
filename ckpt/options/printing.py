"""Command output: plans, results and sources."""

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
from ckpt.base.text import aligned, note_lines, pluralize

if TYPE_CHECKING:
    from ckpt.api import Conversion, Converted
    from ckpt.base.results import Returned
    from ckpt.options.command import Outcome
    from ckpt.plan.checkpoint import Checkpoint
    from ckpt.plan.groups import Sides

Planned = TypeVar("Planned", bound="Conversion")
Written = TypeVar("Written", bound="Converted")

_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # malloc.h
_LARGEST = 32 << 20  # bytes; glibc's maximum for arrays outside mmap


class _DryRunError(Exception):
    """Signal to stop after planning."""


def terminal_width() -> int | None:
    """Return None if stdout is no terminal."""
    return width_of(sys.stdout)


def print_lines(lines: Iterable[str]) -> None:
    """Print on stdout, wrapped on a terminal."""
    print("\n".join(folded(line, sys.stdout) for line in lines), flush=True)


def print_table(heads: Sequence[str], rows: Sequence[Sequence[str]], right: Sequence[str] = ()) -> None:
    """Print a table, with the columns `right` right-aligned. On a terminal, wrap long cells."""
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
    convert: Callable[..., Written],
    destination: Path,
    outcome: Outcome,
    show: Callable[[Planned], None],
) -> Written | None:
    """Call `convert`, and report its progress and result on stderr.

    A dry run stops the function after planning, prints the plan, and returns None.
    """
    from ckpt.runs import unread_files
    from ckpt.runs.plan_lines import plan_lines

    _reuse_freed_memory()
    with contextlib.ExitStack() as shown_now:
        meter = shown_now.enter_context(progress(0, "plan", quiet=outcome.quiet))

        def planned(conversion: Planned) -> None:
            nonlocal meter
            shown_now.close()
            show(conversion)
            if outcome.dry_run:
                conversion.check_destination(destination)
                report = conversion.to_json(str(destination))
                if outcome.as_json:
                    print(shown(json.dumps(report, indent=2)))
                else:
                    print_lines(plan_lines(report, outcome.verbose))
                raise _DryRunError
            meter = shown_now.enter_context(progress(0, "check", quiet=outcome.quiet))

        try:
            written = convert(
                planned=planned,
                progress=lambda count: meter(count),
                phase=lambda *what: meter.phase(*what),
                say=None if outcome.quiet else lambda line: meter.say(f"note: {line}"),
            )
        except _DryRunError:
            return None
    if outcome.quiet:  # possible losses are reported even with --quiet
        state = [one for one in written.to_json()["not_read"] if one["kind"] == unread_files.STATE]
        say(*unread_files.lines(state, verbose=outcome.verbose))
    else:
        say(*written.outcome(outcome.verbose))
    return written


def _reuse_freed_memory() -> None:
    """Make glibc keep freed arrays for the next ones. New pages took a fifth of a quantization's time."""
    import ctypes  # slow, and no help text needs it

    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_MMAP_THRESHOLD, _LARGEST)
        mallopt(_TRIM_THRESHOLD, 4 * _LARGEST)


def say_result(report: dict[str, Any], outcome: Outcome) -> None:
    """Print the result's folder on stdout, or the report as JSON. Then report on stderr what can load it."""
    from ckpt.runs.plan_lines import load_lines

    where = shown(json.dumps(report, indent=2)) if outcome.as_json else printable(report["destination"])
    print(where, flush=True)
    if not outcome.quiet or (report["loads"] and not report["loads"]["can"]):  # success needs a proof that it loads
        say(*load_lines(report))


_STYLES: dict[str, dict[str, Any]] = {
    "note:": {"fg": "yellow"},
    "notes:": {"fg": "yellow"},
    "not written:": {"fg": "yellow"},
    "not read:": {"fg": "yellow", "bold": True},
    "not checked:": {"fg": "yellow", "bold": True},
    "from_pretrained cannot load this folder:": {"fg": "yellow", "bold": True},
    "SentenceTransformer cannot load this folder:": {"fg": "yellow", "bold": True},
    "wrote": {"fg": "green"},
    "from_pretrained can load this folder": {"fg": "green"},
    "SentenceTransformer can load this folder": {"fg": "green"},
}


def say(*lines: str) -> None:
    for line in lines:
        print(in_colour(folded(line)), file=sys.stderr)


def in_colour(text: str) -> str:
    start = next((one for one in _STYLES if text.startswith(one)), "") if coloured(sys.stderr) else ""
    import typer

    return typer.style(start, **_STYLES[start]) + text.removeprefix(start) if start else text


def say_notes(notes: Sequence[str], *, verbose: bool = True) -> None:
    """Print notes on stderr: one per line if `verbose`, else all in one line."""
    say(*note_lines(notes, verbose))


def say_source(checkpoint: Checkpoint, prefix: str = "", *, quiet: bool = False, verbose: bool = False) -> None:
    """Print the opened checkpoint on stderr. If `quiet`, print only skipped checkpoints."""
    if quiet:
        say_notes(checkpoint.passed_over)
        return
    ranks = f", {pluralize(checkpoint.world_size, 'rank')}" if checkpoint.world_size else ""
    step = f", step {checkpoint.state.step}" if checkpoint.state.step is not None else ""
    framework = f" ({checkpoint.framework})" if checkpoint.framework else ""
    say(printable(f"{prefix}{checkpoint.path}: {checkpoint.format}{framework}{ranks}{step}"))
    say_notes(checkpoint.notes, verbose=verbose)


def open_sides(a: Path, b: Path, sides: Sides, quiet: bool, verbose: bool) -> tuple[Checkpoint, Checkpoint]:
    from ckpt import api

    one, other = api.open_sides(a, b, sides)
    say_source(one, "A: ", quiet=quiet, verbose=verbose)
    say_source(other, "B: ", quiet=quiet, verbose=verbose)
    return one, other


def conclude(report: Returned, lines: Iterable[str], as_json: bool, quiet: bool) -> None:
    if as_json:
        print(shown(json.dumps(report.to_json(), indent=2)))
    elif not quiet:
        print_lines(lines)
    if report.exit_code:
        import typer

        raise typer.Exit(report.exit_code)
