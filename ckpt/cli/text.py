"""What the commands print: plans, outcomes and sources."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ckpt.base.errors import printable, shown
from ckpt.base.progress import progress
from ckpt.base.sizes import show_size
from ckpt.base.streams import coloured
from ckpt.base.text import aligned, counted

if TYPE_CHECKING:
    from ckpt.api import Conversion
    from ckpt.cli.options import Outcome
    from ckpt.plan.checkpoint import Checkpoint


def terminal_width() -> int | None:
    """Columns of the terminal that stdout is; None where it is none, as nothing is cut for a file or a pipe."""
    return shutil.get_terminal_size().columns if sys.stdout.isatty() else None


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
    conversion: Conversion,
    destination: Path,
    outcome: Outcome,
    *,
    resume: bool | None = None,
    **options: Any,
) -> dict[str, Any] | None:
    """Run a conversion and say on stderr what was written; its report for stdout.

    A dry run prints the plan instead, and has no report.  `resume` is None of a command without `--resume`; `options`
    are further ones of `Conversion.run`.
    """
    from ckpt.move.journal import JOURNAL
    from ckpt.run_folder import not_read

    conversion.check_destination(destination)
    report = plan_report(conversion, destination)
    if outcome.dry_run:
        lines = (
            shown(json.dumps(report, indent=2)) if outcome.as_json else "\n".join(plan_lines(report, outcome.verbose))
        )
        print(lines)
        return None
    with progress(conversion.plan.moved_bytes, "check", quiet=outcome.quiet) as meter:

        def clearing(folder: Path, size: int) -> None:
            has_journal = resume is not None and (folder / JOURNAL).is_file()
            could = "; --resume would have gone on with it" if has_journal else ""
            left = f"{printable(str(folder))} ({show_size(size)})"
            meter.say(f"note: {left}, left by a run that was killed, is removed{could}")

        options |= {"progress": meter, "phase": meter.phase}
        if not outcome.quiet:
            options["clearing"] = clearing
        options |= {"manifest": outcome.manifest, "overwrite": outcome.overwrite}
        num_done = conversion.run(destination, resume=bool(resume), **options)
    if outcome.quiet:  # what may be lost is reported even then
        state = [one for one in report["not_read"] if one["kind"] == not_read.STATE]
        for line in not_read.lines(state):
            print(line, file=sys.stderr)
    else:
        if resume:
            print(f"{show_size(num_done)} were there already, and are as they were written", file=sys.stderr)
        for line in _outcome(report, destination, outcome.manifest):
            print(line, file=sys.stderr)
    return report


def plan_report(conversion: Conversion, destination: Path) -> dict[str, Any]:
    """What a conversion writes, moves, casts and leaves out, for printing and for JSON."""
    from ckpt.run_folder.not_read import not_read

    plan = conversion.plan
    return {
        "source": plan.checkpoint.path,
        "format": plan.checkpoint.format,
        "destination": str(destination),
        "files": [{"name": file.name, "bytes": file.size} for file in plan.target.files],
        "total_bytes": plan.total_bytes,
        "moved_bytes": plan.moved_bytes,
        "copied_by_the_kernel_bytes": plan.span_bytes,
        "copies": plan.num_copies,
        "peak_buffer_bytes": conversion.peak_buffers,
        "casts": [
            {"from": c.source.name, "to": c.target.name, "tensors": c.num_tensors, "bytes": c.nbytes}
            for c in plan.casts
        ],
        "notes": list(plan.target.notes),
        "left_out": list(plan.target.not_written),
        "not_read": [one.to_json() for one in not_read(plan.checkpoint)],
    }


def plan_lines(report: dict[str, Any], verbose: bool) -> list[str]:
    """The report of a plan as text; without `verbose` a long list of files is cut."""
    files = report["files"]
    shown = files if verbose or len(files) <= 12 else files[:10]
    lines = [
        f"would write {counted(len(files), 'file')}, {show_size(report['total_bytes'])}, to "
        f"{printable(report['destination'])}"
    ]
    lines += [f"  {show_size(file['bytes']):>9}  {printable(file['name'])}" for file in shown]
    if len(shown) < len(files):
        lines.append(f"  ... and {len(files) - len(shown)} more (-v lists them)")
    kernel = show_size(report["copied_by_the_kernel_bytes"])
    lines.append(
        f"bytes to move: {show_size(report['moved_bytes'])} in {report['copies']} copies, {kernel} as they are"
    )
    lines.append(f"peak buffer memory: {show_size(report['peak_buffer_bytes'])}")
    lines += [
        f"cast: {c['tensors']} tensors from {c['from']} to {c['to']}, {show_size(c['bytes'])}" for c in report["casts"]
    ]
    return lines + lost_lines(report)


def lost_lines(report: dict[str, Any]) -> list[str]:
    """What a plan's report has to say about precision, about what is not in the target, and what was not read."""
    from ckpt.run_folder import not_read

    notes = [f"note: {printable(note)}" for note in report["notes"]]
    notes += [f"not in the target: {printable(one)}" for one in report["left_out"]]
    return notes + not_read.lines(report["not_read"])


def _outcome(report: dict[str, Any], destination: Path, manifest: bool) -> list[str]:
    from ckpt.run_folder.steps import TRAINER_STATE
    from ckpt.verify.manifest import MANIFEST

    wrote = f"wrote {counted(len(report['files']), 'file')}, {show_size(report['total_bytes'])}"
    lines = [*lost_lines(report), wrote + (f", and {MANIFEST}" if manifest else "")]
    if any(file["name"] == TRAINER_STATE for file in report["files"]):  # whatever its name, Trainer takes the folder
        lines.append(f"to go on with HF Trainer: trainer.train(resume_from_checkpoint={printable(str(destination))!r})")
    return lines


def say_notes(notes: Sequence[str]) -> None:
    for note in notes:
        print(f"note: {printable(note)}", file=sys.stderr)


def say_source(checkpoint: Checkpoint, prefix: str = "", *, quiet: bool = False) -> None:
    """Print on stderr what was opened, and what is to be known about it; if `quiet`, only what was passed over."""
    if quiet:
        say_notes(checkpoint.passed_over)
        return
    ranks = f", {checkpoint.world_size} ranks" if checkpoint.world_size else ""
    step = f", step {checkpoint.state.step}" if checkpoint.state.step is not None else ""
    framework = f" ({checkpoint.framework})" if checkpoint.framework else ""
    print(printable(f"{prefix}{checkpoint.path}: {checkpoint.format}{framework}{ranks}{step}"), file=sys.stderr)
    say_notes(checkpoint.notes)
