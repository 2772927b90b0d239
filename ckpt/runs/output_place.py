"""Output places that no trainer rotates, counts or searches.

HF Trainer deletes and loads `checkpoint-*` in its output folder (transformers/trainer_utils.py, `sort_checkpoints`),
torchtitan each name with `step-N` (components/checkpoint.py), and Accelerate each folder in `checkpoints/`
(accelerate/accelerator.py, `save_state`).
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path

from ckpt.base.errors import UsageError
from ckpt.base.words import Message
from ckpt.move.files import is_staged
from ckpt.move.listing import entries_in, is_folder, listed_once
from ckpt.runs.half_checkpoints import is_checkpoint
from ckpt.runs.search import MANIFEST
from ckpt.runs.steps import ANY_STEP, RECORDS
from ckpt.runs.unread_files import is_named_like_state
from ckpt.stores import placeholder_files

_STEP_LIKE = re.compile(r"(?:checkpoint|step|iter|epoch)[-_=]?\d")
#: Accelerate deletes anything in its own folder by age.
_STEPS_ALONE = ("checkpoints", "ckpts")
#: Levels above a source in its run: `run/checkpoint-4/global_step4/universal`.
_LEVELS = 3


def default_output(path: Path, target: str) -> Path:
    """Return the default output folder: `outputs` becomes `outputs-hf`, next to it.

    `run/checkpoint-4` becomes `run-checkpoint-4-hf`. Output from a URL goes into the working directory. Raise
    UsageError if `path` has no name.
    """
    if placeholder_files.url_of(path) is not None:
        return Path(f"{path.name.partition('@')[0]}-{target}")
    return next_to_run(path, target)


def next_to_run(path: Path, *suffix: str) -> Path:
    """Return a place next to the run, relative if `path` is."""
    absolute = Path(os.path.abspath(path))
    if not absolute.name:
        raise UsageError(
            "the input has no name for an output folder", path=path, hint=Message("give one with {output}")
        )
    run = run_root(absolute)
    if not run.name:
        raise UsageError(
            "the run is the root folder, so no output fits next to it",
            path=path,
            hint=Message("give one with {output}"),
        )
    name = "-".join([*absolute.relative_to(run.parent).parts, *suffix])
    is_named = bool(path.name) and path.name != ".."  # not `.` or `..`
    return Path(os.path.relpath(run.parent)) / name if is_named and not path.is_absolute() else run.with_name(name)


@listed_once()
def run_root(path: Path) -> Path:
    """Return a trainer's outermost folder around the absolute `path`, or `path` itself."""
    root = path
    for folder in (path, *path.parents[:_LEVELS]):
        if folder.name and _is_part_of_run(folder):
            root = folder.parent
            while root.name in _STEPS_ALONE:
                root = root.parent
    return root


def _is_part_of_run(path: Path) -> bool:
    """Return True if the parent folder belongs to a run."""
    if _is_step_name(path) or any(_sibling_steps(path)) or any((path.parent / name).is_file() for name in RECORDS):
        return True
    return is_named_like_state(path.name) and is_checkpoint(path.parent)


def check_place(destination: Path) -> None:
    """Raise UsageError if a trainer would count, load or delete `destination` as a step."""
    if placeholder_files.url_of(destination) is not None:
        return
    named = Path(os.path.abspath(destination))
    place = Path(os.path.realpath(named.parent)) / named.name  # a link like LeRobot's `last` leads into a step
    for folder in place.parents:
        if _is_step_name(folder) and _is_trainers(folder):
            raise _refusal(destination, f"a folder outside {folder.name}", f"{folder} is a trainer's step")
    if place.parent.name in _STEPS_ALONE and any(_sibling_steps(place)):
        raise _refusal(destination, f"a folder outside {place.parent.name}/", f"{place.parent} holds a trainer's steps")
    is_universal = place.name.endswith("_universal")  # DeepSpeed's ds_to_universal.py writes it next to the step
    if not is_universal and _STEP_LIKE.search(place.name) and (step := next(_sibling_steps(place), None)):
        raise _refusal(destination, "a name unlike a step's, or a folder outside the run", f"{step} lies next to it")


def place_notes(destination: Path) -> list[str]:
    """Warn of a name in a run folder that its trainer currently ignores."""
    if placeholder_files.url_of(destination) is not None:
        return []
    place = Path(os.path.abspath(destination))
    if not any(_sibling_steps(place)) and not any((place.parent / name).is_file() for name in RECORDS):
        return []
    return [f"{place.parent} is a run folder: the trainer or a cleanup may delete {place.name}"]


def _refusal(destination: Path, expected: str, found: str) -> UsageError:
    return UsageError(
        "a trainer may treat this output as its own checkpoint, or delete it",
        path=destination,
        expected=expected,
        found=found,
        hint=Message("{output} writes next to the run", output=str(next_to_run(destination))),
        code="destination-in-run",
    )


def _sibling_steps(place: Path) -> Iterator[str]:
    if not place.parent.is_dir():
        return
    for name, entry in entries_in(place.parent).items():
        other = place.parent / name
        if name != place.name and _is_step_name(other) and is_folder(entry) and _is_trainers(other):
            yield name


def _is_step_name(path: Path) -> bool:
    """LeRobot uses bare numbers: `checkpoints/005000`."""
    return ANY_STEP.fullmatch(path.name) is not None or (path.name.isdecimal() and path.parent.name in _STEPS_ALONE)


def _is_trainers(step: Path) -> bool:
    """Return True if `step` holds files, but no conversion manifest."""
    if not step.is_dir() or is_staged(step):
        return False
    names = entries_in(step)
    return bool(names) and MANIFEST not in names
