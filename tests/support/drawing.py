"""A picture's content, read back from its XML."""

from __future__ import annotations

import xml.etree.ElementTree as ET
from dataclasses import dataclass, field

SVG = "{http://www.w3.org/2000/svg}"


Edges = tuple[float, float, float, float]  # left, right, top, bottom as fractions


@dataclass
class DrawnRow:
    name: str
    about: str
    notes: list[str]
    patches: list[tuple[str, Edges]] = field(default_factory=list)  # colour, or its pattern's


@dataclass
class Drawn:
    rows: list[DrawnRow]
    texts: list[str]
    patterns: dict[str, list[str]]  # name to colours

    def row(self, name: str, role: str = "") -> DrawnRow:
        (found,) = (row for row in self.rows if row.name == name and role in row.about)
        return found

    def colours(self, fill: str) -> list[str]:
        return self.patterns[fill[len("url(#") : -1]] if fill.startswith("url") else [fill]


def parsed(svg: str) -> Drawn:
    """Parse a picture's bars and texts from its XML."""
    root = ET.fromstring(svg)
    assert root.tag == f"{SVG}svg"
    patterns = {p.get("id", ""): [r.get("fill", "") for r in p.iter(f"{SVG}rect")] for p in root.iter(f"{SVG}pattern")}
    rows = []
    for group in root.iter(f"{SVG}g"):
        if group.get("class") != "row":
            continue
        texts = ["".join(text.itertext()) for text in group.findall(f"{SVG}text")]
        name = group.find(f"{SVG}text/{SVG}title")
        (bar,) = (rect for rect in group.findall(f"{SVG}rect") if rect.get("fill") == "#f1f1f1")
        x, y, width, height = numbers(bar)
        row = DrawnRow(str(name.text) if name is not None else "", texts[1], texts[2:])
        inner = group.find(f"{SVG}g")
        assert inner is not None
        for rect in inner.findall(f"{SVG}rect"):
            if rect.get("rx"):  # behind a label
                continue
            left, top, wide, high = numbers(rect)
            edges = ((left - x) / width, (left + wide - x) / width, (top - y) / height, (top + high - y) / height)
            row.patches.append((rect.get("fill", ""), edges))
        rows.append(row)
    return Drawn(rows, ["".join(text.itertext()) for text in root.iter(f"{SVG}text")], patterns)


def numbers(rect: ET.Element) -> list[float]:
    return [float(rect.get(name, "nan")) for name in ("x", "y", "width", "height")]
