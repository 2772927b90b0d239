"""Shared parts of all sections.

A section is a module in `benchmarks` with a function `measure(bench: Bench) -> Table`, listed in `__main__.SECTIONS`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from math import inf
from pathlib import Path
from statistics import median

from benchmarks.measure import Case, Measured, call, remove, rounds, warm

#: Each module writes its source: `python -m MODULE FOLDER NUM_LAYERS`.
SOURCES = {
    "zero3": "benchmarks.zero_source",
    "dcp": "benchmarks.dcp_source",
    "lora": "benchmarks.lora_source",
    "hf": "benchmarks.hf_source",
    "gpt-oss": "benchmarks.gpt_oss_source",
}

PEAK_MB = 500


@dataclass(frozen=True)
class Goal:
    """Goal for `case` against `other`: at most so many times as long, or at least so many times faster."""

    case: str
    other: str
    at_most: float | None = None
    at_least: float | None = None

    def judge(self, measured: dict[str, Measured]) -> str:
        case, other = measured[self.case], measured[self.other]
        return self.said(case.times(other) if self.at_least is None else other.times(case))

    def said(self, factors: Sequence[float]) -> str:
        """Return the median with minimum and maximum, and the goal, marked if missed."""
        if self.at_least is None:
            return f"{self._shown(factors, 2)} x {self.other}{self._verdict(median(factors), f'<= {self.at_most}')}"
        figures = f"{self._shown(factors, 1)} x faster than {self.other}"
        return f"{figures}{self._verdict(median(factors), f'>= {self.at_least}')}"

    def _reached(self, factor: float) -> bool:
        return factor <= (self.at_most or inf) if self.at_least is None else factor >= self.at_least

    def _verdict(self, factor: float, goal: str) -> str:
        return "" if self.at_least is None and self.at_most is None else f" {verdict(self._reached(factor), goal)}"

    def _shown(self, factors: Sequence[float], digits: int) -> str:
        """Return the three figures. The median has more digits if rounding changes its verdict."""
        factor, more = median(factors), digits
        while self._reached(round(factor, more)) != self._reached(factor):
            more += 1
        return f"{factor:.{more}f} ({min(factors):.{digits}f} to {max(factors):.{digits}f})"


def verdict(reached: bool, goal: str) -> str:
    return f"({goal})" if reached else f"(MISSED {goal})"


def within(cpu_seconds: float, peak_mb: float, goals: tuple[float, float]) -> str:
    """Return the goals for processor seconds and megabytes, marked if missed."""
    cpu, peak = goals
    memory = verdict(peak_mb <= peak, f"<= {peak:g} MB")
    return f"cpu {verdict(cpu_seconds <= cpu, f'<= {cpu:g} s')}; memory {memory}"


@dataclass(frozen=True)
class Table:
    title: str
    measured: dict[str, Measured]
    goals: Sequence[Goal]
    notes: Sequence[str] = ()
    peak_mb: float = PEAK_MB

    def __str__(self) -> str:
        lines = [self.title, f"{'':<42}{'seconds':>8}{'least':>8}{'most':>8}{'cpu s':>8}{'peak MB':>9}"]
        for name, one in self.measured.items():
            said = [goal.judge(self.measured) for goal in self.goals if goal.case == name]
            if name.startswith("ckpt") and one.peak_mb > self.peak_mb:
                said.append(f"memory MISSED <= {self.peak_mb:.0f} MB")
            seconds = (one.seconds, min(run.seconds for run in one.runs), max(run.seconds for run in one.runs))
            figures = "".join(f"{number:>8.2f}" for number in (*seconds, one.cpu_seconds)) + f"{one.peak_mb:>9.0f}"
            lines.append(f"{name:<42}{figures}  {'; '.join(said)}".rstrip())
        return "\n".join([*lines, *self.notes])


@dataclass
class Bench:
    """`keep` leaves the sources for the next run."""

    folder: Path
    num_layers: int
    num_rounds: int
    keep: bool = False
    made: list[Path] = field(default_factory=list)

    def source(self, kind: str, num_layers: int | None = None) -> Path:
        """Write this kind's checkpoint if it is missing, and warm it."""
        num_layers = num_layers or self.num_layers
        path = self.folder / f"{kind}-{num_layers}"
        if not (path / "complete").exists():
            remove([path])
            path.mkdir(parents=True)
            call(SOURCES[kind], path, num_layers)
            (path / "complete").touch()
        warm(path)
        return path

    def scratch(self, name: str) -> Path:
        path = self.folder / name
        self.made.append(path)
        return path

    def rounds(self, cases: Sequence[Case]) -> dict[str, Measured]:
        self.folder.mkdir(parents=True, exist_ok=True)
        filler = self.folder / "filler"
        self.made.append(filler)
        return rounds(cases, self.num_rounds, filler)

    def clear(self, *, sources: Sequence[str] = ()) -> None:
        remove(self.made)
        self.made.clear()
        if not self.keep:
            remove(path for kind in sources for path in self.folder.glob(f"{kind}-*"))
