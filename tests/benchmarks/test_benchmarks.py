"""Benchmarks without an optional peer installed, and the benchmark figures in the README."""

from __future__ import annotations

import re
from importlib.util import find_spec
from pathlib import Path

import pytest

from benchmarks import hash_peer, hashing, measure, plans, readme, runner
from benchmarks.__main__ import SECTIONS
from benchmarks.measure import Case, Measured, Run
from benchmarks.runner import Bench, Table
from tests.support.places import REPOSITORY


@pytest.mark.parametrize("lacking", [(), ("blake3",), ("blake3", "xxhash")])
def test_digests_are_compared_with_what_there_is(
    lacking: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The peers b3sum and blake3 are optional. Without them the section has its table and names the missing peers."""
    run = Run(1.0, 1.0, 10.0)
    monkeypatch.setattr(hash_peer.shutil, "which", lambda name: None)
    monkeypatch.setattr(hash_peer, "find_spec", lambda name: None if name in lacking else find_spec("json"))
    monkeypatch.setattr(hashing, "run", lambda case: run)
    monkeypatch.setattr(hashing, "call", lambda *_: "3")
    monkeypatch.setattr(Bench, "source", lambda self, kind, num_layers=None: tmp_path)
    monkeypatch.setattr(Bench, "rounds", lambda self, cases: {case.name: Measured(case, (run,)) for case in cases})
    table = str(hashing.measure(Bench(tmp_path, 1, 1)))
    assert ("b3sum, zero3" in table) == ("blake3" not in lacking)
    assert ("xxhsum, zero3" in table) == ("xxhash" not in lacking)
    assert table.count("no comparison with it (pip install ") == len(lacking)
    assert "ckpt hash, hf" in table


#: Recorded sections, by name, and their models' layers.
RECORDED = {name: SECTIONS[name] for name in ("zero", "cold", "reshard", "dcp", "lora", "megatron", "quantized")}
NUM_LAYERS = 28
_FACTORS = re.compile(r"(\d+\.\d+) \((\d+\.\d+) to (\d+\.\d+)\) x ")
_ROW = re.compile(r"(.+?)(?: +\d+\.\d\d){4} +\d+(?:  (.+))?")


@pytest.fixture
def recorded() -> dict[str, dict[str, list[str]]]:
    """Return each row's recorded figures, by table title and row name."""
    found: dict[str, dict[str, list[str]]] = {}
    sections = readme.sections(readme.RESULTS.read_text())
    for one in (sections[name] for name in RECORDED):
        rows = [row for line in one.lines if (row := _ROW.fullmatch(line))]
        found[one.title] = {row[1]: row[2].split("; ") if row[2] else [] for row in rows}
    return found


@pytest.fixture
def measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Table]:
    """Return the benchmarks' tables by title, with one second for every case."""
    one = Run(1.0, 1.0, 10.0)
    monkeypatch.setattr(Bench, "source", lambda self, kind, num_layers=None: tmp_path)
    monkeypatch.setattr(Bench, "rounds", lambda self, cases: {case.name: Measured(case, (one,)) for case in cases})
    for section in (*RECORDED.values(), measure, runner):
        for name, made in (("run", one), ("call", ""), ("warm", None)):
            if hasattr(section, name):
                monkeypatch.setattr(section, name, lambda *_, made=made: made)
    tables = [section.measure(Bench(tmp_path, NUM_LAYERS, 1)) for section in RECORDED.values()]
    return {table.title: table for table in tables}


def test_the_record_has_every_goal_met_or_missed(
    recorded: dict[str, dict[str, list[str]]], measured: dict[str, Table]
) -> None:
    assert recorded.keys() == measured.keys()
    for title, rows in recorded.items():
        assert rows.keys() == measured[title].measured.keys(), title
        for name, said in rows.items():
            goals = [goal for goal in measured[title].goals if goal.case == name]
            figures = [
                [float(number) for number in factors.groups()] for factors in map(_FACTORS.match, said) if factors
            ]
            assert said == [goal.said(factors) for goal, factors in zip(goals, figures, strict=True)], (
                f"{title}: {name}"
            )


def test_a_recorded_factor_has_its_verdict() -> None:
    goal = re.compile(r"([\d.]+)(?: \([\d.]+ to [\d.]+\))? x [^;(]+\((MISSED )?([<>])= ([\d.]+)\)")
    found = goal.findall(readme.RESULTS.read_text())
    assert len(found) >= 19
    for factor, missed, sign, limit in found:
        is_reached = float(factor) <= float(limit) if sign == "<" else float(factor) >= float(limit)
        assert is_reached != bool(missed), (factor, missed, sign, limit)


def test_the_recorded_plans_have_every_goal_met_or_missed() -> None:
    lines = readme.sections(readme.RESULTS.read_text())["plans"].lines
    rows = [row for line in lines if (row := re.fullmatch(r"(\S.*?) {2,}(?:[\d.]+ +)?([\d.]+) +(\d+)  (cpu .+)", line))]
    assert len(rows) >= 6
    for name, cpu, peak, said in map(re.Match.groups, rows):
        assert said == plans.judged(name, float(cpu), float(peak)), name


@pytest.mark.parametrize("page", [*readme.PAGES, readme.FIGURES])
def test_the_pages_show_the_record(page: str) -> None:
    """Nobody types rows: `python -m benchmarks --readme` writes them."""
    text, results = (REPOSITORY / page).read_text(), readme.RESULTS.read_text()
    assert (readme.figures(results) if page == readme.FIGURES else readme.rows(results)) in text
    assert readme.with_rows(text, results) == text
    assert readme.with_rows(text, results.replace("x cp", "y cp")) != text


def test_the_figures_say_every_miss_with_its_day() -> None:
    results = readme.RESULTS.read_text()
    table = readme.figures(results)
    judged = re.compile(r"\((?:MISSED )?[<>]= [^)]+\)")
    assert sorted(judged.findall(table)) == sorted(judged.findall(results))
    assert "MISSED" in table and table.count("MISSED") == results.count("MISSED")
    for name, section in readme.sections(results).items():
        assert f"- `{name}`: {section.title}; {section.day}\n" in table
        assert re.match(r"\d+ \w+ 20\d\d, \d+ processors, load ", section.day), name


def test_a_record_replaces_its_own_sections_only() -> None:
    results = readme.RESULTS.read_text()
    assert readme.recorded(results, {}) == results
    again = readme.sections(readme.recorded(results, {"lora": "today\na title\na row"}))
    assert again.pop("lora") == readme.Section("today", "a title", ("a row",))
    before = readme.sections(results)
    del before["lora"]
    assert again == before


def test_the_order_of_cases_alternates(tmp_path: Path) -> None:
    """No case always comes first: the first one has the disk to itself, or a cold cache."""
    log = tmp_path / "log"
    cases = [Case(name, ["sh", "-c", f"echo {name} >> {log}"]) for name in "ab"]
    assert {len(one.runs) for one in measure.rounds(cases, 3).values()} == {3}
    assert log.read_text().split() == ["a", "b", "b", "a", "a", "b"]


def test_a_parallel_copy_is_a_copy(tmp_path: Path) -> None:
    (tmp_path / "source" / "inside").mkdir(parents=True)
    contents = {"a": b"x" * (9 << 20), "inside/b": b"", "inside/c": b"y"}
    for name, content in contents.items():
        (tmp_path / "source" / name).write_bytes(content)
    measure.run(measure.parallel_copy_of("copy", tmp_path / "source", tmp_path / "copy"))
    assert {name: (tmp_path / "copy" / name).read_bytes() for name in contents} == contents
