"""Run folders: what a trainer leaves around its checkpoints."""

from __future__ import annotations

import re
from pathlib import Path

from ckpt.move.files import confined
from ckpt.run_folder.companions import read_json

#: HF Trainer's record of a step (transformers/trainer_callback.py, `TrainerState`).
TRAINER_STATE = "trainer_state.json"
#: HF Trainer, TRL and Axolotl name the folder of a step like this (transformers/trainer_utils.py).
_TRAINER_STEP = re.compile(r"checkpoint-(\d+)")
#: And this is how others do: torchtitan, verl, scripts.
_STEP = re.compile(r"(?:checkpoint|step|global_step|iter|epoch)[-_]?\d+")


def trainer_steps(path: Path, *, after: int = -1) -> list[Path]:
    """The `checkpoint-N` folders in a run folder whose N is greater than `after`, newest first."""
    if not path.is_dir():
        return []
    steps = [(int(m[1]), p) for p in path.iterdir() if (m := _TRAINER_STEP.fullmatch(p.name)) and p.is_dir()]
    return [folder for step, folder in sorted(steps, reverse=True) if step > after]


def enclosing_folders(path: Path) -> list[Path]:
    """Where files of the run that a checkpoint belongs to may stand: its folder, and that around a step's."""
    folders = [path]
    if _STEP.fullmatch(path.name):
        folders.append(path.parent)
    return folders


def trainer_step(folder: Path) -> int | None:
    """The step that HF Trainer records in the `checkpoint-N` folder `folder`, if it is one."""
    if not (folder / TRAINER_STATE).is_file():
        return None
    recorded = read_json(confined(folder, TRAINER_STATE))
    step = recorded.get("global_step") if isinstance(recorded, dict) else None
    return step if type(step) is int else None
