"""README's speed table and the table of all figures, from `benchmarks/results.txt` (`python -m benchmarks --record`).

Each section there has a headline, the day and machine, a title, and rows.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

RESULTS = Path(__file__).parent / "results.txt"
PAGES = ("README.md", "README.ja.md")
SHOWN = {
    "zero": "ckpt convert zero3 hf",
    "reshard": "ckpt convert zero3 zero3 --world-size 6",
    "dcp": "ckpt convert dcp full",
    "megatron": "ckpt convert megatron hf",
    "lora": "ckpt merge-lora",
}
_ROW = re.compile(
    r"^(?P<name>ckpt .+?) +(?P<seconds>\d+\.\d\d)(?: +\d+\.\d\d){3} +(?P<peak>\d+)  (?P<ratios>.+)$", re.MULTILINE
)
_RATIO = re.compile(
    r"(?P<factor>[\d.]+) \([\d.]+ to [\d.]+\) x (?P<faster>faster than )?(?P<other>.+?)"
    r"(?: \((?P<missed>MISSED )?[<>]= (?P<goal>[\d.]+)\))?"
)
#: The header, then the recorded rows.
_TABLE = re.compile(r"(<!-- python -m benchmarks --readme -->\n\n\|[^\n]+\n\| ---[^\n]+\n)(?:\|[^\n]+\n)*")
FIGURES = "docs/performance.md"
_FIGURES = re.compile(r"(<!-- python -m benchmarks --readme: all figures -->\n)(?:\n[|-][^\n]+(?:\n[|-][^\n]+)*\n)*")
#: A row with at least processor time and memory, and what is said about them.
_FIGURE = re.compile(r"(?P<name>\S.*?) {2,}(?P<numbers>\d[\d.]*(?: +\d[\d.]*)+)(?: {2,}(?P<said>.+))?")


@dataclass(frozen=True)
class Section:
    """`day` also has the machine and versions."""

    day: str
    title: str
    lines: tuple[str, ...]


def headed(name: str) -> str:
    return f"== {name} =="


def sections(results: str) -> dict[str, Section]:
    parts = re.split(r"^== (.+) ==\n", results, flags=re.MULTILINE)[1:]
    found = {}
    for name, text in zip(parts[::2], parts[1::2], strict=True):
        day, title, *lines = text.strip().splitlines()
        found[name] = Section(day, title, tuple(lines))
    return found


def recorded(results: str, measured: Mapping[str, str]) -> str:
    parts = re.split(r"^== (.+) ==\n", results, flags=re.MULTILINE)[1:]
    texts = dict(zip(parts[::2], parts[1::2], strict=True)) | measured
    return "\n".join(f"{headed(name)}\n{text.strip()}\n" for name, text in texts.items())


def rows(results: str) -> str:
    """Return the README's rows: checkpoint, command, seconds, peak MB, `cp`'s and another tool's time."""
    found = sections(results)
    return "".join(f"| {' | '.join(_row(found[name], command))} |\n" for name, command in SHOWN.items())


def _row(section: Section, command: str) -> tuple[str, ...]:
    row = next(row for row in _ROW.finditer("\n".join(section.lines)) if row["name"] == command)
    copies, tools = [], []
    for ratio in filter(None, map(_RATIO.fullmatch, row["ratios"].split("; "))):
        goal = f" (goal {ratio['goal']}{': MISSED' if ratio['missed'] else ''})" if ratio["goal"] else ""
        if ratio["other"].startswith("cp "):
            copies.append(f"{ratio['factor']}{goal}")
        else:
            speed = ratio["factor"] if ratio["faster"] else f"{1 / float(ratio['factor']):.1f}"
            tools.append(f"{speed} x faster than `{ratio['other']}`{goal}")
    source = re.sub(r" -> [^,]+", "", section.title)
    return source, f"`{command}`", row["seconds"], row["peak"], ", ".join(copies), ", ".join(tools)


def figures(results: str) -> str:
    """Return all of ckpt's figures and judged notes as a table, and each section's day and machine as a list."""
    table = [
        "| section | measured | seconds | cpu s | peak MB | ratios and goals |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    found = sections(results)
    for name, section in found.items():
        is_timed = any(line.startswith("ckpt ") for line in section.lines)
        for line in (section.title, *section.lines):
            figure = _FIGURE.fullmatch(line)
            if figure is None:
                cells = (line.strip(), "", "", "", "") if "<=" in line or ">=" in line or "has ended" in line else None
            elif figure["name"].startswith("ckpt ") or not is_timed:
                *times, cpu, peak = figure["numbers"].split()
                cells = (figure["name"], times[0] if times else "", cpu, peak, figure["said"] or "")
            else:
                cells = None
            if cells is not None:
                table.append(f"| {name} | {' | '.join(cells)} |")
    days = [f"- `{name}`: {section.title}; {section.day}" for name, section in found.items()]
    return "\n" + "\n".join(table) + "\n\n" + "\n".join(days) + "\n"


def with_rows(page: str, results: str) -> str:
    page = _TABLE.sub(lambda table: table[1] + rows(results), page)
    return _FIGURES.sub(lambda table: table[1] + figures(results), page)


def write() -> None:
    results = RESULTS.read_text()
    for name in (*PAGES, FIGURES):
        path = Path(name)
        path.write_text(with_rows(path.read_text(), results))
