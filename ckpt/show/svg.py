"""A picture as SVG: one file of text that every browser shows, the same bytes for the same checkpoint.

Pure.  Names come from files that somebody else wrote: all text is bounded, and escaped for the terminal and for XML.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from html import escape
from pathlib import Path

from ckpt.plan.checkpoint import Checkpoint
from ckpt.show.overview import ranks_text
from ckpt.show.rows import Picture, Row
from ckpt.show.sketch import Holder, Patch, holder_text
from ckpt.sizes import show_size
from ckpt.text import counted, one_line, summary_text

#: The first eight are told apart by everybody; of all of them, neighbours are, and none is near a red, which is for
#: faults, or a grey.  Chosen for their distance in OKLab, as seen with normal vision and with red-green blindness.
# fmt: off
COLOURS = (
    "#0072b2", "#e69f00", "#009e73", "#cc79a7", "#56b4e9", "#f0e442", "#61206f", "#7c9217",
    "#25e1ce", "#5e498e", "#d7c814", "#7b8dd6", "#9dedfa", "#116b1a", "#a1759f", "#96d5b2",
    "#543be5", "#604730", "#80ac7f", "#4615a3", "#e4c6e2", "#47739b", "#a2b563", "#f983f7",
    "#536091", "#bfe9d8", "#16a4b5", "#3742c5", "#686543", "#f6d8bc", "#9b56c2", "#1d4a50",
    "#d3da66", "#c91fae", "#b9bff8", "#a9f781", "#76596e", "#ca94d6", "#001bbe", "#714e46",
    "#56d298", "#7b50fc", "#527869", "#1cda73", "#a071fc", "#413e96", "#70733a", "#79c5d8",
    "#6a69db", "#59373d", "#11ae5b", "#b680f3", "#8d247b", "#85eba3", "#af8688", "#4b4967",
    "#bac04a", "#8e72d0", "#5f3809", "#4a9b4c", "#731f85", "#72e3ff", "#8b708a", "#fbb17d",
)
# fmt: on
RED, INK, GREY, PAPER = "#d00000", "#1a1a1a", "#5f5f5f", "#ffffff"

_MARGIN, _GAP = 20.0, 14.0
_BAR, _LONG_BAR, _NOTES = 580.0, 740.0, 225.0  # widths of the columns; that of names goes by the longest
_LONG_FROM = 32  # ranks
_LETTER, _SANS = 6.65, 5.9  # widths of a letter of a name, and of one of other text at most
_MAX_NAME = 66  # letters
_ROW, _BAND, _MAX_HEIGHT = 30.0, 10.0, 448.0
_BETWEEN = 9.0
_THIN = 3.0  # what is wrong and what is padding is never drawn narrower
_STRIPES = 6  # colours of one pattern
_MAX_TOOLTIPS = 10_000  # patches with texts of their own
_LISTED = 8
_NAMED = 16  # holders with a text each in the legend
_PER_LINE = 32


def draw(picture: Picture, checkpoint: Checkpoint) -> str:
    """The picture of `checkpoint` as the text of an SVG file."""
    return _Drawing(picture).draw("/".join(Path(checkpoint.path).parts[-2:]), list(_facts(checkpoint)))


def _facts(checkpoint: Checkpoint) -> Iterator[str]:
    yield checkpoint.format
    if checkpoint.framework:
        yield checkpoint.framework
    model = (checkpoint.config or {}).get("model_type")
    if isinstance(model, str):
        yield model
    if checkpoint.state.step is not None:
        yield f"step {summary_text(checkpoint.state.step)}"
    if checkpoint.world_size is not None:
        yield f"world size {checkpoint.world_size}"


@dataclass
class _Drawing:
    picture: Picture
    parts: list[str] = field(default_factory=list)
    patterns: dict[tuple[str, tuple[str, ...]], str] = field(default_factory=dict)
    y: float = _MARGIN

    def draw(self, title: str, facts: Sequence[str]) -> str:
        names = [len(_shortened(row.name)) for row in self.picture.rows]
        lines = [len(_about(row)) * _SANS / _LETTER for row in self.picture.rows]
        self.bar = _MARGIN + min(max([30, *names, *lines]), _MAX_NAME) * _LETTER + _GAP
        self.length = _LONG_BAR if len(self.picture.holders) > _LONG_FROM else _BAR
        self.width = self.bar + self.length + _GAP + _NOTES + _MARGIN
        self.numbers = {holder: number for number, holder in enumerate(self.picture.holders)}
        self.has_tooltips = sum(len(row.sketch.patches) for row in self.picture.rows) <= _MAX_TOOLTIPS
        self._head(title, facts)
        self._legend()
        self._axis()
        for row in self.picture.rows:
            self._row(row)
        self._foot()
        return "\n".join([*self._opening(title), *self.parts, "</svg>", ""])

    def _opening(self, title: str) -> Iterator[str]:
        size = f"{_n(self.width)} {_n(self.y + _MARGIN)}"
        width, height = size.split()
        yield '<?xml version="1.0" encoding="UTF-8"?>'
        yield f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" viewBox="0 0 {size}">'
        yield f"<title>{_text(title)}</title>"
        yield (
            "<style>text{font:11px system-ui,-apple-system,'Segoe UI',Helvetica,Arial,'DejaVu Sans',sans-serif}"
            ".n{font:11px ui-monospace,SFMono-Regular,Menlo,Consolas,'DejaVu Sans Mono',monospace}"
            ".h{font-size:17px;font-weight:600}.b{font-weight:600}.l{font-size:9px;text-anchor:middle}.s{font-size:7px}"
            f"text{{fill:{INK}}}.g{{fill:{GREY}}}.r{{fill:{RED}}}.w{{fill:#fff}}"
            f".f rect{{stroke:{PAPER};stroke-width:.5}}</style>"
        )
        yield "<defs>"
        yield (
            '<pattern id="padding" width="5" height="5" patternUnits="userSpaceOnUse" patternTransform="rotate(45)">'
            '<rect width="5" height="5" fill="#fff" fill-opacity=".55"/>'
            '<rect width="1.6" height="5" fill="#444"/></pattern>'
        )
        for (angle, colours), name in self.patterns.items():
            stripe = 5 if angle == "45" else 3
            stripes = "".join(
                f'<rect x="{i * stripe}" width="{stripe}" height="8" fill="{colour}"/>'
                for i, colour in enumerate(colours)
            )
            yield (
                f'<pattern id="{name}" width="{stripe * len(colours)}" height="8" patternUnits="userSpaceOnUse" '
                f'patternTransform="rotate({angle})">{stripes}</pattern>'
            )
        yield "</defs>"
        yield f'<rect width="{width}" height="{height}" fill="{PAPER}"/>'

    # -- around the rows -------------------------------------------------------------------------------------

    def _head(self, title: str, facts: Sequence[str]) -> None:
        picture = self.picture
        self._line(title, "h", 22)
        self._line(" · ".join(one_line(fact, 100) for fact in facts), "g", 17)
        if picture.damaged:
            self._line(f"Damaged: {counted(len(picture.damaged), 'tensor', ',')} not stored exactly once", "b r", 16)
            for damage in picture.damaged[:_LISTED]:
                more = f" and {len(damage.faults) - 2} more" if len(damage.faults) > 2 else ""
                what = (
                    f"{one_line(damage.fqn, 90)} ({one_line(damage.role, 30)}): " + "; ".join(damage.faults[:2]) + more
                )
                self._line(what, "n r", 15)
            if len(picture.damaged) > _LISTED:
                self._line(f"and {len(picture.damaged) - _LISTED} more", "r", 15)
        else:
            self._line("No holes and no overlaps: every element of every tensor drawn here is stored.", "b", 16)
        drawn = sum(row.num_tensors for row in picture.rows)
        text = f"{counted(drawn, 'tensor', ',')} in {counted(len(picture.rows), 'row', ',')}"
        if drawn > len(picture.rows):
            text += ": those that look the same and differ only in role, or in the numbers in their names, are one row"
        self._line(text + ".", "g", 15)
        if picture.rows_left_out:
            rest = picture.num_tensors - drawn
            self._line(f"Not drawn: {counted(rest, 'tensor', ',')} in {picture.rows_left_out} further rows.", "b r", 15)

    def _legend(self) -> None:
        self.y += 6
        holders = list(self.picture.holders)
        if len(holders) <= _NAMED:
            self._named_holders(holders)
        else:
            self._numbered_holders(holders)
        self._kinds()

    def _named_holders(self, holders: Sequence[Holder]) -> None:
        texts = [
            f"{holder_text([holder]) if isinstance(holder, int) else f'{self._label(holder)}: {one_line(holder, 60)}'}"
            f" · {show_size(self.picture.holders[holder])}"
            for holder in holders
        ]
        step = max([100.0, *(len(text) * _SANS + 40 for text in texts)])
        per_line = max(1, int((self.width - 2 * _MARGIN) / step))
        for number, (holder, text) in enumerate(zip(holders, texts, strict=True)):
            if number and number % per_line == 0:
                self.y += 19
            x = _MARGIN + number % per_line * step
            self._rect(x, self.y, 18, 13, self._fill((holder,)), holder_text([one_line(str(holder), 100)]))
            self._say(x + 24, self.y + 10.5, text)
        self.y += 24

    def _numbered_holders(self, holders: Sequence[Holder]) -> None:
        shown = holders[: len(COLOURS)]
        width = (self.width - 2 * _MARGIN) / _PER_LINE
        what = "ranks" if all(isinstance(holder, int) for holder in holders) else "ranks and files"
        sizes = [*self.picture.holders.values()]
        least, most = show_size(min(sizes)), show_size(max(sizes))
        text = f"{len(holders)} {what}, each with {least if least == most else f'{least} to {most}'}"
        if len(holders) > len(shown):
            text += f". Colours repeat after {len(shown)}: labels and tooltips tell which it is"
        self._say(_MARGIN, self.y + 9, text + ".", "g")
        self.y += 15
        for number, holder in enumerate(shown):
            if number and number % _PER_LINE == 0:
                self.y += 19
            x = _MARGIN + number % _PER_LINE * width
            named = f"{holder_text([holder])}: {show_size(self.picture.holders[holder])}"
            self._rect(x, self.y, width - 2, 15, self._fill((holder,)), named)
            self._label_in(x + (width - 2) / 2, self.y + 7.5, self._label(holder), (holder,), width, 15)
        self.y += 24

    def _kinds(self) -> None:
        """What is not a plain slice of one rank, as far as it is there; faults in any case."""
        patches = [patch for row in self.picture.rows for patch in row.sketch.patches]
        kinds = {patch.kind for patch in patches}
        any_two = list(self.picture.holders)[:2]
        found: list[tuple[Patch, str]] = []

        def sample(kind: str, holders: Sequence[Holder] = ()) -> Patch:
            return Patch(kind, 0, 0, 1, 1, tuple(holders))  # type: ignore[arg-type]

        if any(patch.kind == "held" and len(patch.holders) > 1 for patch in patches):
            found.append((sample("held", any_two), "copies: each of these ranks holds it"))
        if "several" in kinds:
            found.append((sample("several", any_two), "slices of several ranks, too narrow to draw apart"))
        if "padding" in kinds:
            found.append((sample("padding", any_two[:1]), "padding: stored, means nothing"))
        found += [(sample("hole"), "hole: stored nowhere"), (sample("overlap"), "overlap: stored twice")]
        x = _MARGIN
        for patch, text in found:
            self._patch(patch, x, self.y, 18, 13, "", has_label=False)
            self._say(x + 24, self.y + 10.5, text)
            x += len(text) * _SANS + 46
        self.y += 26

    def _axis(self) -> None:
        x, end = self.bar, self.bar + self.length
        self._say(_MARGIN, self.y + 4, "tensor", "g")
        self._say(x, self.y + 4, "first element", "g")
        self._say(end, self.y + 4, "last element", "g", ' text-anchor="end"')
        middle = "each bar is a tensor, in row-major order: dim 0 runs to the right"
        self._say(x + self.length / 2, self.y + 4, middle, "g", ' text-anchor="middle"')
        self.y += 8
        self.parts.append(
            f'<path d="M{_n(x)} {_n(self.y)}h{_n(self.length)}m-5 -3l5 3l-5 3" fill="none" stroke="{GREY}"/>'
        )
        self.y += 10

    def _foot(self) -> None:
        texts = [
            "Bars are equally wide whatever a tensor's size. What is red or hatched is drawn at least 3 pixels wide."
        ]
        if any(row.sketch.down and not row.is_grid for row in self.picture.rows):
            texts.append("Where “↓ dim 1” stands beside a bar, slices are cut in that dim too: it runs downwards.")
        if any(row.is_grid for row in self.picture.rows):
            texts.append("Where a bar is said to be tensors side by side, each of its cells is one whole tensor.")
        if not self.has_tooltips:
            texts.append("There are too many slices for tooltips.")
        for text in texts:
            self._line(text, "g", 15)

    # -- a row -----------------------------------------------------------------------------------------------

    def _row(self, row: Row) -> None:
        notes = list(_notes(row))
        height = max(_ROW, min(row.sketch.bands * _BAND, _MAX_HEIGHT), 13.0 * len(notes))
        tooltip = f"<title>{_text(row.name)}</title>"
        self.parts.append('<g class="row">')
        if row.sketch.faults:
            self._rect(_MARGIN - 10, self.y - 1, 4, height + 2, RED, "")
        name = _text(_shortened(row.name), 500)
        self.parts.append(f'<text class="n" x="{_n(_MARGIN)}" y="{_n(self.y + 11)}">{name}{tooltip}</text>')
        self._say(_MARGIN, self.y + 25, _shortened(_about(row), int((self.bar - _MARGIN - _GAP) / _SANS)), "g")
        self._rect(self.bar, self.y, self.length, height, "#f1f1f1", "")
        self.parts.append('<g class="f">')
        for patch in row.sketch.patches:
            left, right = patch.left * self.length, patch.right * self.length
            top, bottom = patch.top * height, patch.bottom * height
            if patch.kind in ("hole", "overlap", "padding"):
                left, right = _widened(left, right, self.length)
                top, bottom = _widened(top, bottom, height)
            said = _said(patch) if self.has_tooltips else ""
            self._patch(patch, self.bar + left, self.y + top, right - left, bottom - top, said)
        self.parts.append("</g>")
        if not row.sketch.patches:
            self._say(self.bar + 6, self.y + 18, "no elements", "g")
        for number, (text, style) in enumerate(notes):
            self._say(self.bar + self.length + _GAP, self.y + 11 + 13 * number, _shortened(text, 40), style)
        self.parts.append("</g>")
        self.y += height + _BETWEEN

    def _patch(
        self, patch: Patch, x: float, y: float, width: float, height: float, said: str, has_label: bool = True
    ) -> None:
        if patch.kind == "hole":
            self._rect(
                x + 0.75, y + 0.75, width - 1.5, height - 1.5, PAPER, said, f' style="stroke:{RED};stroke-width:1.5"'
            )
            self._mark(x, y, width, height, "hole", "l r")
        elif patch.kind == "overlap":
            self._rect(x, y, width, height, RED, said)
            self._mark(x, y, width, height, "overlap", "l w")
        elif patch.kind == "padding":
            if patch.holders:
                self._rect(x, y, width, height, self._fill(patch.holders), "")
            self._rect(x, y, width, height, "url(#padding)", said)
        else:
            self._rect(x, y, width, height, self._fill(patch.holders, patch.kind == "several"), said)
            if has_label:
                ranks = [holder for holder in patch.holders if isinstance(holder, int)]
                files = [self._label(holder) for holder in patch.holders if isinstance(holder, str)]
                label = " ".join([*([ranks_text(ranks)] if ranks else []), *files])
                self._label_in(x + width / 2, y + height / 2, label, patch.holders, width, height)

    def _mark(self, x: float, y: float, width: float, height: float, text: str, style: str) -> None:
        if width >= len(text) * 5 and height >= 10:
            self._say(x + width / 2, y + height / 2 + 3, text, style)

    def _label_in(self, x: float, y: float, text: str, holders: Sequence[Holder], width: float, height: float) -> None:
        """A label around the middle of a slice, where it has room."""
        fitting = [size for size in (9.0, 7.0) if len(text) * size * 0.58 + 1 <= width and size <= height]
        if not fitting:
            return
        size = fitting[0]
        needed, style = len(text) * size * 0.58 + 1, "l" if size > 7 else "l s"
        if len(holders) > 1:
            self._rect(x - needed / 2 - 1, y - size * 0.6, needed + 2, size * 1.2, PAPER, "", ' rx="2"')
        elif not _is_light(self._colour(holders[0])):
            style += " w"
        self._say(x, y + size * 0.35, text, style)

    # -- pieces ----------------------------------------------------------------------------------------------

    def _colour(self, holder: Holder) -> str:
        return COLOURS[(holder if isinstance(holder, int) else self.numbers[holder]) % len(COLOURS)]

    def _label(self, holder: Holder) -> str:
        return str(holder) if isinstance(holder, int) else f"f{self.numbers[holder] + 1}"

    def _fill(self, holders: Sequence[Holder], is_several: bool = False) -> str:
        colours = tuple(dict.fromkeys(map(self._colour, holders)))[:_STRIPES]
        if len(colours) == 1:
            return colours[0]
        key = ("0" if is_several else "45", colours)
        return f"url(#{self.patterns.setdefault(key, f's{len(self.patterns)}')})"

    def _rect(self, x: float, y: float, width: float, height: float, fill: str, said: str, more: str = "") -> None:
        size = f'width="{_n(max(width, 0.1))}" height="{_n(max(height, 0.1))}"'
        start = f'<rect x="{_n(x)}" y="{_n(y)}" {size} fill="{fill}"{more}'
        self.parts.append(f"{start}><title>{_text(said)}</title></rect>" if said else f"{start}/>")

    def _line(self, text: str, style: str, step: float) -> None:
        self.y += step
        self._say(_MARGIN, self.y - 4, text, style)

    def _say(self, x: float, y: float, text: str, style: str = "", more: str = "") -> None:
        style = f' class="{style}"' if style else ""
        self.parts.append(f'<text{style} x="{_n(x)}" y="{_n(y)}"{more}>{_text(text)}</text>')


def _about(row: Row) -> str:
    """The shape, the roles by dtype, and the bytes."""
    dtypes: dict[str, list[str]] = {}
    for role, dtype in row.roles:
        dtypes.setdefault(dtype, []).append(one_line(role, 40))
    roles = "; ".join(f"{', '.join(roles)} {dtype}" for dtype, roles in dtypes.items())
    return f"{list(row.shape)} · {show_size(row.nbytes)} · {roles}"


def _notes(row: Row) -> Iterator[tuple[str, str]]:
    """What stands beside a bar, and its style."""
    sketch, count = row.sketch, len(row.fqns)
    if row.is_grid:
        yield f"{count:,} tensors side by side", "b"
        yield f"→ {one_line(sketch.across, 60)}", "g"
    elif count > 1:
        yield f"× {count:,} alike", "b"
    if sketch.down:
        yield f"↓ {one_line(sketch.down, 60)}", "g"
    if sketch.faults:
        yield sketch.faults[0], "r"
    if len(sketch.faults) > 1:
        yield f"and {counted(len(sketch.faults) - 1, 'fault', ',')} more", "r"
    if sketch.copies > 1:
        yield f"{sketch.copies} copies", "g"
    if sketch.padding:
        yield f"padding: {counted(sketch.padding, 'element', ',')}", "g"
    yield from ((remark, "g") for remark in sketch.remarks[:2])


def _said(patch: Patch) -> str:
    who = holder_text(one_line(h, 100) if isinstance(h, str) else h for h in patch.holders)
    if patch.kind in ("hole", "overlap", "padding"):
        who = f"{patch.kind} {who}".rstrip()
    return ": ".join(filter(None, (who, patch.region)))


def _widened(start: float, stop: float, full: float) -> tuple[float, float]:
    """At least `_THIN` wide, within `full`."""
    if stop - start >= _THIN:
        return start, stop
    start = max(0.0, min(start, full - _THIN))
    return start, min(start + _THIN, full)


def _shortened(text: str, limit: int = _MAX_NAME) -> str:
    text = one_line(text)
    if len(text) <= limit:
        return text
    kept = limit // 3
    return f"{text[:kept]}…{text[len(text) - (limit - kept - 1) :]}"


def _is_light(colour: str) -> bool:
    red, green, blue = (int(colour[at : at + 2], 16) for at in (1, 3, 5))
    return 0.299 * red + 0.587 * green + 0.114 * blue > 140


def _n(value: float) -> str:
    """A length, to a hundredth of a pixel."""
    return f"{value:.2f}".rstrip("0").rstrip(".")


def _text(text: str, limit: int = 400) -> str:
    return escape(one_line(text, limit))
