"""`ckpt/base/progress.py`: progress lines without a terminal, and none under `--quiet`."""

from __future__ import annotations

import io
import sys
import threading
import time
from pathlib import Path

import pytest

from ckpt.base import progress


@pytest.mark.parametrize(
    ("total", "done", "seconds", "line"),
    [
        (4_000_000_000, 1_000_000_000, 5.0, "move: 1.00 GB of 4.00 GB, 200.0 MB/s, 15 s left"),
        (100, 100, 2.0, "move: 100 B of 100 B, 50 B/s, 0 s left"),
        (100, 0, 12.4, "move: 12 s"),
        (0, 0, 12.4, "move: 12 s"),
    ],
)
def test_what_a_line_says(monkeypatch: pytest.MonkeyPatch, total: int, done: int, seconds: float, line: str) -> None:
    now = [100.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: now[0])
    with progress.progress(total, "check", quiet=True) as meter:
        meter.phase("move", total)
        meter(done)
        now[0] += seconds
        assert meter.line() == line


def test_a_line_every_ten_seconds_where_there_is_no_terminal(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert "_EVERY = 10.0  # seconds" in Path(progress.__file__).read_text()  # tests/conftest.py changes it
    monkeypatch.setattr(progress, "_EVERY", 0.01)
    said, until = "", time.monotonic() + 60
    with progress.progress(100, "hash", quiet=False) as meter:
        meter(40)
        while said.count("hash: 40 B of 100 B") < 2:
            assert time.monotonic() < until, said
            captured = capsys.readouterr()
            said += captured.err
            assert captured.out == ""


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def shown_on(monkeypatch: pytest.MonkeyPatch) -> Terminal:
    terminal = Terminal()
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "100")
    monkeypatch.setattr(sys, "stderr", terminal)
    return terminal


def test_a_bar_on_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = shown_on(monkeypatch)
    monkeypatch.setattr(progress, "_DELAY", 0)
    until = time.monotonic() + 60
    with progress.progress(0, "plan", quiet=False) as meter:
        meter.phase("move", 100)
        meter(40)
        while "move: 40 B of 100 B" not in terminal.getvalue():
            assert time.monotonic() < until, terminal.getvalue()
            time.sleep(0.01)
        meter.say("note: a line above the bar")
    assert "note: a line above the bar\n" in terminal.getvalue()
    assert terminal.getvalue().endswith("\x1b[2K"), "it is taken away"


def test_no_bar_before_an_error_that_comes_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = shown_on(monkeypatch)
    with progress.progress(100, "plan", quiet=False):
        pass
    assert not terminal.getvalue()


def test_nothing_where_it_is_quiet() -> None:
    before = threading.active_count()
    with progress.progress(100, "hash", quiet=True):
        assert threading.active_count() == before
