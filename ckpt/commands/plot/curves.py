"""Loss curves of runs as an SVG, and the largest distance between them.

A run is a folder of `python -m train` (with metrics.jsonl) or of an HF Trainer script (with trainer_state.json in its
newest checkpoint). Each start has a mark.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any

from ckpt.base.errors import NotFoundError
from ckpt.base.text import pluralize

WIDTH, HEIGHT, LEFT, TOP, RIGHT, BOTTOM = 960, 480, 70, 24, 24, 44
COLOURS = ("#0072b2", "#e69f00", "#009e73", "#cc79a7", "#56b4e9", "#7c9217", "#61206f", "#b8860b")
_STYLE = (
    "text{font:13px system-ui,-apple-system,'Segoe UI',Helvetica,Arial,'DejaVu Sans',sans-serif;fill:#1a1a1a}"
    ".g{fill:#5f5f5f}.p{fill:#fff}.grid{stroke:#e3e5e9}path{fill:none;stroke-linejoin:round}"
    "@media(prefers-color-scheme:dark){text{fill:#e8e8e8}.g{fill:#a9adb5}.p{fill:#15171c}.grid{stroke:#2a2d35}}"
)


@dataclass(frozen=True)
class Start:
    """A start: number of ranks (0 if not recorded), and losses by step."""

    ranks: int
    losses: dict[int, float]


def starts_of(run: Path) -> list[Start]:
    metrics = run / "metrics.jsonl"
    if metrics.is_file():
        lines = [json.loads(line) for line in metrics.read_text().splitlines()]
        points = [(line["step"], line["loss"], len(line["ranks"]["loss"])) for line in lines]
    else:
        states = [run / "trainer_state.json", *run.glob("checkpoint-*/trainer_state.json")]
        logs = [json.loads(path.read_text())["log_history"] for path in states if path.is_file()]
        longest: list[dict[str, Any]] = max(logs, key=len, default=[])
        points = [(entry["step"], entry["loss"], 0) for entry in longest if "loss" in entry]
    found: list[Start] = []
    before = math.inf
    for step, loss, ranks in points:
        if step <= before or found[-1].ranks != ranks:
            found.append(Start(ranks, {}))
        found[-1].losses[step] = loss
        before = step
    if not found:
        hint = "give a run folder, with metrics.jsonl or HF Trainer's trainer_state.json"
        raise NotFoundError("no losses are recorded here", path=run, hint=hint)
    return found


def losses_of(starts: Sequence[Start]) -> dict[int, float]:
    """Return losses by step. A repeated step's last loss counts."""
    return {step: loss for start in starts for step, loss in start.losses.items()}


def furthest(one: dict[int, float], other: dict[int, float]) -> tuple[int, int, float]:
    """Return the number of common steps, and the step and size of the largest relative distance."""
    common = sorted(one.keys() & other.keys())
    apart = {step: abs(one[step] - other[step]) / max(abs(one[step]), sys.float_info.min) for step in common}
    step = max(common, key=lambda step: apart[step], default=0)
    return len(common), step, apart.get(step, 0.0)


@dataclass(frozen=True)
class Axes:
    first: int
    last: int
    low: float
    high: float

    @classmethod
    def of(cls, starts: Sequence[Start]) -> Axes:
        steps = [step for start in starts for step in start.losses]
        losses = [loss for start in starts for loss in start.losses.values() if math.isfinite(loss)] or [0.0]
        room = (max(losses) - min(losses)) * 0.06 or 1.0
        return cls(min(steps), max(steps), min(losses) - room, max(losses) + room)

    def at(self, step: float, loss: float) -> str:
        """Put NaN and infinite losses at the bottom."""
        x = LEFT + (step - self.first) / max(1, self.last - self.first) * (WIDTH - LEFT - RIGHT)
        height = (loss - self.low) / (self.high - self.low) if math.isfinite(loss) else 0.0
        return f"{x:.2f} {TOP + (1 - height) * (HEIGHT - TOP - BOTTOM):.2f}"

    def drawn(self) -> Iterator[str]:
        for loss in ticks(self.low, self.high):
            y = self.at(self.first, loss).split()[1]
            yield f'<path class="grid" d="M{LEFT} {y}H{WIDTH - RIGHT}"/>'
            yield f'<text class="g" x="{LEFT - 8}" y="{y}" dy="4" text-anchor="end">{loss:.6g}</text>'
        for step in ticks(self.first, self.last):
            if step == int(step):
                x = self.at(step, self.low).split()[0]
                yield f'<text class="g" x="{x}" y="{HEIGHT - 22}" text-anchor="middle">{step:.0f}</text>'
        yield f'<text class="g" x="{WIDTH - RIGHT}" y="{HEIGHT - 4}" text-anchor="end">step</text>'


def draw(runs: dict[str, list[Start]]) -> str:
    """Draw the first run thick, to show below equal ones."""
    axes, height = Axes.of([start for starts in runs.values() for start in starts]), HEIGHT + 22 * len(runs)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{height}" viewBox="0 0 {WIDTH} {height}">',
        f"<title>loss of {escape(', '.join(runs))}</title><style>{_STYLE}</style>",
        f'<rect class="p" width="{WIDTH}" height="{height}"/>',
        f'<text x="{LEFT}" y="16" font-weight="600">Training loss by step: {escape(", ".join(runs))}</text>',
        f'<text class="g" x="{LEFT - 8}" y="16" text-anchor="end">loss</text>',
        *axes.drawn(),
    ]
    for number, (name, starts) in enumerate(runs.items()):
        colour = COLOURS[number % len(COLOURS)]
        stroke = f'stroke="{colour}" stroke-width="{5 if number == 0 < len(runs) - 1 else 1.8}"'
        parts += [f'<path class="run" {stroke} d="{_curve(start, axes)}"/>' for start in starts]
        for start in starts[1:]:
            parts += _mark(start, axes, colour)
        y = HEIGHT + 22 * number + 4
        parts.append(f'<path {stroke} d="M{LEFT} {y}h28"/>')
        parts.append(f'<text x="{LEFT + 36}" y="{y + 4}">{escape(_described(name, starts))}</text>')
    return "\n".join([*parts, "</svg>", ""])


def _curve(start: Start, axes: Axes) -> str:
    """Leave gaps at NaN and infinities."""
    text, is_on = "", False
    for step, loss in start.losses.items():
        if math.isfinite(loss):
            text += ("L" if is_on else "M") + axes.at(step, loss)
        is_on = math.isfinite(loss)
    return text


def _mark(start: Start, axes: Axes, colour: str) -> Iterator[str]:
    step, loss = next(iter(start.losses.items()))
    x, y = axes.at(step, loss).split()
    said = pluralize(start.ranks, "rank") if start.ranks else "resumed"
    yield f'<path stroke="{colour}" stroke-dasharray="2 3" d="M{x} {y}V{HEIGHT - BOTTOM}"/>'
    yield f'<circle cx="{x}" cy="{y}" r="4" fill="{colour}"><title>resumed at step {step}</title></circle>'
    yield f'<text class="g" x="{x}" y="{y}" dx="6" dy="-8">{said}</text>'


def _described(name: str, starts: Sequence[Start]) -> str:
    ranks = [str(start.ranks) for start in starts if start.ranks]
    return name + (f": {', then '.join(ranks)} ranks" if ranks else "")


def ticks(low: float, high: float) -> Iterator[float]:
    """Yield about six round numbers."""
    step = 10 ** math.floor(math.log10((high - low) / 6 or 1))
    step *= next(factor for factor in (1, 2, 5, 10) if (high - low) / (step * factor) <= 7)
    number = math.ceil(low / step)
    while number * step <= high:
        yield number * step
        number += 1
