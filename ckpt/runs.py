"""Run folders: what a trainer leaves around its checkpoints."""

from __future__ import annotations

import re
from pathlib import Path

#: HF Trainer, TRL and Axolotl name the folder of a step like this (transformers/trainer_utils.py).
_TRAINER_STEP = re.compile(r"checkpoint-(\d+)")


def trainer_steps(path: Path) -> list[Path]:
    """The `checkpoint-N` folders in a run folder, newest first."""
    if not path.is_dir():
        return []
    steps = [(int(m[1]), p) for p in path.iterdir() if (m := _TRAINER_STEP.fullmatch(p.name)) and p.is_dir()]
    return [folder for _, folder in sorted(steps, reverse=True)]


def enclosing_folders(path: Path) -> list[Path]:
    """Where files of the run that a checkpoint belongs to may stand: its folder, and that around a `checkpoint-N`."""
    folders = [path]
    if _TRAINER_STEP.fullmatch(path.name):
        folders.append(path.parent)
    return folders
