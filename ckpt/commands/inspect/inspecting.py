"""API of `ckpt inspect`."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from os import PathLike, fspath
from pathlib import Path
from typing import Any

from ckpt.base.errors import UsageError, shown
from ckpt.base.flags import check_types
from ckpt.base.results import Returned
from ckpt.base.text import aligned, did_you_mean, pluralize, scheme_of
from ckpt.base.words import Message
from ckpt.commands.check.checking import HEADS, Checked, checkpoints_of, survey
from ckpt.commands.inspect import overview
from ckpt.commands.inspect.inspection import inspection
from ckpt.commands.inspect.parts import part_lines, parts_of
from ckpt.commands.inspect.rows import Only
from ckpt.move.listing import listed_once
from ckpt.pictures.pages import page
from ckpt.plan.checkpoint import Checkpoint
from ckpt.plan.tensors import Tensor
from ckpt.plan.tiling import Damage
from ckpt.runs.opening import AUTO, open_checkpoint
from ckpt.runs.unread_files import list_unread
from ckpt.stores import placeholder_files

_MAX_STEPS = 20  # checked without `everything`


@dataclass(frozen=True, repr=False)
class Inspection(Returned):
    """A checkpoint's contents, with its `run` if there are several steps.

    `matching` holds tensors to show part by part.
    """

    checkpoint: Checkpoint
    run: tuple[Checked, ...] = ()
    matching: tuple[Tensor, ...] | None = None
    unread: tuple[dict[str, str], ...] = ()
    tensors: bool = False
    everything: bool = False

    def __repr__(self) -> str:
        one = self.checkpoint
        return f"<{shown(one.path)}: {one.format}, {pluralize(len(one.tensors), 'tensor')}>"

    def to_json(self) -> dict[str, Any]:
        found = overview.describe(self.checkpoint, self.unread, tensors=self.tensors, everything=self.everything)
        parts = {"parts": list(map(parts_of, self.matching))} if self.matching is not None else {}
        return found | parts | run_json(self.run)

    def lines(self) -> Iterator[str]:
        yield from self.facts()
        if self.run:
            yield from ("", *aligned(HEADS, [one.row() for one in self.run], ("step", "size")))
        if self.tensors:
            yield from ("", *aligned(overview.HEADS, overview.rows(self.checkpoint), overview.RIGHT))
        for one in self.parts():
            yield from ("", *one)

    def facts(self, width: int | None = None) -> Iterator[str]:
        return map(shown, overview.lines(self.checkpoint, self.unread, everything=self.everything, width=width))

    def csv(self) -> str:
        """Return all tensors as CSV (RFC 4180), one per row."""
        table = io.StringIO()
        csv.writer(table, lineterminator="\n").writerows(overview.csv_rows(self.checkpoint))
        return table.getvalue()

    def page(self, only: Only = "all") -> tuple[str, tuple[Damage, ...]]:
        """Return the page for `ckpt inspect --html`, and its damaged tensors."""
        steps = [HEADS, *(one.row() for one in self.run)] if self.run else []
        content, damaged = inspection(self.checkpoint, self.unread, steps, only)
        return page("inspect", content), damaged

    def parts(self) -> Iterator[list[str]]:
        for one in self.matching or ():
            yield [shown(line) for line in part_lines(one, self.checkpoint.path)]


@check_types
@listed_once()
def inspect(
    source: str | PathLike[str] | Checkpoint,
    format: str = AUTO,
    *,
    tag: str | None = None,
    config: str | PathLike[str] | None = None,
    tensors: bool = False,
    tensor: str | Sequence[str] = (),
    everything: bool = False,
) -> Inspection:
    """Describe a checkpoint's contents and its run's steps, without reading tensor data.

    Raises the errors of `ckpt.errors`.

    Args:
        source: A path, a URL or an open checkpoint.
        format: The format to read; `auto` finds it.
        tag: The step's folder or number; None for the latest.
        config: The model's config: a folder, a config.json or a Hub id.
        tensors: List every tensor.
        tensor: Name patterns: show the positions of these tensors' parts.
        everything: Show all lists and values in full.
    """
    run: tuple[Checked, ...] = ()
    if isinstance(source, Checkpoint):
        checkpoint = source
    else:
        text, place = fspath(source), None if config is None else fspath(config)
        checkpoint = open_checkpoint(text, format, tag=tag, config=place)
        run = tuple(run_of(Path(text) if scheme_of(text) is None else placeholder_files.place(text), tag, everything))
    patterns = [tensor] if isinstance(tensor, str) else tensor
    matching = matching_tensors(checkpoint, patterns) if patterns else None
    left = tuple(one.to_json() for one in list_unread(checkpoint))
    return Inspection(checkpoint, run, matching, left, tensors, everything)


def matching_tensors(checkpoint: Checkpoint, patterns: Sequence[str]) -> tuple[Tensor, ...]:
    names = list(dict.fromkeys(fqn for fqn, _ in checkpoint.tensors))
    for pattern in patterns:
        if not any(fnmatchcase(name, pattern) for name in names):
            hint = did_you_mean(pattern, names) or Message("{tensors=True} without {tensor} lists them all")
            raise UsageError(f"no tensor matches {pattern!r}", path=checkpoint.path, hint=hint)
    return tuple(
        one for (fqn, _), one in checkpoint.tensors.items() if any(fnmatchcase(fqn, pattern) for pattern in patterns)
    )


def run_of(path: Path, tag: str | None, everything: bool) -> list[Checked]:
    every = checkpoints_of(path) if tag is None and path.is_dir() else []
    return survey(path, every, None if everything else _MAX_STEPS) if len(every) > 1 else []


def run_json(run: Sequence[Checked]) -> dict[str, Any]:
    return {"checkpoints": [one.to_json() for one in run]} if run else {}
