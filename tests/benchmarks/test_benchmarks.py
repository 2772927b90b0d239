"""Benchmarks without an optional peer installed, and the benchmark figures in the README."""

from __future__ import annotations

import compileall
import inspect
import json
import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace

import pytest

from benchmarks import hash_peer, hashing, load, many, measure, moe_source, plans, readme, runner
from benchmarks.__main__ import ALL, ONCE, SECTIONS, main
from benchmarks.measure import Case, Measured, Run
from benchmarks.runner import Bench, Goal, Table
from tests.support.places import REPOSITORY


@pytest.mark.parametrize(
    ("installed", "lacking"), [((), ()), ((), ("blake3",)), ((), ("blake3", "xxhash")), (("xxhsum",), ("blake3",))]
)
def test_digests_are_compared_with_what_there_is(
    installed: tuple[str, ...], lacking: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The peers b3sum and blake3 are optional. Without them the section has its table and names the missing peers."""
    run = Run(1.0, 1.0, 10.0)
    monkeypatch.setattr(hash_peer.shutil, "which", lambda name: name if name in installed else None)
    monkeypatch.setattr(hash_peer, "find_spec", lambda name: None if name in lacking else find_spec("json"))
    monkeypatch.setattr(hashing, "run", lambda case: run)
    monkeypatch.setattr(hashing, "call", lambda *_: "3")
    monkeypatch.setattr(Bench, "source", lambda self, kind, num_layers=None: tmp_path)
    monkeypatch.setattr(Bench, "rounds", lambda self, cases: {case.name: Measured(case, (run,)) for case in cases})
    table = str(hashing.measure(Bench(tmp_path, 1, 1)))
    assert ("Python blake3 for b3sum, zero3" in table) == ("blake3" not in lacking)
    assert ("Python xxhash for xxhsum, zero3" in table) == (not installed and "xxhash" not in lacking)
    assert ("x xxhsum, zero3 (<= 2)" in table) == bool(installed)
    assert ("sum, zero3 (<= 2)" in table) == (lacking != ("blake3", "xxhash"))
    assert "sum, hf (" not in table, "start-up dominates hf"
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


def test_rounding_changes_no_verdict() -> None:
    faster = Goal("ckpt", "peer", at_least=3)
    assert faster.said([2.96, 2.5, 3.5]) == "2.96 (2.5 to 3.5) x faster than peer (MISSED >= 3)"
    assert faster.said([2.9996]) == "2.9996 (3.0 to 3.0) x faster than peer (MISSED >= 3)"
    assert faster.said([3.04]) == "3.0 (3.0 to 3.0) x faster than peer (>= 3)"
    assert Goal("ckpt", "cp", at_most=1.25).said([1.254]) == "1.254 (1.25 to 1.25) x cp (MISSED <= 1.25)"
    assert Goal("ckpt", "cp").said([1.254]) == "1.25 (1.25 to 1.25) x cp"


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


def test_rounds_make_the_folder_of_the_filler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A section may write all its files to memory."""
    monkeypatch.setattr(runner, "rounds", lambda cases, number, filler: filler.touch())
    Bench(tmp_path / "new" / "folder", 1, 1).rounds([])
    assert (tmp_path / "new" / "folder" / "filler").is_file()


def test_a_parallel_copy_is_a_copy(tmp_path: Path) -> None:
    (tmp_path / "source" / "inside").mkdir(parents=True)
    contents = {"a": b"x" * (9 << 20), "inside/b": b"", "inside/c": b"y"}
    for name, content in contents.items():
        (tmp_path / "source" / name).write_bytes(content)
    measure.run(measure.parallel_copy_of("copy", tmp_path / "source", tmp_path / "copy"))
    assert {name: (tmp_path / "copy" / name).read_bytes() for name in contents} == contents


def test_a_section_says_how_often_it_ran(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    for name, module in ALL.items():
        source = inspect.getsource(module)
        assert ("bench.rounds(" in source or "num_rounds" in source) == (name not in ONCE), name
    fake = SimpleNamespace(SOURCES=(), measure=lambda bench: "a title")
    monkeypatch.setattr("benchmarks.__main__.ALL", dict.fromkeys(("dcp", *ONCE), fake))
    monkeypatch.setattr(compileall, "compile_dir", lambda *_, **__: True)
    monkeypatch.setattr(sys, "argv", ["benchmarks", "dcp", *ONCE, "--rounds", "5"])
    main()
    said = readme.sections(capsys.readouterr().out.partition("\nload at the end")[0].lstrip())
    rounds = {name: re.findall(r"\d+ rounds?\b", section.day) for name, section in said.items()}
    assert rounds == {"dcp": ["5 rounds"]} | {name: ["1 round"] for name in ONCE}


def test_plans_run_each_row_once_and_name_other_structures(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ran: list[str] = []

    def run(case: Case) -> Run:
        ran.append(case.name)
        return Run(1.0, 1.0, 10.0)

    monkeypatch.setattr(plans, "run", run)
    monkeypatch.setattr(plans, "source_of", lambda bench, kind: tmp_path)
    monkeypatch.setattr(plans, "_compared", lambda *_: None)
    title, _, *rows = plans.measure(Bench(tmp_path, 1, 5)).splitlines()
    assert len(ran) == len(set(ran)) == len(rows)
    assert all(row.startswith(f"{name} ") for name, row in zip(ran, rows, strict=True))
    assert f"{len(list(moe_source.shapes('real'))):,} tensors in hf, {len(moe_source.in_memory()):,} in zero3" in title
    for name, (_, kind, *_) in plans._GOALS.items():
        is_qwen = kind in moe_source.SIZES or kind.isdecimal()
        assert is_qwen != name.startswith(("LLM-jp", "a Megatron-FSDP folder")), name


class _Process:
    """A process that has ended."""

    def __init__(self, code: int, said: str) -> None:
        self.code, self.said = code, said

    def poll(self) -> int:
        return self.code

    def send_signal(self, number: int) -> None:
        assert self.code == -number, "only the last rank is killed"

    def communicate(self) -> tuple[None, str]:
        return None, self.said

    def wait(self) -> int:
        return self.code


class _Many:
    """Replaces the processes of `benchmarks.many`. A run on `other_size` processes writes another file."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, other_size: int = 0) -> None:
        self.started: list[int] = []
        self.other_size = other_size
        for name in ("call", "together"):
            monkeypatch.setattr(many, name, getattr(self, name))
        monkeypatch.setattr(many, "started", self.start)

    def call(self, module: str, *arguments: str | Path | int) -> str:
        path, kind, *_ = map(str, arguments)
        if module == "benchmarks.shares":
            return f"{kind}: the largest share of {Path(path).name}"
        Path(path).mkdir(parents=True)
        index = {"metadata": {"total_size": 24_000_000_000}, "weight_map": dict.fromkeys(range(2000), kind)}
        (Path(path) / "model.safetensors.index.json").write_text(json.dumps(index))
        return ""

    def together(self, command: list[str | Path], size: int) -> list[Run]:
        if "--dry-run" not in command:
            self.write(command, size)
        is_larger = f"many-{many.LARGER}" in str(command)
        return [Run(30.0, 16.0 if is_larger else 15.0, 400.0), Run(31.0, 0.5, 1.0)]

    def write(self, command: list[str | Path], size: int) -> None:
        output = Path(command[command.index("-o") + 1])
        output.mkdir()
        (output / "model").write_text("other" if size == self.other_size else "same")

    def start(self, command: list[str | Path], size: int) -> list[_Process]:
        self.started.append(size)
        if len(self.started) == 1:
            return [_Process(7, "error: rank 47 of 48 has ended")] * (size - 1) + [_Process(-9, "")]
        self.write(command, size)
        return [_Process(0, f"note: continuing {command[command.index('-o') + 1]}")] * size


def test_many_prints_every_row_in_one_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Show the wall time of all, the largest processor time of one, and the compared files. Continue on 48."""
    processes = _Many(monkeypatch)
    text = many.measure(Bench(tmp_path, 1, 5))
    record = readme.sections(f"== many ==\ntoday\n{text}")["many"]
    assert record.title.count("(2,000 tensors, 12 B parameters)") == 2
    table = [line.split(" | ") for line in readme.figures(f"== many ==\ntoday\n{text}").splitlines() if " | " in line]
    cells = {one[1]: one[2:] for one in table[2:]}
    goals = "per process: cpu (<= 15 s); memory (<= 400 MB) |"
    same = f"{many.SAME} |"
    assert cells.pop("plan hf -> zero3, 61 layers, 1 process") == ["31.0", "15.0", "400", goals]
    for size in ("1 process", "8 processes", "48 processes"):
        missed = goals.replace("cpu (", "cpu (MISSED ")
        assert cells.pop(f"plan hf -> zero3, 67 layers, {size}") == ["31.0", "16.0", "400", missed]
        assert cells.pop(f"hf -> hf, tiny, {size}") == ["31.0", "15.0", "400", " |" if size == "1 process" else same]
        if size != "48 processes":
            assert cells.pop(f"plan hf -> hf, 61 layers, {size}") == ["31.0", "15.0", "400", goals]
    toy = cells.pop("whole conversion of a toy, 48 processes")
    assert toy == ["31.0", "15.0", "400", "per process: cpu (MISSED <= 1 s); memory (<= 400 MB) |"]
    (killed,) = cells
    assert killed.startswith("hf -> hf, tiny, rank 47 of 48 killed: ")
    assert killed.endswith(f"; then 48 processes: note: continuing many-output; {many.SAME}")
    assert processes.started == [48, 48]
    assert text.count(f"67 layers, hf: the largest share of many-{many.LARGER}") == 1


def test_many_stops_at_another_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _Many(monkeypatch, other_size=8)
    with pytest.raises(subprocess.CalledProcessError):
        many.measure(Bench(tmp_path, 1, 5))


def test_load_claims_no_bound_for_its_peak(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = {"dcp": 2.0, "ckpt": 1.0, "ratios": [0.5], "bytes_read": 10, "bytes_held": 10, "peak_mb": 9000.0}
    monkeypatch.setattr(load, "call", lambda *_: json.dumps(found))
    monkeypatch.setattr(Bench, "source", lambda self, kind, num_layers=None: tmp_path)
    assert "; peak 9000 MB, no goal: it includes " in load.measure(Bench(tmp_path, 1, 1))
