"""Wall time, processor time and peak resident memory of whole processes."""

from __future__ import annotations

import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

PYTHON = sys.executable
CKPT = (PYTHON, "-m", "ckpt")


@dataclass(frozen=True)
class Run:
    """`cpu_seconds` sums all processors and child processes; `peak_mb` is the largest process's."""

    seconds: float
    cpu_seconds: float
    peak_mb: float


@dataclass(frozen=True)
class Case:
    """A command. The paths that it writes are removed before each run.

    `cold` folders are dropped from the page cache before the start.
    """

    name: str
    command: Sequence[str | Path]
    writes: tuple[Path, ...] = ()
    cold: tuple[Path, ...] = ()


@dataclass(frozen=True)
class Measured:
    case: Case
    runs: tuple[Run, ...]

    @property
    def seconds(self) -> float:
        return statistics.median(run.seconds for run in self.runs)

    @property
    def cpu_seconds(self) -> float:
        return statistics.median(run.cpu_seconds for run in self.runs)

    @property
    def peak_mb(self) -> float:
        return max(run.peak_mb for run in self.runs)

    def times(self, other: Measured) -> tuple[float, ...]:
        """Return how many times longer than `other` it took, per round."""
        return tuple(a.seconds / b.seconds for a, b in zip(self.runs, other.runs, strict=True))


def copy_of(name: str, source: Path, copy: Path, cold: tuple[Path, ...] = ()) -> Case:
    return Case(name, ["sh", "-c", 'cp -r "$0" "$1" && find "$1" -exec sync {} +', source, copy], (copy,), cold=cold)


def parallel_copy_of(
    name: str,
    source: Path,
    copy: Path,
    cold: tuple[Path, ...] = (),
    sync: Literal["after", "meanwhile", "never"] = "after",
) -> Case:
    """Copy a folder, or spans in a JSON file, with one thread per processor."""
    return Case(name, [PYTHON, "-m", "benchmarks.copying", source, copy, sync], (copy,), cold=cold)


def written_to_disk(name: str, num_bytes: int, path: Path) -> Case:
    """Measure the disk's raw rate."""
    count = -(-num_bytes // (8 << 20))
    flags = ["bs=8M", f"count={count}", "oflag=direct", "conv=fsync", "status=none"]
    return Case(name, ["dd", "if=/dev/zero", f"of={path}", *flags], (path,))


def rounds(cases: Sequence[Case], number: int, filler: Path | None = None) -> dict[str, Measured]:
    """Run all cases `number` times in turn, reversing the order each time."""
    runs: dict[str, list[Run]] = {case.name: [] for case in cases}
    for done in range(number):
        for case in reversed(cases) if done % 2 else cases:
            runs[case.name].append(run(case, filler))
    return {case.name: Measured(case, tuple(runs[case.name])) for case in cases}


def run(case: Case, filler: Path | None = None) -> Run:
    """Run the command once, with a full page cache if there is a `filler`.

    Raise RuntimeError with the output if it fails. Measured memory starts at this process's size.
    """
    remove(case.writes)
    os.sync()  # so earlier writes don't count
    if filler is not None:
        fill_page_cache(filler)
    for folder in case.cold:
        forget(folder)
    return timed(case.name, case.command)[0]


def timed(name: str, command: Sequence[str | Path]) -> tuple[Run, str]:
    """Return the command's figures and its standard output."""
    start = time.perf_counter()
    with (
        tempfile.TemporaryFile() as said,
        subprocess.Popen(command, stdout=subprocess.PIPE, stderr=said, env=environment()) as process,
    ):
        assert process.stdout is not None
        output = process.stdout.read().decode()
        _, status, usage = os.wait4(process.pid, 0)
        seconds = time.perf_counter() - start
        process.returncode = os.waitstatus_to_exitcode(status)
        if process.returncode:
            said.seek(0)
            text = output + said.read().decode()
            raise RuntimeError(f"{name} failed with {process.returncode}:\n{text[-2000:]}")
    return Run(seconds, usage.ru_utime + usage.ru_stime, usage.ru_maxrss * 1024 / 1e6), output


def call(module: str, *arguments: str | Path | int) -> str:
    """Return the module's last output line."""
    command = [PYTHON, "-m", module, *map(str, arguments)]
    done = subprocess.run(command, env=environment(), text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)} failed with {done.returncode}:\n{done.stdout[-2000:]}")
    return done.stdout.strip().rpartition("\n")[2]


def fill_page_cache(filler: Path) -> None:
    """Extend a sparse file and read it until almost no memory is free, like on a busy machine.

    A virtual machine's host reclaims free memory within seconds, and returning it page by page made the last case up to
    four times slower. Pages read once are evicted first, so the inputs stay.
    """
    free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") - (512 << 20)
    buffer = bytearray(1 << 20)
    with filler.open("ab+", buffering=0) as file:
        before = file.seek(0, os.SEEK_END)
        file.truncate(before + max(0, free))
        while file.readinto(buffer):
            pass


def environment() -> dict[str, str]:
    return os.environ | {"DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1"}


def remove(paths: Iterable[Path]) -> None:
    for path in paths:
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)


def forget(folder: Path) -> None:
    """Drop the folder's synced files from the page cache."""
    for path in folder.rglob("*"):
        if path.is_file():
            with path.open("rb") as file:
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def warm(folder: Path) -> None:
    """Read every file twice: pages read once are evicted first."""
    for path in (*folder.rglob("*"), *folder.rglob("*")):
        if path.is_file():
            with path.open("rb") as file:
                while file.read(1 << 22):
                    pass
