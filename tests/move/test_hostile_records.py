"""`ckpt/move/journal.py`, `ckpt/compare/manifest.py`, `ckpt/commands/resume/resuming.py`: hostile records.

ckpt restarts or refuses, and never waits.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import ckpt
from ckpt.commands.resume.resuming import RECORD
from ckpt.compare.manifest import MANIFEST, own_digest
from ckpt.errors import CkptError
from ckpt.move.files import staging_folder
from ckpt.move.journal import _LARGEST, JOURNAL
from ckpt.move.json_files import MAX_JSON
from ckpt.testing.conformance import digests
from tests.support.commands import ckpt as run_ckpt
from tests.support.places import REPOSITORY
from tests.support.sampling import sample

DEEP = b"[" * 200_000
Hostile = Callable[[Path], None]


@pytest.fixture(autouse=True)
def patience() -> Iterator[None]:
    """Fail a test that waits or reads forever, so that the suite does not hang."""

    def over(*_: object) -> None:
        raise AssertionError("it waits")

    before = signal.signal(signal.SIGALRM, over)
    signal.alarm(60)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


def _holding(content: bytes) -> Hostile:
    def do(path: Path) -> None:
        path.write_bytes(content)

    return do


def _sparse(path: Path) -> None:
    with path.open("wb") as file:
        file.truncate((_LARGEST if path.name == JOURNAL else MAX_JSON) + 1)


FORMS: dict[str, Hostile] = {
    "a pipe": lambda path: os.mkfifo(path),
    "a device": lambda path: path.symlink_to("/dev/zero"),
    "a link to itself": lambda path: path.symlink_to(path.name),
    "a link to nothing": lambda path: path.symlink_to("nowhere"),
    "a link out of the folder": lambda path: path.symlink_to("/etc/hostname"),
    "a folder": lambda path: path.mkdir(),
    "nothing": lambda path: None,
    "an empty file": _holding(b""),
    "NUL bytes": _holding(bytes(5000)),
    "more bytes than are read": _sparse,
    "brackets": _holding(DEEP),
    "brackets in an object": _holding(b'{"sources": ' + DEEP + b"]" * 200_000 + b"}"),
    "a number": _holding(b"5"),
    "a list": _holding(b"[[]]"),
    "no object's keys": _holding(b"{}"),
}
#: Replacements for a list with files and their facts.
VALUES: tuple[object, ...] = (
    *(5, None, "x", [[]], [{}], {"x": [[0] * 3]}, [["x", 1, 2, 3]], [["x", 1.5, "2", None, 4]]),
    *([[["x"], 1, 2, 3, 4]], [[5, 1, 2, 3, 4]], [["a\0b", 1, 2, 3, 4]], [["x" * 5000, 1, 2, 3, 1 << 80]]),
    *([["\ud800", 1, 2, 3, 4]], [["", -1, -1, -1, -1]]),
)


#: Forms that are read like others. `test_a_journal` and `test_a_manifest` have all.
LIKE = {
    **dict.fromkeys(("a link to itself", "a link to nothing", "a link out of the folder"), "a link"),
    "a device": "a pipe",
    "NUL bytes": "an empty file",
    "brackets in an object": "brackets",
}


def cases(key: str) -> list[Any]:
    """Return the forms by name, and replacements for the record's value `key`."""
    return [*FORMS, *(pytest.param((key, value), id=f"{key}-{n}") for n, value in enumerate(VALUES))]


def some_cases(key: str) -> list[Any]:
    """Return `cases`; the sample has one of the forms that are alike."""
    return sample(cases(key), lambda case: [LIKE.get(case, case) if isinstance(case, str) else case.id])


@pytest.fixture(scope="module")
def begun(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Make a run, its finished conversion, and a conversion stopped near its end."""
    place = tmp_path_factory.mktemp("begun")
    run = Path(shutil.copytree(REPOSITORY / "fixtures" / "toy-zero2", place / "run"))
    ckpt.plan(ckpt.open(run), "hf").run(place / "unbroken")

    def stop(_: Path) -> dict[str, bytes]:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        ckpt.plan(ckpt.open(run), "hf").run(place / "out", describe=stop)
    return place


def replaced(path: Path, form: str | tuple[str, object]) -> None:
    """Replace a record, or a value in its first line, by hostile content."""
    text = path.read_text().strip()
    path.unlink()
    if isinstance(form, str):
        FORMS[form](path)
        return
    first, *more = text.split("\n") if path.name == JOURNAL else [text]
    content = json.loads(first) | {form[0]: form[1]}
    if "digest" in content:
        content["digest"] = own_digest(content)
    path.write_text("\n".join([json.dumps(content), *more]))


@pytest.mark.parametrize("form", cases("sources"))
def test_a_journal(begun: Path, tmp_path: Path, form: str | tuple[str, object]) -> None:
    """It is used or refused with a hint; --restart ignores it."""
    out = tmp_path / "out"
    for options in ((), ("--restart",)):
        shutil.copytree(staging_folder(begun / "out"), staging_folder(out))
        replaced(staging_folder(out) / JOURNAL, form)
        done = run_ckpt("convert", "auto", "hf", begun / "run", "-o", out, *options)
        if done.code:
            assert not options and done.code in (2, 4) and "use --restart to discard it" in done.err, done.err
            shutil.rmtree(staging_folder(out))
        else:
            assert digests(out) == digests(begun / "unbroken")
            shutil.rmtree(out)


@pytest.mark.parametrize("form", ["a pipe", "a device", "brackets"])
def test_the_journal_of_another_process(begun: Path, tmp_path: Path, form: str) -> None:
    out = tmp_path / "out"
    shutil.copytree(staging_folder(begun / "out"), staging_folder(out))
    FORMS[form](staging_folder(out) / f"{JOURNAL}.1")
    done = run_ckpt("convert", "auto", "hf", begun / "run", "-o", out)
    assert done.code == 4 and "use --restart to discard it" in done.err


@pytest.mark.parametrize("form", cases("files"))
def test_a_manifest(begun: Path, tmp_path: Path, form: str) -> None:
    folder = Path(shutil.copytree(begun / "unbroken", tmp_path / "run-hf"))
    replaced(folder / MANIFEST, form)
    shutil.copytree(begun / "run", tmp_path / "run")
    codes = [
        run_ckpt(*command, folder).code for command in (("verify",), ("check",), ("check", "--bytes"), ("inspect",))
    ]
    assert codes[0] in (3, 4, 5) and {*codes} <= {0, 3, 4, 5}, codes
    # The output is written beside the run, or refused because the path is taken.
    assert run_ckpt("convert", "auto", "hf", tmp_path / "run").code in (0, 2)


@pytest.mark.parametrize("form", some_cases("source"))
def test_the_record_of_a_kept_conversion(begun: Path, tmp_path: Path, form: str) -> None:
    """The record of another conversion, from a missing step, is ignored or removed, and the resume still works."""
    run = Path(shutil.copytree(begun / "run", tmp_path / "run"))
    said: list[str] = []
    kept = Path(ckpt.resume(run, world_size=5, say=said.append))
    replaced(kept / RECORD, form)
    for size in (3, 5):
        try:
            assert Path(ckpt.resume(run, world_size=size, say=said.append)).is_dir()
        except CkptError as error:
            assert error.exit_code in (4, 5), error


@pytest.mark.parametrize("form", some_cases("sources"))
def test_the_journal_of_a_kept_conversion_that_was_killed(begun: Path, tmp_path: Path, form: str) -> None:
    run = Path(shutil.copytree(begun / "run", tmp_path / "run"))
    kept = Path(ckpt.resume(run, world_size=5, say=lambda _: None))
    shutil.copytree(staging_folder(begun / "out"), staging_folder(kept))
    shutil.rmtree(kept)
    replaced(staging_folder(kept) / JOURNAL, form)
    for size in (3, 5):
        try:
            assert Path(ckpt.resume(run, world_size=size, say=lambda _: None)).is_dir()
        except CkptError as error:
            assert error.exit_code in (4, 5), error


@pytest.mark.parametrize("form", ["a pipe", "a device", "a link to itself", "a link to nothing", "an empty file"])
@pytest.mark.parametrize("name", [".out.ckpt-staging", ".out.ckpt-old"])
def test_in_the_place_of_the_staging_folder(begun: Path, tmp_path: Path, name: str, form: str) -> None:
    FORMS[form](tmp_path / name)
    for options in ((), ("--restart",)):
        done = run_ckpt("convert", "auto", "hf", begun / "run", "-o", tmp_path / "out", *options)
        assert done.code in (0, 2, 4, 5, 7), done.err
        shutil.rmtree(tmp_path / "out", ignore_errors=True)
