"""How much of a quantized tensor is computed at a time."""

from __future__ import annotations

#: Elements that are computed at a time: with what it takes to compute them they stay within the default of
#: `--max-memory` on every thread.
BLOCK = 1 << 23


def spans(size: int, step: int) -> list[tuple[int, int]]:
    """`size` cut into ranges of `step` and a rest."""
    return [(start, min(start + step, size)) for start in range(0, size, max(1, step))]
