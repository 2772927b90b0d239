"""A folder of runs: `outputs/RUN/checkpoint-N`, as Axolotl's and TRL's users keep them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from ckpt.base.errors import CkptError, SeveralRunsError
from ckpt.move.listing import folders_in, names_in
from ckpt.run_folder.steps import RECORDS, step_folders

#: The digests of what a conversion wrote, which it writes last.
MANIFEST = "ckpt-manifest.json"
_LAST = 10  # seconds that a conversion may take to end behind it
_LEVELS = 2
_MAX_FOLDERS = 2000  # looked into on each level


def run_below(path: Path, holds: Callable[[Path], bool]) -> Path | None:
    """The one run folder below `path` that `holds` what is looked for; None where there is none.

    It is on the first two levels.  What has steps, or a record of them, is a run itself: nothing inside is taken in its
    place.  What a conversion made is taken only where nothing else is there.  Raises SeveralRunsError where there are
    several, the newest first.
    """
    if not path.is_dir() or step_folders(path) or any((path / name).is_file() for name in RECORDS):
        return None
    runs: list[Path] = []
    level = [path]
    for _ in range(_LEVELS):
        inside = [inner for folder in level for inner in _folders(folder)][:_MAX_FOLDERS]
        level = [folder for folder in inside if not _holds(folder, holds)]
        runs += [folder for folder in inside if folder not in level]
    runs = [run for run in runs if not _is_converted(run)] or runs
    if len(runs) > 1:
        newest_first = sorted(runs, key=_time, reverse=True)
        raise SeveralRunsError(path, newest_first)
    return runs[0] if runs else None


def _folders(folder: Path) -> list[Path]:
    try:
        steps = set(step_folders(folder))
        inside = [p for p in folders_in(folder) if not p.name.startswith(".") and not p.is_symlink()]
        return [p for p in inside if p not in steps]
    except (OSError, CkptError):  # what cannot be looked into holds nothing that could be read
        return []


def _holds(folder: Path, holds: Callable[[Path], bool]) -> bool:
    try:
        return holds(folder)
    except CkptError:  # a damaged one is one
        return True


def _is_converted(folder: Path) -> bool:
    """Whether a folder is as a conversion left it: no run has saved anything there since."""
    try:
        written = (folder / MANIFEST).stat().st_mtime
        return all((folder / name).stat().st_mtime <= written + _LAST for name in names_in(folder))
    except OSError:
        return False


def _time(run: Path) -> int:
    """When the run last saved, in ns."""
    return max(place.stat().st_mtime_ns for place in (run, *step_folders(run)))
