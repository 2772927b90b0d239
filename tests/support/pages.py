"""Commands in a page's blocks, compared with their real output.

`$ ` begins a command, and the lines below are its whole output; `...` stands for any lines or text, and times may
differ. A block without output shows only commands.
"""

from __future__ import annotations

import difflib
import math
import re
import shlex
import textwrap
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial

_PART = re.compile(
    r"^## (?P<heading>.+)$|^```(?P<kind>\w*)\n(?P<fenced>[\s\S]*?)^```$|(?P<indented>^ {4}.*\n(?:\n? {4}.*\n)*)",
    re.MULTILINE,
)
_PROMPT = "$ "
#: A conversion's time and speed.
_TOOK = re.compile(r"\bin \d+\.\d s, [\d.]+ [kMGT]?B/s(?=, (not )?verified$)", re.MULTILINE)


@dataclass
class Command:
    """A command of a page, its exit code and its output lines, or None if the page shows no output."""

    text: str
    heading: str
    code: int = 0
    printed: list[str] | None = field(default_factory=list)

    @property
    def words(self) -> list[str]:
        return shlex.split(self.text, comments=True)


@dataclass(frozen=True)
class Block:
    """Lines of a block without its indentation, and the heading (`## `) above it."""

    heading: str
    lines: list[str]

    def commands(self) -> list[Command]:
        """Return the commands after a prompt, and lines beginning with `ckpt `, which have no output."""
        found: list[Command] = []
        printing = False
        for line in self.lines:
            prompted = line.startswith(_PROMPT)
            if prompted or (line.startswith("ckpt ") and not printing and not is_row(line)):
                exits = re.search(r"# exit (\d+)$", line)
                code = int(exits[1]) if exits else 0
                found.append(Command(line.removeprefix(_PROMPT), self.heading, code, [] if prompted else None))
                printing = prompted
            elif printing:
                found[-1].printed.append(line)  # type: ignore[union-attr]
        for command in found:
            while command.printed and not command.printed[-1]:
                command.printed.pop()
        if not any(command.printed for command in found):
            for command in found:
                command.printed = None
        return found


def blocks(page: str) -> Iterator[Block]:
    """Yield the terminal blocks of a page, in order."""
    heading = ""
    for part in _PART.finditer(page):
        heading = part["heading"] or heading
        text = part["fenced"] or part["indented"]
        if text and part["kind"] not in ("python", "yaml"):
            yield Block(heading, textwrap.dedent(text).splitlines())


def commands(page: str) -> list[Command]:
    return [command for block in blocks(page) for command in block.commands()]


def is_row(line: str) -> bool:
    """Return True if `line` is a row in a times table."""
    return re.search(r" \d+\.\d\d +\d", line) is not None


def differences(shown: list[str], printed: str) -> str:
    """Return how the printed output differs from the page, or "" if it agrees."""
    shown, printed = [_TOOK.sub("in a time", line) for line in shown], _TOOK.sub("in a time", printed)
    pattern = "".join(
        r"(?:.*\n)*" if line.strip() == "..." else re.escape(line).replace(re.escape("..."), ".*") + r" *\n"
        for line in shown
    )
    if re.fullmatch(rf"\n*{pattern}\n*", printed if printed.endswith("\n") else f"{printed}\n"):
        return ""
    lines = difflib.unified_diff(shown, printed.splitlines(), "shown", "printed", lineterm="")
    return "\n".join(lines)


def row_differs(page: str, name: str, cells: Mapping[str, str], within: float = 1e-3) -> str:
    """Return how a printed row differs from the page's row with the same name.

    Numbers may differ by a thousandth. Differences between losses are rounding and are not compared.
    """
    rows = [re.split(r" {2,}", line.strip()) for block in blocks(page) for line in block.lines]
    shown = [row for first, *row in rows if first == name]
    found = list(cells.values())
    if any(
        len(row) >= len(found)
        and all(map(partial(_same_cell, within), row, [*found, *["-"] * (len(row) - len(found))]))
        for row in shown
    ):
        return ""
    return f"{name}\nshown: {shown}\nprinted: {found}"


def _same_cell(within: float, shown: str, found: str) -> bool:
    if shown == found or all(cell == "equal" or "e-" in cell for cell in (shown, found)):
        return True
    try:
        pairs = zip(map(float, shown.split()), map(float, found.split()), strict=True)
        return all(math.isclose(one, other, rel_tol=within) for one, other in pairs)
    except ValueError:  # different words, or a different count
        return False
