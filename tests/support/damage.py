"""Damage to files, and calls and conversions that must refuse the damaged run."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from ckpt.errors import CkptError
from tests.support.commands import Result, snapshot
from tests.support.commands import ckpt as run_ckpt
from tests.support.model_files import rewriting

Damage = Callable[[Path], object]


class Fault(NamedTuple):
    """Damage to a folder, and the error that must follow, with words of its message or hint."""

    damage: Damage
    error: type[CkptError]
    words: str

    def check(self, folder: Path, use: Callable[[], object]) -> CkptError:
        """Damage the folder, and return the error that `use` raises."""
        self.damage(folder)
        with pytest.raises(self.error) as caught:
            use()
        assert self.words in f"{caught.value.what} {caught.value.hint}"
        return caught.value


def _matching(folder: Path, pattern: str) -> list[Path]:
    found = sorted(folder.glob(pattern))
    assert found, f"no {pattern} in {folder}"
    return found


def removed(*patterns: str) -> Damage:
    return lambda folder: [path.unlink() for pattern in patterns for path in _matching(folder, pattern)]


def copied(name: str, place: str) -> Damage:
    return lambda folder: shutil.copy(folder / name, folder / place)


def edited(pattern: str, edit: Callable[[Any], object]) -> Damage:
    """Return damage that edits the content of all torch files that match."""

    def damage(folder: Path) -> None:
        for path in _matching(folder, pattern):
            with rewriting(path) as content:
                edit(content)

    return damage


def refused(source: Path, code: int, *words: str, format: str = "auto", options: tuple[str, ...] = ()) -> str:
    """Assert that `convert` fails with this exit code and these words, and writes nothing.

    Try it with and without a destination.
    """
    before = snapshot(source)
    destination = source.parent.parent / "output" / "out"
    destination.parent.mkdir(exist_ok=True)
    command = ("convert", format, "hf", source, "-o", destination, *options)
    first = run_ckpt(*command)
    check_refusal(first, code, words)
    assert list(destination.parent.iterdir()) == []

    destination.mkdir()
    (destination / "model.safetensors").write_text("as before")
    existing = snapshot(destination.parent)
    check_refusal(run_ckpt(*command, "--overwrite"), code, words)
    assert snapshot(destination.parent) == existing
    shutil.rmtree(destination)
    assert snapshot(source) == before
    return first.err


def check_refusal(result: Result, code: int, words: tuple[str, ...]) -> None:
    assert result.code == code, result.err
    assert result.out == ""
    assert "Traceback" not in result.err
    for word in words:
        assert word in result.err, f"{word!r} is not in:\n{result.err}"


def half(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


def one_byte_short(path: Path) -> None:
    os.truncate(path, path.stat().st_size - 1)


def emptied(path: Path) -> None:
    os.truncate(path, 0)


def zeroed_tail(path: Path) -> None:
    """Zero the last pages, like a crash that kept the length but lost the data."""
    size = path.stat().st_size
    with open(path, "r+b") as file:
        file.seek(max(8, size - 4096))
        file.write(bytes(size - file.tell()))


AUDITED = """
import os, sys
from ckpt.cli import main
import ckpt.api, ckpt.move.run
import converters.huggingface.hf, converters.deepspeed.zero, converters.names.transformers.relation
forbidden = ("os.system", "os.exec", "os.posix_spawn", "os.fork", "subprocess.Popen", "pickle.find_class", "socket.")
events = []
sys.addaudithook(lambda event, args: event.startswith(forbidden) and events.append(event))
code = 0
try:
    main()
except SystemExit as stop:
    code = stop.code
modules = {"torch", "deepspeed", "this"} & set(sys.modules)
print("events", events, "modules", sorted(modules), "folder", sorted(os.listdir(".")))
sys.exit(code)
"""
