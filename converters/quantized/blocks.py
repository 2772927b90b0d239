"""Block size for computing quantized tensors."""

from __future__ import annotations

#: Elements computed at a time. Every thread's temporaries stay within the default `--max-memory`.
BLOCK = 1 << 23


def spans(size: int, step: int) -> list[tuple[int, int]]:
    return [(start, min(start + step, size)) for start in range(0, size, max(1, step))]
