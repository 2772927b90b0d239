"""`ckpt/move/listing.py`: commands list a folder once per opening, and never reuse an earlier listing."""

from __future__ import annotations

import os
import re
import shutil
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

import ckpt as package
from ckpt.base.errors import NotFoundError
from ckpt.move.listing import entries_in, folders_in, has_name, listed_once, names_in
from tests.support.commands import ckpt

#: A run from each family, and its step.
RUNS = {
    "toy-zero3": "global_step2",
    "toy-zero2": "global_step2",
    "toy-zero0": "global_step2",
    "neox-zero1": "global_step2",
    "autotp-zero1": "global_step2",
    "megatron-fsdp": "iter_0000002",
    "dcp-fsdp2": "step-2",
    "torchtitan-llama3": "step-2",
    "verl-fsdp2": "global_step_3",
    "trainer-plain": "checkpoint-2",
    "trainer-zero2": "checkpoint-2",
}

_LISTED: list[str] | None = None


def _note(event: str, arguments: tuple[object, ...]) -> None:
    if event in ("os.listdir", "os.scandir") and _LISTED is not None and isinstance(arguments[0], str | os.PathLike):
        _LISTED.append(os.path.abspath(arguments[0]))


sys.addaudithook(_note)  # audit hooks can't be removed: it is idle while unused


@contextmanager
def counted(root: Path) -> Iterator[Counter[str]]:
    """Count listings of each folder below `root` within the block, by relative name."""
    global _LISTED
    found: Counter[str] = Counter()
    _LISTED = []
    try:
        yield found
    finally:
        listed, _LISTED = _LISTED, None
        found.update(str(Path(path).relative_to(root)) for path in listed if Path(path).is_relative_to(root))


@pytest.fixture(params=sorted(RUNS))
def run(request: pytest.FixtureRequest, fixtures: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(fixtures / request.param, tmp_path / request.param, symlinks=True))


def test_inspect_lists_each_folder_once(run: Path) -> None:
    with counted(run) as found:
        assert ckpt("inspect", str(run)).code == 0
    assert found[RUNS[run.name]] == found["."] == 1
    assert max(found.values()) == 1, found


def test_opening_lists_each_folder_once(run: Path) -> None:
    with counted(run) as found:
        package.open(run)
    assert found["."] == 1 and max(found.values()) == 1, found


@pytest.mark.parametrize(
    "run", ["toy-zero3", "toy-zero2", "toy-zero0", "dcp-fsdp2", "trainer-zero2", "verl-fsdp2"], indirect=True
)
def test_convert_and_resume_list_a_folder_once_for_each_phase(run: Path, tmp_path: Path) -> None:
    """A conversion opens, plans and looks for unread files. A resume opens and looks around."""
    with counted(run) as found:
        assert ckpt("convert", "auto", "full", str(run), "-o", str(tmp_path / "out")).code == 0
    assert 1 <= max(found.values()) <= 3, found
    with counted(run) as found:
        report = ckpt("resume", str(run))
    assert report.code == 0 and "as it is" in report.err, report.err
    assert 1 <= max(found.values()) <= 3, found


def test_nothing_is_remembered_from_an_earlier_opening(fixtures: Path, tmp_path: Path) -> None:
    run = Path(shutil.copytree(fixtures / "dcp-fsdp2", tmp_path / "run"))
    assert package.open(run).path == str(run / "step-2")
    shutil.copytree(run / "step-2", run / "step-3")
    assert package.open(run).path == str(run / "step-3")
    shutil.rmtree(run / "step-3")
    assert package.open(run).path == str(run / "step-2")


def test_one_block_sees_one_moment(tmp_path: Path) -> None:
    (tmp_path / "a").touch()
    with listed_once():
        assert names_in(tmp_path) == ["a"]
        (tmp_path / "b").mkdir()
        with listed_once():
            assert names_in(tmp_path) == ["a"]
        assert names_in(tmp_path) == ["a"]
    assert names_in(tmp_path) == ["a", "b"] == list(entries_in(tmp_path))
    with listed_once():
        assert names_in(tmp_path) == ["a", "b"]


def test_folders_are_told_from_files_and_links(tmp_path: Path) -> None:
    for name in ("z", "10", "9"):
        (tmp_path / name).mkdir()
    (tmp_path / "file").touch()
    (tmp_path / "link").symlink_to("z")
    (tmp_path / "loop").symlink_to("loop")
    (tmp_path / "gone").symlink_to("nowhere")
    assert [folder.name for folder in folders_in(tmp_path)] == ["10", "9", "link", "z"]
    assert folders_in(tmp_path / "file") == [] == folders_in(tmp_path / "nowhere")
    assert has_name(tmp_path, re.compile("fil.")) and not has_name(tmp_path, re.compile("fi"))
    assert not has_name(tmp_path / "file", re.compile(".*"))
    with pytest.raises(NotFoundError):
        names_in(tmp_path / "nowhere")
