"""Report of a plan's output and omissions, in JSON and in lines."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

from ckpt.base.errors import printable
from ckpt.base.text import in_short, note_lines, pluralize, show_size, typed
from ckpt.plan.checkpoint import MASTER, WEIGHT
from ckpt.plan.dtypes import BY_NAME
from ckpt.plan.load_check import LoadCheck
from ckpt.plan.planner import Plan
from ckpt.runs import unread_files
from ckpt.runs.search import MANIFEST
from ckpt.runs.steps import TRAINER_STATE

_MAX_LEFT_OUT = 8  # omissions per line


def plan_report(plan: Plan, destination: str | None, peak_buffers: int) -> dict[str, Any]:
    return {
        "source": plan.checkpoint.path,
        "format": plan.checkpoint.format,
        "destination": destination,
        "files": [{"name": file.name, "bytes": file.size} for file in plan.target.files],
        "total_bytes": plan.total_bytes,
        "moved_bytes": plan.moved_bytes,
        "copied_by_the_kernel_bytes": plan.span_bytes,
        "copies": plan.num_copies,
        "peak_buffer_bytes": peak_buffers,
        "casts": [
            {"from": c.source.name, "to": c.target.name, "tensors": c.num_tensors, "bytes": c.nbytes}
            for c in plan.casts
        ],
        "notes": list(map(typed, plan.target.notes)),
        "left_out": list(map(typed, plan.target.not_written)),
        "not_read": [one.to_json() for one in _unread(plan)],
        "loads": plan.target.loads and plan.target.loads.to_json(),
    }


def _unread(plan: Plan) -> Iterator[unread_files.UnreadFile]:
    """Yield the source's unread files and folders, without copied ones."""
    place = plan.checkpoint.path
    root = place if os.path.isdir(place) else os.path.dirname(place)
    copied = [f"{os.path.relpath(one.copied.path, root)}/" for one in plan.target.files if one.copied is not None]
    for one in unread_files.list_unread(plan.checkpoint):
        if not any(path.startswith(f"{one.name.rstrip('/')}/") for path in copied):
            yield one


def plan_lines(report: dict[str, Any], verbose: bool = False) -> list[str]:
    """Cut a long file list unless `verbose`."""
    files = report["files"]
    shown = files if verbose or len(files) <= 12 else files[:10]
    to = "" if report["destination"] is None else f", to {printable(report['destination'])}"
    lines = [f"would write {pluralize(len(files), 'file')}, {show_size(report['total_bytes'])}{to}"]
    lines += [f"  {show_size(file['bytes']):>9}  {printable(file['name'])}" for file in shown]
    if len(shown) < len(files):
        lines.append(f"  ... and {len(files) - len(shown)} more (-v lists them)")
    kernel = show_size(report["copied_by_the_kernel_bytes"])
    lines.append(
        f"bytes to move: {show_size(report['moved_bytes'])} in {pluralize(report['copies'], 'copy')}, "
        f"{kernel} as they are"
    )
    lines.append(f"peak buffer memory: {show_size(report['peak_buffer_bytes'])}")
    lines += [
        f"cast: {pluralize(c['tensors'], 'tensor')} from {c['from']} to {c['to']}, {show_size(c['bytes'])}"
        for c in report["casts"]
    ]
    return [*lines, *loss_lines(report, verbose=True), *load_lines(report)]


def loss_lines(report: dict[str, Any], *, verbose: bool = False) -> list[str]:
    """Return lines on precision, omitted content and unread files: one each unless `verbose`."""
    notes = note_lines(report["notes"], verbose)
    left_out = report["left_out"]
    if verbose or len(left_out) < 2:
        notes += [f"not written: {printable(one)}" for one in left_out]
    else:
        some = [printable(one) for one in in_short(left_out)[:_MAX_LEFT_OUT]]
        more = len(left_out) - len(some)
        notes.append(f"not written: {'; '.join([*some, *([f'{more} more'] if more else [])])} (-v: all of it)")
    return notes + unread_files.lines(report["not_read"], verbose=verbose)


def load_lines(report: dict[str, Any]) -> list[str]:
    loads = report["loads"] and LoadCheck(**{**report["loads"], "lacks": tuple(report["loads"]["lacks"])})
    return [printable(loads.sentence(report["destination"] or "FOLDER"))] if loads else []


def output_lines(
    report: dict[str, Any],
    dtypes: Sequence[str],
    *,
    has_manifest: bool,
    seconds: float,
    num_done: int,
    verified: bool,
    verbose: bool = False,
) -> list[str]:
    """Return a finished conversion's lines. `num_done` bytes existed before."""
    lines = loss_lines(report, verbose=verbose)
    if num_done:
        lines.append(f"{show_size(num_done)} were there already, and are unchanged")
    if any(file["name"] == TRAINER_STATE for file in report["files"]):  # Trainer accepts the folder under any name
        place = printable(report["destination"])
        lines.append(f"to continue with HF Trainer: trainer.train(resume_from_checkpoint={place!r})")
    wrote = f"wrote {pluralize(len(report['files']), 'file')}, {show_size(report['total_bytes'])}"
    rate = int((report["moved_bytes"] - num_done) / max(seconds, 1e-3))
    speed = f", {show_size(rate)}/s" if rate else ""  # nothing may be left to move
    how = f"{seconds:.1f} s{speed}, {'verified' if verified else 'not verified'}"
    casts = {c["from"] for c in report["casts"] if c["to"] in dtypes and _is_lossy(c["from"], c["to"])}
    rounded = f", rounded from {' and '.join(sorted(casts))}" if casts else ""
    keep = "; --dtype fp32 keeps it" if casts == {"float32"} else ""
    of = f" (model in {' and '.join(dtypes)}{rounded}{keep})" if dtypes else ""
    return [*lines, f"{wrote}{of}, {f'and {MANIFEST}, ' if has_manifest else ''}in {how}"]


def _is_lossy(source: str, target: str) -> bool:
    return BY_NAME[source].itemsize >= BY_NAME[target].itemsize


def model_dtypes(plan: Plan) -> list[str]:
    sizes: Counter[str] = Counter()
    for slot in (slot for file in plan.target.files for slot in file.slots):
        if slot.key[1] in (WEIGHT, MASTER):
            sizes[slot.extent.dtype.name] += slot.extent.nbytes
    return [name for name, _ in sizes.most_common()]
