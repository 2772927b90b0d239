"""SVG picture of a checkpoint, with the same bytes for the same checkpoint.

The browser chooses a light or a dark style (`prefers-color-scheme`).
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from ckpt.base.text import one_line, pluralize, show_size
from ckpt.commands.inspect.rows import Picture, Row
from ckpt.commands.inspect.sketch import Patch, holder_text
from ckpt.commands.inspect.summary import draw_head, draw_patch, part_colour, part_of
from ckpt.pictures.canvas import GAP, GREY, LETTER, MARGIN, RED, SANS, TRACK, Canvas, escaped, n, shortened
from ckpt.plan.checkpoint import Checkpoint

_BAR, _LONG_BAR, _NOTES = 580.0, 740.0, 250.0  # the longest name decides the first column
_LONG_FROM = 32  # ranks
_MAX_NAME = 96  # letters
_ROW, _BAND, _MAX_HEIGHT = 30.0, 12.0, 448.0
_STRIP, _BETWEEN = 3.0, 14.0
_THIN = 3.0  # for faults and padding
_MAX_TOOLTIPS = 10_000  # patches with their own texts


def draw(picture: Picture, checkpoint: Checkpoint) -> str:
    return _Drawing(picture, checkpoint).draw("/".join(Path(checkpoint.path).parts[-2:]))


class _Drawing:
    def __init__(self, picture: Picture, checkpoint: Checkpoint) -> None:
        self.picture, self.checkpoint, rows = picture, checkpoint, picture.rows
        #: Without sharded tensors, bars show sizes by their lengths.
        self.is_by_size = all(isinstance(holder, str) for holder in picture.holders) and all(
            not row.sketch.faults and all(patch.kind == "held" for patch in row.sketch.patches) for row in rows
        )
        self.is_by_part = self.is_by_size and len(picture.holders) == 1
        self.most = max([1, *(row.nbytes for row in rows)])
        self.total = max(1, sum(row.nbytes for row in rows))
        self.has_tooltips = sum(len(row.sketch.patches) for row in rows) <= _MAX_TOOLTIPS
        names = [len(one_line(row.name)) * LETTER for row in rows]
        abouts = [len(_about(row)) * SANS for row in rows]
        column = min(max([300.0, *names, *abouts]), _MAX_NAME * LETTER)
        numbers = {holder: number for number, holder in enumerate(picture.holders)}
        length = _LONG_BAR if len(numbers) > _LONG_FROM else _BAR
        self.canvas = Canvas(numbers, MARGIN + column + GAP, length, column + length + _NOTES + 2 * (MARGIN + GAP))

    def draw(self, title: str) -> str:
        draw_head(self.canvas, self.picture, self.checkpoint, title, by_part=self.is_by_part)
        self._axis()
        for row in self.picture.rows:
            self._row(row)
        self._foot()
        return self.canvas.file(title)

    def _axis(self) -> None:
        canvas = self.canvas
        x, end = canvas.bar, canvas.bar + canvas.length
        canvas.say(MARGIN, canvas.y + 4, "tensor", "g")
        if self.is_by_size:
            canvas.say(x, canvas.y + 4, "bar length shows tensor size", "g")
            canvas.say(end, canvas.y + 4, show_size(self.most), "g", ' text-anchor="end"')
        else:
            canvas.say(x, canvas.y + 4, "first element", "g")
            canvas.say(end, canvas.y + 4, "last element", "g", ' text-anchor="end"')
            middle = "each bar is a tensor: dim 0 runs to the right"
            canvas.say(x + canvas.length / 2, canvas.y + 4, middle, "g", ' text-anchor="middle"')
        canvas.y += 10
        canvas.parts.append(
            f'<path class="a" d="M{n(x)} {n(canvas.y)}h{n(canvas.length)}m-5 -3l5 3l-5 3" fill="none" stroke="{GREY}"/>'
        )
        canvas.y += 12

    def _foot(self) -> None:
        texts = []
        if not self.is_by_size:
            texts.append(
                f"Bars are equally wide; the grey strip below each is its share of all bytes, the longest is of "
                f"{show_size(self.most)}. What is red or hatched is drawn at least 3 pixels wide."
            )
        if any(row.sketch.down and not row.is_grid for row in self.picture.rows):
            texts.append("Where “↓ dim 1” stands beside a bar, slices are cut in that dim too: it runs downwards.")
        if any(row.is_grid for row in self.picture.rows):
            texts.append("In a bar with the words “tensors side by side”, each cell is one whole tensor.")
        if not self.has_tooltips:
            texts.append("There are too many slices for tooltips.")
        for text in texts:
            self.canvas.line(text, "g", 18)

    def _row(self, row: Row) -> None:
        canvas, notes = self.canvas, [*_labels(row)]
        share = row.nbytes / self.total
        if share >= 0.005:
            notes.append((f"{show_size(row.nbytes)}, {share:.1%}", "g"))
        height = max(_ROW, min(row.sketch.bands * _BAND, _MAX_HEIGHT), 16.0 * len(notes) - _STRIP)
        tooltip = f"<title>{escaped(row.name)}</title>"
        canvas.parts.append('<g class="row">')
        if row.sketch.faults:
            canvas.rect(MARGIN - 10, canvas.y - 1, 4, height + 2, RED, "")
        name = escaped(shortened(row.name, _MAX_NAME), 500)
        canvas.parts.append(f'<text class="n" x="{n(MARGIN)}" y="{n(canvas.y + 12)}">{name}{tooltip}</text>')
        canvas.say(MARGIN, canvas.y + 28, shortened(_about(row), int((canvas.bar - MARGIN - GAP) / SANS)), "g")
        canvas.rect(canvas.bar, canvas.y, canvas.length, height, TRACK, "", ' class="t"')
        canvas.parts.append('<g class="f">')
        for patch in row.sketch.patches:
            self._patch(row, patch, height)
        canvas.parts.append("</g>")
        if not row.sketch.patches:
            canvas.say(canvas.bar + 6, canvas.y + 19, "no elements", "g")
        if not self.is_by_size:
            width, said = canvas.length * row.nbytes / self.most, f"{show_size(row.nbytes)}, {share:.1%} of all"
            canvas.rect(canvas.bar, canvas.y + height + 1, width, _STRIP, GREY, said, ' class="k"')
        for number, (text, style) in enumerate(notes):
            canvas.say(canvas.bar + canvas.length + GAP, canvas.y + 12 + 16 * number, shortened(text, 40), style)
        canvas.parts.append("</g>")
        canvas.y += height + _BETWEEN

    def _patch(self, row: Row, patch: Patch, height: float) -> None:
        canvas = self.canvas
        length = canvas.length * (row.nbytes / self.most if self.is_by_size else 1)
        left, right = patch.left * length, patch.right * length
        top, bottom = patch.top * height, patch.bottom * height
        if patch.kind in ("hole", "overlap", "padding"):
            left, right = _widened(left, right, length)
            top, bottom = _widened(top, bottom, height)
        said = _patch_label(patch) if self.has_tooltips else ""
        x, y, width = canvas.bar + left, canvas.y + top, max(right - left, 1.0)
        if self.is_by_part:
            canvas.rect(x, y, width, bottom - top, part_colour(row.name), f"{part_of(row.name)}: {said}")
        else:
            draw_patch(canvas, patch, x, y, width if self.is_by_size else right - left, bottom - top, said)


def _about(row: Row) -> str:
    dtypes: dict[str, list[str]] = {}
    for role, dtype in row.roles:
        dtypes.setdefault(dtype, []).append(one_line(role, 40))
    roles = "; ".join(f"{', '.join(roles)} {dtype}" for dtype, roles in dtypes.items())
    return f"{list(row.shape)} · {show_size(row.nbytes)} · {roles}"


def _labels(row: Row) -> Iterator[tuple[str, str]]:
    sketch, count = row.sketch, len(row.fqns)
    if row.is_grid:
        yield f"{pluralize(count, 'tensor', ',')} side by side", "b"
        yield f"→ {one_line(sketch.across, 60)}", "g"
    elif count > 1:
        yield f"× {count:,} alike", "b"
    if sketch.down:
        yield f"↓ {one_line(sketch.down, 60)}", "g"
    if sketch.faults:
        yield sketch.faults[0], "r"
    if len(sketch.faults) > 1:
        yield f"and {pluralize(len(sketch.faults) - 1, 'fault', ',')} more", "r"
    if sketch.copies > 1:
        yield pluralize(sketch.copies, "copy"), "g"
    if sketch.padding:
        yield f"padding: {pluralize(sketch.padding, 'element', ',')}", "g"
    yield from ((remark, "g") for remark in sketch.remarks[:2])


def _patch_label(patch: Patch) -> str:
    who = holder_text(one_line(h, 100) if isinstance(h, str) else h for h in patch.holders)
    if patch.kind in ("hole", "overlap", "padding"):
        who = f"{patch.kind} {who}".rstrip()
    return ": ".join(filter(None, (who, patch.region)))


def _widened(start: float, stop: float, full: float) -> tuple[float, float]:
    """Return the edges, at least `_THIN` apart and within `full`."""
    if stop - start >= _THIN:
        return start, stop
    start = max(0.0, min(start, full - _THIN))
    return start, min(start + _THIN, full)
