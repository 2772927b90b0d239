"""README's speed table, copied from `benchmarks/results.txt` (`python -m benchmarks --record`)."""

from __future__ import annotations

import re
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


def headed(name: str) -> str:
    return f"== {name} =="


def rows(results: str) -> str:
    """Return the README's rows: checkpoint, command, seconds, peak MB, `cp`'s and another tool's time."""
    return "".join(f"| {' | '.join(_row(results, *shown))} |\n" for shown in SHOWN.items())


def _row(results: str, section: str, command: str) -> tuple[str, ...]:
    title, _, table = results.partition(f"{headed(section)}\n")[2].partition("\n\n")[0].partition("\n")
    row = next(row for row in _ROW.finditer(table) if row["name"] == command)
    copies, tools = [], []
    for ratio in filter(None, map(_RATIO.fullmatch, row["ratios"].split("; "))):
        goal = f" (goal {ratio['goal']}{': MISSED' if ratio['missed'] else ''})" if ratio["goal"] else ""
        if ratio["other"].startswith("cp "):
            copies.append(f"{ratio['factor']}{goal}")
        else:
            speed = ratio["factor"] if ratio["faster"] else f"{1 / float(ratio['factor']):.1f}"
            tools.append(f"{speed} x faster than `{ratio['other']}`{goal}")
    source = re.sub(r" -> [^,]+", "", title)
    return source, f"`{command}`", row["seconds"], row["peak"], ", ".join(copies), ", ".join(tools)


def with_rows(page: str, results: str) -> str:
    return _TABLE.sub(lambda table: table[1] + rows(results), page)


def write() -> None:
    results = RESULTS.read_text()
    for name in PAGES:
        path = Path(name)
        path.write_text(with_rows(path.read_text(), results))
