"""Problems with the files in a step's folder, besides its tensors. `ckpt resume` tells them, too."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from ckpt.base.errors import CkptError, CorruptError
from ckpt.commands.check.files import INCOMPLETE, LACKING, LEFT, Problem, problem_of, problems_of
from ckpt.plan.checkpoint import OWN, Checkpoint
from ckpt.runs.half_checkpoints import lost_model_of_fsdp, lost_optimizer
from ckpt.runs.lost_files import lost_random_states, lost_rank_files, lost_schedule, lost_trainer_files
from ckpt.runs.model_files import missing_hooks_folders
from ckpt.runs.opening import has_optimizer
from ckpt.runs.search import MANIFEST
from ckpt.runs.step_checks import check_ranks
from ckpt.runs.steps import (
    TRAINER_STATE,
    is_step,
    lost_step_number,
    lost_trainer_state,
    missing_last_of_lightning,
    missing_last_of_megatron,
    missing_trainer_state,
    one_with_state,
    run_at,
)
from ckpt.runs.trainer_files import carried_files, step_around


def step_problems(
    place: Path, root: Path, files: Iterable[Path], models: Sequence[Checkpoint], checkpoint: Checkpoint | None
) -> Iterator[Problem]:
    """Yield problems with `files` in the step `place`, and with files of `models` elsewhere below `root`.

    `checkpoint` is None if a model of the save can't be read.
    """
    opened = {file.path for model in models for file in model.files}
    yield from problems_of(place, files, opened)
    yield from _damaged_run_files(root, files, models)
    yield from _lost_state(place, opened, models)
    yield from _missing_trainer_files(place, checkpoint)


def _damaged_run_files(root: Path, files: Iterable[Path], models: Iterable[Checkpoint]) -> Iterator[Problem]:
    carried: set[Path] = set()
    for model in models:
        try:
            carried.update(carried_files(model))
        except CkptError as error:
            yield problem_of(error, root)
    outside = [path for path in carried.difference(files) if path.is_relative_to(root)]
    yield from (one for one in problems_of(root, sorted(outside)) if one.kind != LEFT)


def _lost_state(place: Path, opened: set[str], models: Sequence[Checkpoint]) -> Iterator[Problem]:
    sizes = {step_around(model) or place: model.world_size for model in models} or {place: None}
    for step, world_size in sizes.items():
        if step.is_dir():
            for name, what, is_proved in lost_random_states(step, world_size):
                yield Problem(INCOMPLETE if is_proved else LACKING, name, what)
    for name, what in (*lost_trainer_files(place), *lost_rank_files(place, opened)):
        yield Problem(INCOMPLETE, name, what)
    if (what := lost_schedule(place)) and not (place / MANIFEST).exists():  # a conversion says it
        yield Problem(LACKING, "trainer state", what)


def _missing_trainer_files(place: Path, checkpoint: Checkpoint | None) -> Iterator[Problem]:
    """Yield a problem if the trainer's last file is missing, HF Trainer's only if other steps have it."""
    if name := missing_last_of_megatron(place, checkpoint is not None and checkpoint.namespace == OWN):
        yield Problem(INCOMPLETE, name, "missing; megatron-core writes it last, and loads no folder without it")
    try:
        check_ranks(place)
    except CorruptError as error:
        yield problem_of(error, place)
    if name := missing_last_of_lightning(place):
        yield Problem(INCOMPLETE, name, "missing; Lightning writes it after the shards, and loads no folder without it")
    for name in missing_trainer_state(place):
        yield Problem(INCOMPLETE, name, "missing; the trainer writes it with the model, and other steps have it")
    others = [one.path for one in run_at(place.parent).steps if one.path != place] if is_step(place) else []
    for name in missing_hooks_folders(place, others[:2]):
        yield Problem(INCOMPLETE, f"{name}/", "missing; the run's other steps have it, by their save hook")
    is_run = checkpoint is not None and has_optimizer(checkpoint)
    if is_run and (lost := lost_trainer_state(place)):
        yield Problem(LACKING, "trainer state", lost)
    if (other := one_with_state(place)) is not None:
        yield Problem(INCOMPLETE, TRAINER_STATE, f"missing; HF Trainer writes it last, and {other.name} has it")
    elif lost := lost_step_number(place):
        yield Problem(LACKING, "trainer state", lost)
    if checkpoint is None or is_run:
        return
    if lost := lost_optimizer(place):
        yield Problem(INCOMPLETE, "optimizer", lost)
    if name := lost_model_of_fsdp(place):
        yield Problem(INCOMPLETE, name, "missing; optimizer.bin is from FSDP, which saves its model with it")
