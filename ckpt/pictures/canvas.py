"""SVG drawing.

Names come from untrusted files: text is bounded, and escaped for the terminal and for XML.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from html import escape

from ckpt.base.text import one_line

#: The first eight are easy to tell apart, and later neighbours too. They stay away from red (for faults) and grey.
#: Chosen by distance in OKLab, for normal vision and red-green blindness.
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
RED, INK, GREY, PAPER, TRACK = "#d00000", "#1a1a1a", "#5f5f5f", "#ffffff", "#f1f1f1"

MARGIN, GAP = 24.0, 16.0
LETTER, SANS = 7.85, 7.0  # maximum letter widths: names, other text
_SMALL, _SMALLEST = 11.0, 8.0  # labels in slices
_STRIPES = 6  # colours per pattern

#: With another colour on a dark page: paper, bar track, hole frame, axis, bytes.
_STYLE = (
    "text{font:13px system-ui,-apple-system,'Segoe UI',Helvetica,Arial,'DejaVu Sans',sans-serif}"
    ".n{font:13px ui-monospace,SFMono-Regular,Menlo,Consolas,'DejaVu Sans Mono',monospace}"
    ".h{font-size:22px;font-weight:600}.b{font-weight:600}"
    f".l{{font-size:{_SMALL:.0f}px;text-anchor:middle}}.s{{font-size:{_SMALLEST:.0f}px}}"
    f"text{{fill:{INK}}}.g{{fill:{GREY}}}.r{{fill:{RED}}}.w{{fill:#fff}}"
    f".f rect{{stroke:{PAPER};stroke-width:.5}}rect.o{{stroke:{RED};stroke-width:1.5}}"
    "@media(prefers-color-scheme:dark){"
    f"text{{fill:#e8e8e8}}.g{{fill:#a9adb5}}.l{{fill:{INK}}}.r{{fill:#ff7b72}}.w{{fill:#fff}}"
    ".p{fill:#15171c}.t{fill:#2a2d35}.k{fill:#a9adb5}.a{stroke:#a9adb5}"
    ".f rect{stroke:#15171c}rect.o{stroke:#ff7b72}}"
)


@dataclass
class Canvas:
    """A picture drawn from top to bottom. `y` is the position of the next part.

    A holder's number in `numbers` selects its colour.
    """

    numbers: Mapping[int | str, int]
    bar: float  # left end of the bars
    length: float
    width: float
    y: float = MARGIN
    parts: list[str] = field(default_factory=list)
    patterns: dict[tuple[str, tuple[str, ...]], str] = field(default_factory=dict)

    def file(self, title: str) -> str:
        return "\n".join([*self._opening(title), *self.parts, "</svg>", ""])

    def _opening(self, title: str) -> Iterator[str]:
        size = f"{n(self.width)} {n(self.y + MARGIN)}"
        width, height = size.split()
        yield '<?xml version="1.0" encoding="UTF-8"?>'
        yield f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" viewBox="0 0 {size}">'
        yield f"<title>{escaped(title)}</title>"
        yield f"<style>{_STYLE}</style>"
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
        yield f'<rect class="p" width="{width}" height="{height}" fill="{PAPER}"/>'

    def line(self, text: str, style: str, step: float) -> None:
        self.y += step
        self.say(MARGIN, self.y - 5, text, style)

    def say(self, x: float, y: float, text: str, style: str = "", more: str = "") -> None:
        style = f' class="{style}"' if style else ""
        self.parts.append(f'<text{style} x="{n(x)}" y="{n(y)}"{more}>{escaped(text)}</text>')

    def mark(self, x: float, y: float, width: float, height: float, text: str, style: str) -> None:
        if width >= len(text) * 6 and height >= 12:
            self.say(x + width / 2, y + height / 2 + 4, text, style)

    def label_in(self, x: float, y: float, text: str, colours: Sequence[str], width: float, height: float) -> None:
        """Draw a label if there is room."""
        for size in (_SMALL, _SMALLEST):
            if (needed := len(text) * size * 0.58 + 1) <= width and size <= height:
                break
        else:
            return
        style = "l" if size > _SMALLEST else "l s"
        if len(colours) > 1:
            self.rect(x - needed / 2 - 1, y - size * 0.6, needed + 2, size * 1.2, PAPER, "", ' rx="2"')
        elif not _is_light(colours[0]):
            style += " w"
        self.say(x, y + size * 0.35, text, style)

    def colour(self, holder: int | str) -> str:
        return COLOURS[(holder if isinstance(holder, int) else self.numbers[holder]) % len(COLOURS)]

    def label(self, holder: int | str) -> str:
        return str(holder) if isinstance(holder, int) else f"f{self.numbers[holder] + 1}"

    def fill(self, holders: Sequence[int | str], is_several: bool = False) -> str:
        """Return one colour, or a pattern with all holders' colours."""
        colours = tuple(dict.fromkeys(map(self.colour, holders)))[:_STRIPES]
        if len(colours) == 1:
            return colours[0]
        key = ("0" if is_several else "45", colours)
        return f"url(#{self.patterns.setdefault(key, f's{len(self.patterns)}')})"

    def rect(self, x: float, y: float, width: float, height: float, fill: str, said: str, more: str = "") -> None:
        size = f'width="{n(max(width, 0.1))}" height="{n(max(height, 0.1))}"'
        start = f'<rect x="{n(x)}" y="{n(y)}" {size} fill="{fill}"{more}'
        self.parts.append(f"{start}><title>{escaped(said)}</title></rect>" if said else f"{start}/>")


def _is_light(colour: str) -> bool:
    red, green, blue = (int(colour[at : at + 2], 16) for at in (1, 3, 5))
    return 0.299 * red + 0.587 * green + 0.114 * blue > 140


def n(value: float) -> str:
    return f"{value:.2f}".rstrip("0").rstrip(".")


def escaped(text: str, limit: int = 400) -> str:
    return escape(one_line(text, limit))


def shortened(text: str, limit: int) -> str:
    text = one_line(text)
    if len(text) <= limit:
        return text
    kept = limit // 3
    return f"{text[:kept]}…{text[len(text) - (limit - kept - 1) :]}"
