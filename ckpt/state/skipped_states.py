"""Optimizer states that a reader skips, for `Checkpoint.unread`."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from ckpt.base.text import pluralize


@dataclass
class Unread:
    fqns: dict[tuple[str, str], list[str]] = field(default_factory=dict)

    def add(self, state: str, why: str, fqns: Iterable[str]) -> None:
        self.fqns.setdefault((state, why), []).extend(fqns)

    @property
    def sentences(self) -> tuple[str, ...]:
        return tuple(f"optimizer state {state} of {listed(fqns)}: {why}" for (state, why), fqns in self.fqns.items())


def listed(fqns: Sequence[str]) -> str:
    return fqns[0] if len(fqns) == 1 else f"{pluralize(len(fqns), 'parameter')} ({fqns[0]}, ...)"
