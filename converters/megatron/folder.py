"""Megatron-LM's run folders: a folder per iteration, and a tracker file with the last one.

    <run>/latest_checkpointed_iteration.txt    "100", or "release"
    <run>/iter_0000100/, <run>/release/

From Megatron-LM, August 2026, training/checkpointing.py: `get_checkpoint_tracker_filename`, `read_metadata`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from pathlib import Path

from ckpt.move.listing import names_in
from ckpt.runs.finding import Steps, find_step
from ckpt.runs.steps import TRACKER

RELEASE = "release"
MODEL, DISTRIBUTED = "model_optim_rng.pt", "distrib_optim.pt"
RANK_FOLDER = re.compile(r"mp_rank_(\d+)(?:_(\d+))?(?:_(\d+))?")


def iteration_folder(step: int | None) -> str:
    return RELEASE if step is None else f"iter_{step:07d}"


def is_iterations_name(name: str) -> bool:
    return name == RELEASE or re.fullmatch(r"iter_\d{7,}", name) is not None


def find_iteration(path: Path, tag: str | None, is_iteration: Callable[[Path], bool]) -> Path | None:
    return find_step(path, tag, Steps(is_iteration, of_tag=_tag_folders, record=TRACKER, of_record=_recorded_folders))


def _tag_folders(tag: str) -> Sequence[str]:
    return (iteration_folder(int(tag)) if tag.isdecimal() else tag,)


def _recorded_folders(said: str) -> Sequence[str]:
    return _tag_folders(said) if said == RELEASE or said.isdecimal() else ()


def rank_folders(folder: Path) -> list[str]:
    found = [(m, name) for name in names_in(folder) if (m := RANK_FOLDER.fullmatch(name))]
    return [name for _, name in sorted(found, key=lambda item: [int(n or -1) for n in item[0].groups()])]


def is_iteration(folder: Path) -> bool:
    """Return True if the folder has rank folders with a model file, whatever its name."""
    if not folder.is_dir():
        return False
    names = rank_folders(folder)
    return any((folder / name / MODEL).is_file() or (folder / name / "model_rng.pt").is_file() for name in names[:4])
