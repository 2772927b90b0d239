"""The README's rows of speed, as they stand in `benchmarks/results.txt` (`python -m benchmarks --record`)."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

RESULTS = Path(__file__).parent / "results.txt"
PAGES = ("README.md", "README.ja.md")
#: The sections that the README shows: of each, what `cp` and what ckpt took.
SHOWN = ("zero", "cold", "reshard", "dcp", "megatron", "lora")
_ROWS = re.compile(r"(?:cp|ckpt) ")
_BLOCK = re.compile(r"(?<=<!-- python -m benchmarks --readme -->\n\n).*?(?=\n\n<!-- end -->)", re.DOTALL)


def headed(name: str) -> str:
    """The line above a section's table."""
    return f"== {name} =="


def rows(results: str) -> str:
    """The block for the README: the lines as they were printed, less the rows of other tools and the notes."""
    return "\n\n".join("\n".join(f"    {line}" for line in _shown(results, name)) for name in SHOWN)


def _shown(results: str, name: str) -> Iterator[str]:
    table = results.partition(f"{headed(name)}\n")[2].partition("\n\n")[0].splitlines()
    title, header, *lines = table
    yield from (title, header) if name == SHOWN[0] else (title,)
    yield from (line for line in lines if _ROWS.match(line))


def with_rows(page: str, results: str) -> str:
    """The text of a page with its block replaced."""
    return _BLOCK.sub(lambda _: rows(results), page)


def write() -> None:
    """Put the rows of the recorded results into the pages."""
    results = RESULTS.read_text()
    for name in PAGES:
        path = Path(name)
        path.write_text(with_rows(path.read_text(), results))
