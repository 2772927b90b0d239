"""Megatron-LM's run folders: a folder for each iteration, and a file that names the last one.

    <run>/latest_checkpointed_iteration.txt    "100", or "release"
    <run>/iter_0000100/, <run>/release/

After Megatron-LM of August 2026, training/checkpointing.py: `get_checkpoint_tracker_filename`, `read_metadata`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from pathlib import Path

from ckpt.run_folder.finding import Steps, find_step
from ckpt.run_folder.steps import TRACKER

RELEASE = "release"


def iteration_folder(step: int | None) -> str:
    """The folder's name; a model without a step is a release."""
    return RELEASE if step is None else f"iter_{step:07d}"


def is_iterations_name(name: str) -> bool:
    """Whether Megatron-LM calls an iteration's folder so."""
    return name == RELEASE or re.fullmatch(r"iter_\d{7,}", name) is not None


def find_iteration(path: Path, tag: str | None, is_iteration: Callable[[Path], bool]) -> Path | None:
    """An iteration's folder: `path` itself, the one that `tag` names, or the one that the tracker records."""
    return find_step(path, tag, Steps(is_iteration, of_tag=_of_tag, record=TRACKER, of_record=_of_record))


def _of_tag(tag: str) -> Sequence[str]:
    return (iteration_folder(int(tag)) if tag.isdecimal() else tag,)


def _of_record(said: str) -> Sequence[str]:
    return _of_tag(said) if said == RELEASE or said.isdecimal() else ()
