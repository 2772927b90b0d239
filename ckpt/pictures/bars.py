"""Stacked bars for `ckpt estimate --picture`: memory per GPU by strategy."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ckpt.base.text import show_size
from ckpt.pictures.canvas import COLOURS, GAP, LETTER, MARGIN, RED, SANS, Canvas, n, shortened

_LENGTH, _TOTALS = 720.0, 190.0
_TALL, _LOW, _BETWEEN = 17.0, 9.0, 12.0
#: Bars are cut at this multiple of the limit: short ones stay readable.
_MOST = 2.0


@dataclass(frozen=True, slots=True)
class Bar:
    """One strategy: bytes by part, and the same with activation checkpointing (None if unknown)."""

    title: str
    parts: Mapping[str, int]
    checkpointed: Mapping[str, int] | None


def draw_bars(title: str, facts: Sequence[str], bars: Sequence[Bar], limit: int, usable: float) -> str:
    """Return SVG text. `limit` is a GPU's memory, `usable` the fraction that may be filled."""
    names = list(dict.fromkeys(name for bar in bars for parts in (bar.parts, bar.checkpointed or {}) for name in parts))
    colours = {name: COLOURS[number] for number, name in enumerate(names)}
    totals = [sum(parts.values()) for bar in bars for parts in (bar.parts, bar.checkpointed or {})]
    scale = _LENGTH / min(max([limit * 1.1, *totals]), limit * _MOST)
    column = max(len(bar.title) for bar in bars) * LETTER
    start = MARGIN + column + GAP
    canvas = Canvas({}, start, _LENGTH, start + _LENGTH + _TOTALS)
    canvas.line(title, "h", 26)
    for fact in facts:
        canvas.line(fact, "g", 20)
    _legend(canvas, colours)
    top = canvas.y + 18
    canvas.y = top + 8
    for bar in bars:
        canvas.parts.append('<g class="f">')
        canvas.say(MARGIN, canvas.y + 13, shortened(bar.title, 60), "n")
        _stack(canvas, bar.parts, colours, scale, _TALL, limit * usable)
        if bar.checkpointed is not None:
            _stack(canvas, bar.checkpointed, colours, scale, _LOW, limit * usable)
        canvas.parts.append("</g>")
        canvas.y += _BETWEEN
    for part, style in ((1.0, ""), (usable, ' stroke-dasharray="3 4"')):
        x = start + limit * part * scale
        line = f'<path d="M{n(x)} {n(top)}V{n(canvas.y)}" stroke="{RED}" stroke-width="1.5" fill="none"{style}/>'
        canvas.parts.append(line)
    x = start + limit * scale
    canvas.say(x, top - 5, f"{show_size(limit)} of a GPU; dotted: {usable:.0%} of it", "r", ' text-anchor="middle"')
    canvas.line("The upper bar of each is the peak without activation checkpointing, the lower one with it.", "g", 20)
    return canvas.file(title)


def _legend(canvas: Canvas, colours: Mapping[str, str]) -> None:
    x = canvas.bar
    canvas.y += 8
    for name, colour in colours.items():
        canvas.rect(x, canvas.y + 1, 14, 12, colour, "")
        canvas.say(x + 20, canvas.y + 12, name, "g")
        x += len(name) * SANS + 44
    canvas.y += 22


def _stack(
    canvas: Canvas, parts: Mapping[str, int], colours: Mapping[str, str], scale: float, height: float, usable: float
) -> None:
    """Draw the total in red if it exceeds the usable memory."""
    x, end, total = canvas.bar, canvas.bar + canvas.length, sum(parts.values())
    for name, nbytes in parts.items():
        width = min(nbytes * scale, end - x)
        if width > 0:
            canvas.rect(x, canvas.y, width, height, colours[name], f"{name}: {show_size(nbytes)}")
            x += width
    text = show_size(total) + (" …" if total * scale > canvas.length + 1 else "")
    canvas.say(end + GAP, canvas.y + height - 4 + (height < _TALL) * 3, text, "r" if total > usable else "g")
    canvas.y += height + 2
