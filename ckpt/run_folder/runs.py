"""A folder of runs: `outputs/RUN/checkpoint-N`, as Axolotl's and TRL's users keep them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from ckpt.errors import CkptError, SeveralRunsError
from ckpt.run_folder.steps import RECORDS, step_folders

_LEVELS = 2
_MAX_FOLDERS = 2000  # looked into on each level


def run_below(path: Path, holds: Callable[[Path], bool]) -> Path | None:
    """The one run folder below `path` that `holds` what is looked for; None where there is none.

    It is on the first level that has any, of two.  What has steps, or a record of them, is a run itself: nothing inside
    is taken in its place.  Raises SeveralRunsError, the newest first, where there are several.
    """
    if not path.is_dir() or step_folders(path) or any((path / name).is_file() for name in RECORDS):
        return None
    level = [path]
    for _ in range(_LEVELS):
        level = [inner for folder in level for inner in _folders(folder)][:_MAX_FOLDERS]
        runs = [folder for folder in level if _holds(folder, holds)]
        if len(runs) > 1:
            newest_first = sorted(runs, key=_time, reverse=True)
            raise SeveralRunsError(path, newest_first)
        if runs:
            return runs[0]
    return None


def _folders(folder: Path) -> list[Path]:
    try:
        inside = sorted(folder.iterdir())
        steps = set(step_folders(folder))
        return [
            p for p in inside if p not in steps and not p.name.startswith(".") and p.is_dir() and not p.is_symlink()
        ]
    except (OSError, CkptError):  # what cannot be looked into holds nothing that could be read
        return []


def _holds(folder: Path, holds: Callable[[Path], bool]) -> bool:
    try:
        return holds(folder)
    except CkptError:  # a damaged one is one
        return True


def _time(run: Path) -> int:
    """When the run last saved, in ns."""
    return max(place.stat().st_mtime_ns for place in (run, *step_folders(run)))
