"""Words for people: counts, URLs, near misses of names, tables in lines."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Iterator, Sequence

from ckpt.base.errors import printable

#: A repository of the Hub.
HUB_ID = re.compile(r"\w[\w.-]*/\w[\w.-]*")

#: A URL, also as what `Path` makes of one.
_URL = re.compile(r"([a-z][a-z0-9+.-]+):/")


def scheme_of(where: object) -> str | None:
    """`s3` of `s3://bucket/run`, and of the `s3:/bucket/run` that `Path` makes of it; None where this is no URL."""
    found = _URL.match(str(where))
    return found[1] if found else None


class Brief(str):
    """A sentence with a short form, which is printed unless the user asks for details; empty: only with details."""

    short: str

    def __new__(cls, text: str, short: str = "") -> Brief:
        made = super().__new__(cls, text)
        made.short = short
        return made


def in_short(sentences: Iterable[str], verbose: bool = False) -> list[str]:
    """Return the short forms of `sentences`, or all of them in full if `verbose`."""
    if verbose:
        return list(sentences)
    return [short for one in sentences if (short := getattr(one, "short", one))]


def one_line(text: str, limit: int = 400) -> str:
    """`text` bounded and with every control character escaped, line ends too."""
    return printable(text, limit).replace("\n", "\\n")


def counted(number: int, what: str, spec: str = "") -> str:
    """`number` and the noun `what`, in the plural where it is not one."""
    return f"{number:{spec}} {what}" + ("s" if number != 1 else "")


def did_you_mean(typed: str, known: Sequence[str]) -> str | None:
    """A hint that names the entry of `known` that is closest to what was typed; None if none is close."""
    spelled = {name.lower(): name for name in known}
    near = [spelled[name] for name in difflib.get_close_matches(typed.lower(), spelled, 2)]
    return f"did you mean {' or '.join(near)}?" if near else None


def aligned(heads: Sequence[str], rows: Sequence[Sequence[str]], right: Sequence[str] = ()) -> Iterator[str]:
    """A table in lines, the columns called `right` to the right."""
    every = [heads, *rows]
    widths = [max(len(row[column]) for row in every) for column in range(len(heads))]
    for row in every:
        cells = zip(row, widths, heads, strict=True)
        yield "  ".join(t.rjust(width) if head in right else t.ljust(width) for t, width, head in cells).rstrip()


def preformatted(text: str) -> str:
    """`text` as HTML that a notebook shows as it stands."""
    from html import escape  # its table of entities would be read at every start

    return f"<pre>{escape(text)}</pre>"
