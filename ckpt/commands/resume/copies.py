"""Converted copies that `ckpt resume` keeps next to a run, each with a record of its source."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from ckpt.base.errors import CkptError, UsageError
from ckpt.move.files import Staging, staging_folder, translate_os_errors
from ckpt.move.journal import sources_of
from ckpt.move.json_files import read_json
from ckpt.plan.checkpoint import SourceFile
from ckpt.runs.output_place import run_root

RECORD = "ckpt-resume.json"


@dataclass(frozen=True, slots=True)
class StepCopy:
    """A copy in `place`; `is_current` is False if a source file has gone or changed."""

    place: Path
    step: int | None
    is_current: bool


def copies_folder(path: Path) -> Path:
    """Return the folder for copies of the run. It is hidden from searches for runs and steps."""
    run = run_root(Path(os.path.abspath(path)))
    if not run.name:
        raise UsageError("copies can't be kept next to the root folder", path=path, hint="give a folder in it")
    return run.with_name(f".{run.name}.ckpt-resume")


def copies_in(kept: Path) -> Iterator[StepCopy]:
    """Skip damaged records."""
    for record in sorted(kept.glob(f"*/{RECORD}")):
        with contextlib.suppress(CkptError, KeyError, TypeError), translate_os_errors(record):
            content = read_json(record)
            is_current = all(_is_unchanged(SourceFile(*facts)) for facts in content["source"])
            step = content.get("step")
            yield StepCopy(record.parent, step if type(step) is int else None, is_current)


def unfinished_in(kept: Path) -> Iterator[StepCopy]:
    """Yield the staging folders of killed or running resumes."""
    for place in sorted(kept.glob(staging_folder(kept / "*").name)):
        with contextlib.suppress(CkptError), translate_os_errors(place):
            yield StepCopy(place, None, all(map(_is_unchanged, sources_of(place))))


def remove_staging(destination: Path) -> None:
    """Raise StorageError if a living process is writing to it."""
    with Staging(destination, overwrite=True, total_bytes=0) as staging:
        staging.clear()


def _is_unchanged(file: SourceFile) -> bool:
    try:
        return SourceFile.stat(file.path) == file
    except (FileNotFoundError, NotADirectoryError, ValueError):  # ValueError: no file can have this name
        return False
