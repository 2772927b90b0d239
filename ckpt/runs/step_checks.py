"""Check that a trainer finished writing a step, and that its model has all tensors."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path

from ckpt.base.errors import CkptError, CorruptError, IncompleteError
from ckpt.containers.torchfile import read as torchfile
from ckpt.move.files import confined
from ckpt.move.listing import names_in
from ckpt.plan import services
from ckpt.plan.checkpoint import HUB, Checkpoint
from ckpt.runs.file_checks import check_carried
from ckpt.runs.model_files import CONFIG
from ckpt.runs.sentence_modules import module_faults
from ckpt.runs.steps import TRAINER_STATE, missing_last_of_lightning, one_with_state, trainer_state, trainer_step

#: Folder, names and key of the records of OLMo-core's trainer. Accelerate's `step` in `random_states_N.pkl` is no step
#: of the run: each rank counts batches since its own data loader ended (`Accelerator._do_sync`).
_RECORDS_OF_RANKS = (("train", re.compile(r"rank\d+\.pt"), "global_step"),)


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
    check_ranks(step)


def check_ranks(step: Path) -> None:
    """Raise CorruptError if the ranks' files in a step's folder record different steps."""
    for folder, pattern, key in _RECORDS_OF_RANKS:
        place = step / folder
        names = [name for name in names_in(place) if pattern.fullmatch(name)] if place.is_dir() else []
        numbers: dict[int, str] = {}
        for name in names:
            with suppress(CkptError):  # a damaged file is reported by other checks
                root = torchfile.read(confined(place, name)).root
                if isinstance(root, Mapping) and type(number := root.get(key)) is int:
                    numbers.setdefault(number, name)
        if len(numbers) > 1:
            first, other, *_ = numbers.items()
            raise CorruptError(
                "the folder mixes ranks from different steps",
                path=place / other[1],
                expected=f"{key} {first[0]}, as in {first[1]}",
                found=f"{key} {other[0]}",
            )


def content_faults(checkpoint: Checkpoint) -> Iterator[tuple[str, str, bool | None]]:
    """Yield the file, the missing tensors, and True if no loader can fill them: from_pretrained needs all.

    None stands for names that only the training's own code can explain.
    """
    for where, what in module_faults(checkpoint.folders, checkpoint.shapes):
        yield where, what, True
    parts, tensors, renamed = services.expected.missing_content(checkpoint)
    is_needed = bool(tensors) and checkpoint.namespace == HUB and Path(checkpoint.path).is_dir()
    if tensors or (parts and not renamed):
        yield CONFIG, "; ".join(tensors if is_needed else [*parts, *tensors]), is_needed
    if renamed:
        yield CONFIG, "; ".join([*renamed, *parts]), None
