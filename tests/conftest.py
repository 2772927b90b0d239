"""Fixtures that several test modules share, and the tables printed at the end of a run."""

from __future__ import annotations

import os
import sys
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import pytest

# Before anything imports deepspeed or torch: no accelerator is probed, and processes share the cores.
os.environ.setdefault("DS_ACCELERATOR", "cpu")
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

#: Lines to print after the run, by title; tests fill it.
TABLES: dict[str, dict[str, dict[str, str]]] = defaultdict(lambda: defaultdict(dict))


@pytest.fixture(scope="session")
def tables() -> dict[str, dict[str, dict[str, str]]]:
    """`tables[title][row][column] = cell` is printed when all tests are done."""
    return TABLES


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    for title, rows in TABLES.items():
        columns = list(dict.fromkeys(column for row in rows.values() for column in row))
        head = max(len(name) for name in rows)
        widths = [max(len(c), *(len(row.get(c, "")) for row in rows.values())) for c in columns]
        terminalreporter.section(title)
        header = "  ".join(c.rjust(w) for c, w in zip(columns, widths, strict=True))
        terminalreporter.write_line(f"{'':<{head}}  {header}")
        for name, row in rows.items():
            cells = "  ".join(row.get(c, "-").rjust(w) for c, w in zip(columns, widths, strict=True))
            terminalreporter.write_line(f"{name:<{head}}  {cells}")


@pytest.fixture
def fixtures() -> Path:
    """The committed checkpoints."""
    return Path(__file__).parent.parent / "fixtures"


_OPENED: list[str] | None = None


def _note_open(event: str, arguments: tuple[object, ...]) -> None:
    if event == "open" and _OPENED is not None and isinstance(arguments[0], str | os.PathLike):
        _OPENED.append(os.fspath(arguments[0]))


sys.addaudithook(_note_open)  # there is no removing it: it rests while nobody asks


@pytest.fixture
def opened() -> Iterator[list[str]]:
    """The path of each file that is opened from now on, by whatever call, as often as it is opened."""
    global _OPENED
    _OPENED = []
    yield _OPENED
    _OPENED = None
