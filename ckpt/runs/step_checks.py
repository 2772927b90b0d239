"""Check that a trainer finished writing a step, and that its model has all tensors."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from ckpt.base.errors import IncompleteError
from ckpt.plan import services
from ckpt.plan.checkpoint import HUB, Checkpoint
from ckpt.runs.file_checks import check_carried
from ckpt.runs.model_files import CONFIG
from ckpt.runs.sentence_modules import module_faults
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


def content_faults(checkpoint: Checkpoint) -> Iterator[tuple[str, str, bool]]:
    """Yield the file, the missing tensors, and True if no loader can fill them: from_pretrained needs all."""
    for where, what in module_faults(checkpoint.folders, checkpoint.shapes):
        yield where, what, True
    parts, tensors = services.expected.missing_content(checkpoint)
    if tensors and checkpoint.namespace == HUB and Path(checkpoint.path).is_dir():
        yield CONFIG, "; ".join(tensors), True
    elif parts or tensors:
        yield CONFIG, "; ".join([*parts, *tensors]), False
