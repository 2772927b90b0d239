"""What the benchmarks do where something to compare with is not installed, and what the README shows of them."""

from __future__ import annotations

import re
from importlib.util import find_spec
from pathlib import Path

import pytest

from benchmarks import cold, dcp, hash_peer, hashing, lora, measure, megatron, reshard, runner, zero
from benchmarks.measure import Measured, Run
from benchmarks.runner import Bench, Table
from tests.support.pages import blocks
from tests.support.places import REPOSITORY


@pytest.mark.parametrize("lacking", [(), ("blake3",), ("blake3", "xxhash")])
def test_digests_are_compared_with_what_there_is(
    lacking: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without b3sum and blake3, which ckpt does not need, the section has its table and says what is not there."""
    run = Run(1.0, 1.0, 10.0)
    monkeypatch.setattr(hash_peer.shutil, "which", lambda name: None)
    monkeypatch.setattr(hash_peer, "find_spec", lambda name: None if name in lacking else find_spec("json"))
    monkeypatch.setattr(hashing, "run", lambda case: run)
    monkeypatch.setattr(Bench, "source", lambda self, kind: tmp_path)
    monkeypatch.setattr(Bench, "rounds", lambda self, cases: {case.name: Measured(case, (run,)) for case in cases})
    table = str(hashing.measure(Bench(tmp_path, 1, 1)))
    assert ("b3sum, zero3" in table) == ("blake3" not in lacking)
    assert ("xxhsum, zero3" in table) == ("xxhash" not in lacking)
    assert table.count("no comparison with it (pip install ") == len(lacking)
    assert "ckpt hash, hf" in table


#: Of the README's table, and how many layers its model has.
SHOWN = (zero, cold, reshard, dcp, megatron, lora)
NUM_LAYERS = 28
_ROW = re.compile(r"(.+?) +(\d+\.\d\d) +(\d+\.\d\d) +(\d+)(?:  (.+))?")


@pytest.fixture
def readme() -> dict[str, dict[str, list[str]]]:
    """What the README says behind the figures of each row, by the title of its table and the row's name."""
    page = (REPOSITORY / "README.md").read_text()
    lines = [line for block in blocks(page) if block.heading == "Speed and memory" for line in block.lines]
    found: dict[str, dict[str, list[str]]] = {}
    rows: dict[str, list[str]] = {}
    for before, line in zip(["", *lines], lines, strict=False):
        if row := _ROW.fullmatch(line):
            rows[row[1]] = row[5].split("; ") if row[5] else []
        elif not before:
            rows = found[line] = {}
    return found


@pytest.fixture
def measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Table]:
    """The tables of the benchmarks by their titles, in which every case has taken a second."""
    one = Run(1.0, 1.0, 10.0)
    monkeypatch.setattr(Bench, "source", lambda self, kind: tmp_path)
    monkeypatch.setattr(Bench, "rounds", lambda self, cases: {case.name: Measured(case, (one,)) for case in cases})
    for section in (*SHOWN, measure, runner):
        for name, made in (("run", one), ("call", ""), ("warm", None)):
            if hasattr(section, name):
                monkeypatch.setattr(section, name, lambda *_, made=made: made)
    tables = [section.measure(Bench(tmp_path, NUM_LAYERS, 1)) for section in SHOWN]
    return {table.title: table for table in tables}


def test_the_readme_shows_every_goal_met_or_missed(
    readme: dict[str, dict[str, list[str]]], measured: dict[str, Table]
) -> None:
    assert readme.keys() == measured.keys()
    for title, rows in readme.items():
        goals = measured[title].goals
        assert rows and rows.keys() <= measured[title].measured.keys(), title
        for name, said in rows.items():
            goals = [goal for goal in measured[title].goals if goal.case == name]
            figures = [float(text.split()[0]) for text in said]
            assert said == [goal.said(figure) for goal, figure in zip(goals, figures, strict=True)], f"{title}: {name}"
