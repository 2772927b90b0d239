"""Shared fixtures, and the tables printed after a run."""

from __future__ import annotations

import gc
import os
import signal
from collections import Counter, defaultdict
from collections.abc import Iterator
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import settings

from tests.support import portable

if TYPE_CHECKING:
    from tests.support import slurm

if os.environ.get(portable.VARIABLE):
    portable.remove_linux_calls()

# Before deepspeed or torch is imported: probe no accelerator, share the cores, and compute on the CPU even if there are
# GPUs.
os.environ["DS_ACCELERATOR"] = "cpu"
os.environ["CUDA_VISIBLE_DEVICES"] = ""
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")  # a pool of compilers takes longer to start than to run
os.environ.setdefault("HF_HUB_OFFLINE", "1")

# Shells make background processes ignore Ctrl-C, and interrupted test commands would inherit this.
signal.signal(signal.SIGINT, signal.default_int_handler)

# Waiting for the disk takes longer than most conversions. No test sees a difference; a wrong descriptor still fails.
os.fsync = lambda fd: os.fstat(fd) and None

settings.register_profile("shared machine", deadline=None)
settings.load_profile("shared machine")

#: Lines to print after the run, by title; filled by the tests.
TABLES: dict[str, dict[str, dict[str, str]]] = defaultdict(lambda: defaultdict(dict))


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--seconds", metavar="FILE", help="where the seconds of files and tests are written")
    parser.addoption("--hints", metavar="FILE", help="where each hint of an error is appended, with its trials")


def pytest_configure(config: pytest.Config) -> None:
    from ckpt.base import progress
    from tests.support import hints, python_hints  # after the environment is set

    progress._EVERY = 3600.0  # output that is compared has no progress lines, on a slow machine either
    hints.record_file = config.getoption("--hints")
    python_hints.watch()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Run files that start engines first, so that no worker is left with one at the end."""
    slow = {item.path for item in items if item.get_closest_marker("slow")}
    items.sort(key=lambda item: item.path not in slow)


@pytest.hookimpl(trylast=True)
def pytest_collection_finish() -> None:
    """Exclude ten thousand tests and their imports from garbage collection, and collect less often.

    accelerate collects with every model.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000)


@pytest.fixture(scope="module")
def paths_of_the_module(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Return new paths next to each other, with names unlike a step's."""
    folder = tmp_path_factory.mktemp("module")
    return (folder / f"test_{number}" for number in count())


@pytest.fixture
def tmp_path(paths_of_the_module: Iterator[Path]) -> Path:
    """Return an empty folder like pytest's own, but not next to thousands, which pytest and `ckpt` would list."""
    path = next(paths_of_the_module)
    path.mkdir()
    return path


@pytest.fixture(scope="session")
def tables() -> dict[str, dict[str, dict[str, str]]]:
    """Return the tables to print after all tests: `tables[title][row][column] = cell`."""
    return TABLES


def pytest_sessionfinish(session: pytest.Session) -> None:
    reporter = session.config.pluginmanager.get_plugin("terminalreporter")
    if reporter is not None and unlisted_skips(reporter) and session.exitstatus == pytest.ExitCode.OK:
        session.exitstatus = pytest.ExitCode.TESTS_FAILED
    if (output := getattr(session.config, "workeroutput", None)) is not None:  # one of several test workers
        output["tables"] = {title: dict(rows) for title, rows in TABLES.items()}


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    for title, rows in getattr(node, "workeroutput", {}).get("tables", {}).items():
        for name, row in rows.items():
            TABLES[title][name].update(row)


def unlisted_skips(reporter: pytest.TerminalReporter) -> list[str]:
    """Return the tests skipped for a reason missing from `tests/skips.txt`, if CI is set."""
    if not os.environ.get("CI"):
        return []
    lines = Path(__file__).with_name("skips.txt").read_text().splitlines()
    listed = [line for line in lines if not line.startswith("#")]
    reasons = [(one.nodeid, one.longrepr[2]) for one in reporter.stats.get("skipped", []) if one.longrepr]
    return [f"{name}: {reason}" for name, reason in reasons if not any(line in reason for line in listed)]


def seconds_of(reports: list[pytest.TestReport]) -> Iterator[str]:
    """Return lines with all files and the hundred slowest tests, the slowest first."""
    files, tests = Counter[str](), Counter[str]()
    for report in reports:
        files[report.nodeid.partition("::")[0]] += report.duration
        tests[report.nodeid] += report.duration
    for title, found in (("files", files.most_common()), ("tests", tests.most_common(100))):
        yield f"{title}, {sum(seconds for _, seconds in found):.0f} s"
        yield from (f"{seconds:9.2f}  {name}" for name, seconds in found)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    if file := terminalreporter.config.getoption("--seconds"):
        reports = [one for found in terminalreporter.stats.values() for one in found]
        lines = seconds_of([one for one in reports if isinstance(one, pytest.TestReport)])
        Path(file).parent.mkdir(parents=True, exist_ok=True)
        Path(file).write_text("".join(f"{line}\n" for line in lines))
    if unlisted := unlisted_skips(terminalreporter):
        terminalreporter.section("skipped, but tests/skips.txt does not have the reason", red=True)
        terminalreporter.write_line("\n".join(unlisted))
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
    """Return the folder with the committed checkpoints."""
    return Path(__file__).parent.parent / "fixtures"


@pytest.fixture(scope="session")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[slurm.Cluster]:
    """Start a Slurm cluster with two nodes on this machine, for all batch script tests."""
    from tests.support import slurm  # not at the top: some tests run with only the base package

    if lacking := slurm.missing():
        pytest.skip(f"no Slurm cluster: {lacking}")
    with slurm.started(tmp_path_factory.mktemp("slurm")) as started:
        yield started
