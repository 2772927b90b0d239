"""Whole processes: wall time and peak resident memory, as the operating system accounts for them."""

from __future__ import annotations

import os
import shutil
import statistics
import subprocess
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Run:
    seconds: float
    peak_mb: float


@dataclass(frozen=True)
class Case:
    """A command, and the path that it writes, which is removed before each run."""

    name: str
    command: Sequence[str]
    writes: Path | None = None


def run(case: Case) -> Run:
    """Run the command once.  RuntimeError with its output where it fails."""
    if case.writes is not None:
        remove(case.writes)
    os.sync()  # nobody pays for what was written before
    start = time.perf_counter()
    process = subprocess.Popen(case.command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, env=environment())
    assert process.stdout is not None
    output = process.stdout.read()
    _, status, usage = os.wait4(process.pid, 0)
    seconds = time.perf_counter() - start
    process.returncode = os.waitstatus_to_exitcode(status)
    process.stdout.close()
    if process.returncode:
        raise RuntimeError(f"{case.name} failed with {process.returncode}:\n{output.decode()[-2000:]}")
    return Run(seconds, usage.ru_maxrss / 1000)


def environment() -> dict[str, str]:
    return os.environ | {"DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1"}


def medians(cases: Sequence[Case], rounds: int, after: Callable[[Case], None] = lambda _: None) -> dict[str, Run]:
    """Run all cases in turn, `rounds` times, and take each one's median time and highest memory."""
    runs: dict[str, list[Run]] = {case.name: [] for case in cases}
    for number in range(rounds):
        for case in cases:
            runs[case.name].append(run(case))
            if number == 0:
                after(case)
    return {
        name: Run(statistics.median(r.seconds for r in found), max(r.peak_mb for r in found))
        for name, found in runs.items()
    }


def remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path)
    elif path.exists():
        path.unlink()


def warm(folder: Path) -> None:
    """Read every file once, so that all runs find them in the page cache."""
    for path in folder.rglob("*"):
        if path.is_file():
            with path.open("rb") as file:
                while file.read(1 << 24):
                    pass
