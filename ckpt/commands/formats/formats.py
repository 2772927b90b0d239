"""API of `ckpt formats`."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from ckpt.base.results import Returned
from ckpt.base.text import aligned
from ckpt.plan import registry
from ckpt.plan.checkpoint import Format

HEADS = ("name", "reads", "writes", "optimizer", "what it is")


@dataclass(frozen=True, repr=False)
class Formats(Returned):
    formats: tuple[Format, ...]

    def __repr__(self) -> str:
        return f"<formats: {', '.join(one.name for one in self.formats)}>"

    def __iter__(self) -> Iterator[Format]:
        return iter(self.formats)

    def rows(self) -> list[tuple[str, ...]]:
        return [(one.name, *map(_mark, (one.reads, one.writes, one.carries_optimizer)), _title(one)) for one in self]

    def lines(self) -> Iterator[str]:
        return aligned(HEADS, self.rows())

    def to_json(self) -> list[dict[str, Any]]:
        return [
            {
                "name": one.name,
                "aliases": list(one.aliases),
                "reads": one.reads,
                "writes": one.writes,
                "optimizer": one.carries_optimizer,
                "title": one.title,
            }
            for one in self
        ]


def formats() -> Formats:
    """List the formats, with their support for reading, writing and optimizer state."""
    return Formats(tuple(registry.all_formats()))


def _mark(able: bool) -> str:
    return "yes" if able else "-"


def _title(one: Format) -> str:
    return one.title + (f"; also {', '.join(one.aliases)}" if one.aliases else "")
