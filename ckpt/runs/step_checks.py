"""Check that a trainer finished writing a step."""

from __future__ import annotations

from pathlib import Path

from ckpt.base.errors import IncompleteError
from ckpt.runs.file_checks import check_carried
from ckpt.runs.steps import TRAINER_STATE, missing_last_of_lightning, one_with_state, trainer_state, trainer_step


def check_ended(step: Path) -> None:
    """Raise IncompleteError if a step lacks the record that HF Trainer or Lightning writes last.

    Raise CorruptError for a damaged file of the trainer's.
    """
    if (other := one_with_state(step)) is not None:
        what = f"{TRAINER_STATE} is missing: HF Trainer writes this file last"
        raise IncompleteError(what, path=step, found=f"{other.name} has it")
    if (name := missing_last_of_lightning(step)) is not None:
        raise IncompleteError(f"{name} is missing: Lightning writes this file last", path=step)
    trainer_step(step)
    for path in trainer_state(step):
        check_carried(path, path.parent)
