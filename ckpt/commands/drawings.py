"""Options for pictures and pages, and their files."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from ckpt.base.errors import UsageError, printable
from ckpt.base.flags import SHOWN, WRITTEN, Flag
from ckpt.base.words import Message

if TYPE_CHECKING:
    from ckpt.base.results import Returned
    from ckpt.plan.checkpoint import Checkpoint

#: Files without the mark in their first bytes are never replaced.
_KINDS = {".svg": ("a picture", "an SVG file", b"<svg"), ".html": ("a page", "a page of ckpt's", b'content="ckpt"')}


@dataclass(frozen=True)
class HeatMap:
    html: Annotated[
        Path | None,
        Flag(metavar="OUT.html", help="Write a page: a heat map of layers by matrices.", section=SHOWN),
    ] = None
    overwrite: Annotated[bool, Flag(help="Replace an existing page.", section=WRITTEN)] = False

    def check(self, *checkpoints: Checkpoint) -> None:
        if self.html is not None:
            check_place(self.html, ".html", *checkpoints)
        elif self.overwrite:
            raise UsageError(Message("{overwrite=True} goes with --html"))

    def write(self, report: Returned, *, quiet: bool) -> None:
        if self.html is not None:
            from ckpt.pictures.pages import heat_map

            write(self.html, heat_map(report.to_json()), overwrite=self.overwrite, quiet=quiet)


def check_place(path: Path, suffix: str, *checkpoints: Checkpoint) -> None:
    """Raise UsageError if `path` has another suffix, lies in a checkpoint, or holds something else."""
    from ckpt import api

    kind, expected, _ = _KINDS[suffix]
    if path.suffix.lower() != suffix:
        what = f"{kind} is {'an SVG' if suffix == '.svg' else 'an HTML'} file"
        raise UsageError(what, found=str(path), hint=f"give {path.with_suffix(suffix)}")
    for checkpoint in checkpoints:
        try:
            api.check_apart(path, checkpoint)
        except UsageError as error:
            error.expected, error.hint = "a file outside the source", "give another path"
            raise
    if path.is_file() and not _is_of_kind(path, suffix):
        raise UsageError(f"the file is not {kind}, and it would be replaced", path=path, expected=expected)


def write(path: Path, text: str, *, overwrite: bool, quiet: bool) -> None:
    from ckpt.move import files
    from ckpt.options.printing import say

    files.write_file(path, text.encode(errors="surrogatepass"), overwrite=overwrite)
    if not quiet:
        say(printable(f"wrote {path}"))


def _is_of_kind(path: Path, suffix: str) -> bool:
    from ckpt.move.source import read_file

    head = read_file(path, 4096)
    return head.startswith(b"<") and _KINDS[suffix][2] in head
