"""`tests.support.kept`: cached engine output is reused if and only if nothing in its making has changed."""

from __future__ import annotations

import json
import multiprocessing
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support import kept

MODULE = ("tests.support.fsdp_worker",)


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., str]:
    """Return `run(FOLDER, what)`. It returns the output, or "copied"; `made.txt` in the folder has the input's text."""
    monkeypatch.setenv("CKPT_TEST_CACHE", str(tmp_path / "cache"))

    def run(name: str, what: str = "a", modules: tuple[str, ...] = MODULE, output: Path | None = None) -> str:
        folder, calls = tmp_path / name, []

        def make() -> None:
            calls.append(what)
            folder.mkdir(exist_ok=True)
            (folder / "made.txt").write_text(what)

        kept.make_once(folder, modules, json.dumps({"what": what, "output": str(output or folder / "run")}), make)
        assert (folder / "made.txt").read_text() == what
        return "made" if calls else "copied"

    return run


def test_the_same_is_copied_and_the_copy_is_the_tests_own(run: Callable[..., str], tmp_path: Path) -> None:
    assert [run("one"), run("two"), run("three", "b")] == ["made", "copied", "made"]
    (tmp_path / "two/made.txt").write_text("changed")
    assert run("four") == "copied"
    assert not [path for path in (tmp_path / "cache").iterdir() if path.name.startswith(".")]


def test_two_processes_make_the_same_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The one that begins later waits, and copies."""
    monkeypatch.setenv("CKPT_TEST_CACHE", str(tmp_path / "cache"))
    context = multiprocessing.get_context("fork")
    made, begun = context.Queue(), context.Event()

    def make(folder: Path) -> None:
        def fill() -> None:
            begun.set()
            folder.mkdir()
            time.sleep(0.3)
            (folder / "made.txt").write_text("made")
            made.put(folder.name)

        kept.make_once(folder, MODULE, "{}", fill)

    first, second = (context.Process(target=make, args=(tmp_path / name,)) for name in ("one", "two"))
    first.start()
    assert begun.wait(60)
    second.start()
    for process in (first, second):
        process.join(60)
        assert process.exitcode == 0
    assert made.get(timeout=60) == "one" and made.empty()
    assert (tmp_path / "two/made.txt").read_text() == "made"


def test_what_is_read_is_part_of_what_must_be_the_same(run: Callable[..., str], tmp_path: Path) -> None:
    for name, content in (("one", "x"), ("two", "x"), ("three", "y")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "input").write_text(content)
    assert [run("one"), run("two"), run("three")] == ["made", "copied", "made"]
    (entry, _) = (tmp_path / "cache").iterdir()
    assert [path.name for path in entry.iterdir()] == ["made.txt"], "what was there before is not kept"


def test_nothing_is_kept_of_what_is_tested_nor_of_outputs_elsewhere(
    run: Callable[..., str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number in range(2):
        assert run(f"one-{number}", modules=("ckpt.api",)) == "made"
        assert run(f"two-{number}", output=tmp_path / "elsewhere") == "made"
    monkeypatch.setenv("CKPT_TEST_CACHE", "")
    assert [run("three"), run("four")] == ["made", "made"]


def test_what_fails_is_not_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CKPT_TEST_CACHE", str(tmp_path / "cache"))

    def fail() -> None:
        (tmp_path / "run").mkdir()
        raise AssertionError

    with pytest.raises(AssertionError):
        kept.make_once(tmp_path / "run", MODULE, "{}", fail)
    assert not (tmp_path / "cache").exists()
