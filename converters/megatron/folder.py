"""Megatron-LM's run folders: a folder for each iteration, and a file that names the last one.

    <run>/latest_checkpointed_iteration.txt    "100", or "release"
    <run>/iter_0000100/, <run>/release/

After Megatron-LM of August 2026, training/checkpointing.py: `get_checkpoint_tracker_filename`, `read_metadata`.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

from ckpt.base.errors import CorruptError
from ckpt.move.files import confined
from ckpt.move.listing import folders_in
from ckpt.run_folder.steps import TRACKER, recorded_step

RELEASE = "release"


def iteration_folder(step: int | None) -> str:
    """The folder's name; a model without a step is a release."""
    return RELEASE if step is None else f"iter_{step:07d}"


def is_iterations_name(name: str) -> bool:
    """Whether Megatron-LM calls an iteration's folder so."""
    return name == RELEASE or re.fullmatch(r"iter_\d{7,}", name) is not None


def find_iteration(path: Path, tag: str | None, is_iteration: Callable[[Path], bool]) -> Path | None:
    """An iteration's folder: `path` itself, the one that `tag` names, or the one that the tracker records.

    CorruptError where the tracker names a folder that is not there.
    """
    if not path.is_dir():
        return None
    if tag is not None:
        named = confined(path, iteration_folder(int(tag)) if tag.isdigit() else tag)
        return named if is_iteration(named) else None
    if is_iteration(path):
        return path
    tracker = path / TRACKER
    said = recorded_step(tracker)
    if said is None or (said != RELEASE and not said.isdecimal()):
        return None
    named = path / (RELEASE if said == RELEASE else iteration_folder(int(said)))
    if is_iteration(named):
        return named
    others = [folder.name for folder in folders_in(path) if is_iteration(folder)]
    if named.is_dir() or not others:
        return None  # another format of Megatron's, or of another framework with a tracker of the same name
    raise CorruptError(
        "the tracker names an iteration that is not there",
        path=tracker,
        expected=f"the folder {named.name}",
        found="no such folder",
        hint=f"the newest here is {others[-1]}",
    )
