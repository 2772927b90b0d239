"""`ckpt formats`: what can be read and written."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from ckpt.base.returned import Returned
from ckpt.base.text import aligned
from ckpt.plan import registry
from ckpt.plan.checkpoint import Format

HEADS = ("name", "reads", "writes", "optimizer", "what it is")


@dataclass(frozen=True, repr=False)
class Formats(Returned):
    """All formats, in the order in which a folder is asked what it is."""

    formats: tuple[Format, ...]

    def __repr__(self) -> str:
        return f"<formats: {', '.join(one.name for one in self.formats)}>"

    def __iter__(self) -> Iterator[Format]:
        return iter(self.formats)

    def rows(self) -> list[tuple[str, ...]]:
        """The cells under `HEADS`."""
        return [
            (one.name, *("yes" if can else "-" for can in (one.reads, one.writes, one.carries_optimizer)), one.title)
            for one in self.formats
        ]

    def lines(self) -> Iterator[str]:
        return aligned(HEADS, self.rows())

    def to_json(self) -> list[dict[str, Any]]:
        return [
            {"name": f.name, "reads": f.reads, "writes": f.writes, "optimizer": f.carries_optimizer, "title": f.title}
            for f in self.formats
        ]


def formats() -> Formats:
    """List the formats: what can be read and written, and what carries optimizer state."""
    return Formats(tuple(registry.all_formats()))
