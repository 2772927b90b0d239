"""README's speed table, copied from `benchmarks/results.txt` (`python -m benchmarks --record`)."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

RESULTS = Path(__file__).parent / "results.txt"
PAGES = ("README.md", "README.ja.md")
#: Sections shown in the README, with their rows' prefixes.
SHOWN = {
    "zero": ("cp ", "ckpt "),
    "cold": ("cp ", "ckpt "),
    "reshard": ("cp ", "ckpt "),
    "dcp": ("ckpt ",),
    "megatron": ("ckpt ",),
    "lora": ("ckpt ",),
}
_BLOCK = re.compile(r"(?<=<!-- python -m benchmarks --readme -->\n\n).*?(?=\n\n## )", re.DOTALL)


def headed(name: str) -> str:
    """Return the line above a section's table."""
    return f"== {name} =="


def rows(results: str) -> str:
    """Return the README's block: the recorded lines without other tools' rows and notes."""
    return "\n\n".join("\n".join(f"    {line}" for line in _shown(results, name)) for name in SHOWN)


def _shown(results: str, name: str) -> Iterator[str]:
    table = results.partition(f"{headed(name)}\n")[2].partition("\n\n")[0].splitlines()
    title, header, *lines = table
    yield from (title, header) if name == "zero" else (title,)
    yield from (line for line in lines if line.startswith(SHOWN[name]))


def with_rows(page: str, results: str) -> str:
    """Return a page's text with its block replaced."""
    return _BLOCK.sub(lambda _: rows(results), page)


def write() -> None:
    """Copy the recorded rows into the pages."""
    results = RESULTS.read_text()
    for name in PAGES:
        path = Path(name)
        path.write_text(with_rows(path.read_text(), results))
