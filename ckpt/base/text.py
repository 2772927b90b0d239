"""Text helpers, and byte counts with units."""

from __future__ import annotations

import difflib
import re
import textwrap
from collections.abc import Iterable, Iterator, Sequence
from decimal import Decimal
from itertools import zip_longest
from typing import Any

from ckpt.base.errors import UsageError, printable
from ckpt.base.words import Note, on_command_line

HUB_ID = re.compile(r"\w[\w.-]*/\w[\w.-]*")

_MIN_COLUMN = 12

#: `Path` turns `s3://` into `s3:/`.
_URL = re.compile(r"([a-z][a-z0-9+.-]+):/")


def scheme_of(where: object) -> str | None:
    """Return `s3` for `s3://bucket/run` or Path's `s3:/bucket/run`, and None if there is no scheme."""
    found = _URL.match(str(where))
    return found[1] if found else None


class Brief(Note):
    """A note with a short form, printed unless the user asks for details."""

    short: str

    def __new__(cls, text: str, short: str = "") -> Brief:
        made = cls.of((text,))
        made.short = short
        return made

    def __reduce__(self) -> tuple[Any, ...]:
        return Brief, (Note.of(self.parts), self.short)


def in_short(sentences: Iterable[str], verbose: bool = False) -> list[str]:
    if verbose:
        return list(sentences)
    return [short for one in sentences if (short := getattr(one, "short", one))]


def typed(note: str) -> str:
    """Return a note in the command line's words."""
    text = on_command_line(note)
    return Brief(text, note.short) if isinstance(note, Brief) else text


def note_lines(notes: Iterable[str], verbose: bool = False) -> list[str]:
    """Return one line per note if `verbose`, otherwise one line with all short forms."""
    shown = [printable(on_command_line(note)) for note in in_short(notes, verbose)]
    if verbose or len(shown) < 2:
        return [f"note: {note}" for note in shown]
    return [f"notes: {'; '.join(f'({number}) {note}' for number, note in enumerate(shown, 1))} (-v: a line each)"]


def one_line(text: str, limit: int = 400) -> str:
    """Return `text` bounded, with control characters and line ends escaped."""
    return printable(on_command_line(text), limit).replace("\n", "\\n")


def pluralize(number: int, what: str, spec: str = "") -> str:
    """Return `number` and the noun `what`: 2 ranks, 3 copies, 4 processes."""
    if number != 1:
        ends_in_y = what.endswith("y") and what[-2:-1] not in "aeiou"
        what = f"{what[:-1]}ies" if ends_in_y else f"{what}es" if what.endswith("s") else f"{what}s"
    return f"{number:{spec}} {what}"


def did_you_mean(typed: str, known: Sequence[str]) -> str | None:
    spelled = {name.lower(): name for name in known}
    near = [spelled[name] for name in difflib.get_close_matches(typed.lower(), spelled, 2)]
    return f"did you mean {' or '.join(near)}?" if near else None


def aligned(
    heads: Sequence[str], rows: Sequence[Sequence[str]], right: Sequence[str] = (), *, width: int | None = None
) -> Iterator[str]:
    """Yield the lines of a table. Columns in `right` are right-aligned.

    If the table is wider than `width`, the widest columns are folded at spaces.
    """
    every = [heads, *rows]
    widths = [max(len(row[column]) for row in every) for column in range(len(heads))]
    while width is not None and sum(widths) + 2 * (len(widths) - 1) > width and max(widths) > _MIN_COLUMN:
        widths[widths.index(max(widths))] -= 1
    for row in every:
        cells = [fold(text, size) for text, size in zip(row, widths, strict=True)]
        for parts in zip_longest(*cells, fillvalue=""):
            line = zip(parts, widths, heads, strict=True)
            yield "  ".join(t.rjust(size) if head in right else t.ljust(size) for t, size, head in line).rstrip()


def fold(text: str, width: int, indent: str = "") -> list[str]:
    """Fold `text` at spaces into lines of at most `width`. Longer words are split."""
    if len(text) <= width:
        return [text]
    return textwrap.wrap(text, width, subsequent_indent=indent, break_on_hyphens=False) or [text]


def preformatted(text: str) -> str:
    from html import escape  # imported late: its entity table is slow to load

    return f"<pre>{escape(text)}</pre>"


_UNITS = {"B": 1} | {
    name: base**power
    for power, letter in enumerate("KMGT", 1)
    for name, base in ((f"{letter}B", 1000), (f"{letter}IB", 1024), (letter, 1000))
}


def parse_size(text: str | int) -> int:
    """Return the bytes in `5GB`, `1.5 GB` or `100B` (decimal), `512MiB` (binary), or a positive int."""
    if isinstance(text, int) and text > 0:
        return text
    text = str(text)
    match = re.fullmatch(r"\s*([0-9]{1,20}(?:\.[0-9]{1,20})?)\s*([A-Za-z]*)\s*", text)
    unit = match[2].upper() if match else ""
    if match and not unit and Decimal(match[1]):
        hint = " or ".join(f"{match[1]}{name}" for name in ("GB", "MB", "B"))
        raise UsageError("a size needs a unit", expected="for example 5GB or 512MB", found=repr(text), hint=hint)
    size = int(Decimal(match[1]) * _UNITS[unit]) if match and unit in _UNITS else 0
    if size <= 0:
        raise UsageError("this is not a size", expected="for example 5GB or 512MB", found=repr(text))
    return size


def show_size(count: int) -> str:
    value, unit = float(count), "B"
    for unit in ("B", "kB", "MB", "GB", "TB"):
        if round(value, 1) < 1000 or unit == "TB":
            break
        value /= 1000
    return f"{count} B" if unit == "B" else f"{value:.{2 if value < 10 else 1}f} {unit}"
