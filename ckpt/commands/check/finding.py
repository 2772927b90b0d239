"""Findings about tensor values."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import groupby
from typing import Any

from ckpt.base.errors import printable
from ckpt.base.text import pluralize
from ckpt.plan.checkpoint import WEIGHT

NOT_FINITE, CONTRADICTION = "not finite", "contradiction"
ZERO, CONSTANT, EQUAL, UNTRAINED, UNCHANGED, SCALE = (
    *("all zero", "constant", "equal experts", "untrained adapter", "unchanged", "scale out of range"),
)
_SENTENCES = {
    ZERO: "all zero",
    CONSTANT: "the same value everywhere",
    EQUAL: "experts with equal weights",
    UNTRAINED: "an adapter's factor that is all zero: it was never trained",
    UNCHANGED: "trainable, and unchanged since the step before",
    SCALE: "a scale that is zero or negative",
}
_SHOWN = 3


@dataclass(frozen=True, slots=True)
class ValueFinding:
    kind: str
    fqn: str
    role: str
    what: str
    count: int
    first: tuple[int, ...] | None = None
    is_damage: bool = False

    @property
    def where(self) -> str:
        return self.fqn if self.role == WEIGHT else f"{self.fqn} ({self.role})"

    def to_json(self) -> dict[str, Any]:
        return {
            "kind": self.kind,
            "tensor": printable(self.fqn),
            "role": self.role,
            "what": self.what,
            "count": self.count,
            "first": None if self.first is None else list(self.first),
            "damage": self.is_damage,
        }


def sentences(found: Iterable[ValueFinding]) -> Iterator[str]:
    notes = sorted((one for one in found if not one.is_damage), key=lambda one: one.kind)
    for kind, group in groupby(notes, key=lambda one: one.kind):
        every = list(group)
        names = ", ".join(f"{one.where} ({one.what})" if kind == EQUAL else one.where for one in every[:_SHOWN])
        rest = f" and {len(every) - _SHOWN} more" if len(every) > _SHOWN else ""
        yield printable(f"{pluralize(len(every), 'tensor')} {_SENTENCES.get(kind, kind)}: {names}{rest}")
