"""Files that a trainer writes with every step, and that one step lacks: schedules, random states, files of ranks.

A conversion (with a manifest) may leave out such files, and says so itself.

Format facts: transformers (trainer.py, `_save_rng_state`, `_load_optimizer_and_scheduler`), accelerate
(`checkpointing.py`), torch_checkpointing 0.1.1.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Container, Iterator
from dataclasses import dataclass
from pathlib import Path

from ckpt.base.text import pluralize
from ckpt.move.listing import names_in
from ckpt.runs.finding import numbered
from ckpt.runs.model_files import CONFIG
from ckpt.runs.search import MANIFEST
from ckpt.runs.steps import (
    ACCELERATE_RNG,
    ANY_STEP,
    LATEST,
    RANK_FILE,
    RANKS_METADATA,
    SCHEDULE,
    TRAINER_STATE,
    is_step,
    run_at,
)

#: HF Trainer's random states by rank. With one process, they have no number.
_TRAINER_RNG = re.compile(r"rng_state(?:_(\d+))?\.pth")
#: Accelerate's schedules, and HF Trainer's.
_ACCELERATE_SCHEDULE = re.compile(r"scheduler(?:_(\d+))?\.bin")
#: torchtitan's item for the step's number.
_STEP = "step"
OTHERS_HAVE_IT = "missing; the run's other steps have it"


@dataclass(frozen=True, slots=True)
class RandomState:
    name: str
    rank: int
    trainer: bool

    def name_among(self, num_ranks: int | None) -> str:
        if not self.trainer or num_ranks is None:
            return self.name
        return "rng_state.pth" if num_ranks == 1 else self.name_of(self.rank)

    def name_of(self, rank: int) -> str:
        return f"rng_state_{rank}.pth" if self.trainer else f"random_states_{rank}.pkl"


def random_states(names: Collection[str]) -> list[RandomState]:
    found = ((_TRAINER_RNG.fullmatch(name) or ACCELERATE_RNG.fullmatch(name)) for name in names)
    return [RandomState(one[0], int(one[1] or 0), one.re is _TRAINER_RNG) for one in found if one is not None]


def lost_random_states(step: Path, world_size: int | None) -> Iterator[tuple[str, str, bool]]:
    """Yield the missing files of ranks, and whether another file proves that there was one.

    `world_size` is the recorded number of ranks, None if nothing records it. It is no proof: a conversion to more ranks
    has no random states for them. HF Trainer numbers the files only if there are several ranks.
    """
    names = names_in(step)
    numbered_states = [one for one in random_states(names) if one.name == one.name_of(one.rank)]
    for states in ([one for one in numbered_states if one.trainer is trainer] for trainer in (True, False)):
        if not states:
            continue
        ranks, last = {one.rank for one in states}, max(one.rank for one in states)
        recorded, least = (0, 0) if MANIFEST in names else (world_size or 0, 2 if states[0].trainer else 1)
        for rank in sorted({*range(max(last, recorded, least))} - ranks):
            if rank < last:
                why = f", rank {last}'s is there"
            elif rank < recorded:
                why = f": the step records {pluralize(recorded, 'rank')}"
            else:
                why = f": a single rank writes {states[0].name_among(1)}"
            yield states[0].name_of(rank), f"the file of rank {rank} is missing{why}", not last < rank < recorded


def lost_trainer_files(step: Path) -> Iterator[tuple[str, str]]:
    """Yield the files of HF Trainer or Accelerate that the steps before and after `step` have.

    These are schedules, the model's config, and random states if `step` has none. Steps with DeepSpeed are only
    compared with each other, because its engine may hold the schedule.
    """
    names = names_in(step) if step.is_dir() else []
    numbers = {int(one[1] or 0) for name in names if (one := _ACCELERATE_SCHEDULE.fullmatch(name))}
    for number in sorted({*range(max(numbers, default=0))} - numbers):
        yield numbered("scheduler.bin", number), f"missing, {numbered('scheduler.bin', max(numbers))} is there"
    if MANIFEST in names or not _has_optimizer(names):
        return
    alike = [other for other in _names_nearby(step) if _is_of_deepspeed(other) is _is_of_deepspeed(names)]
    lost = set.intersection(*map(set, alike)).difference(names) if alike else set[str]()
    schedules = {name for name in lost if name == SCHEDULE or _ACCELERATE_SCHEDULE.fullmatch(name)}
    states = sorted(one.name for one in random_states(lost))
    for name in sorted({*(() if numbers else schedules), *(() if random_states(names) else states[:1])}):
        yield name, OTHERS_HAVE_IT
    if CONFIG in lost:
        yield CONFIG, OTHERS_HAVE_IT


def lost_schedule(step: Path) -> str:
    """Return a sentence if a step of HF Trainer has an optimizer that it loads only with a schedule, or ""."""
    names = names_in(step) if step.is_dir() else []
    if TRAINER_STATE not in names or SCHEDULE in names or _is_of_deepspeed(names) or not _has_optimizer(names):
        return ""
    return f"{SCHEDULE} is missing: HF Trainer loads no optimizer without it"


def lost_rank_files(step: Path, opened: Container[str]) -> Iterator[tuple[str, str]]:
    """Yield the files of ranks that torch_checkpointing wrote for an item without any `opened` file.

    A described item may have ranks without a file. An item counts if it is the step's number, or in other steps.
    """
    items = _files_of_ranks(names_in(step) if step.is_dir() else [])
    ranks = range(1 + max((rank for files in items.values() for rank in files), default=-1))
    nearby = [_files_of_ranks(other) for other in _names_nearby(step)] if items else []
    of_others = set.intersection(*map(set, nearby)) if nearby else set[str]()
    for files in (files for item, files in items.items() if item == _STEP or item in of_others):
        if not any(str(step / name) in opened for name in files.values()):
            there = min(files.values())
            for rank in sorted({*ranks}.difference(files)):
                name = re.sub(r"_\d+(?=\.\w+$)", f"_{rank}", there)
                yield name, f"missing, {there} is there: torch_checkpointing writes one for each rank"
    for item in sorted(of_others.difference(items)):
        yield nearby[0][item][min(nearby[0][item])], OTHERS_HAVE_IT


def _files_of_ranks(names: Collection[str]) -> dict[str, dict[int, str]]:
    found: dict[str, dict[int, str]] = {}
    for one in map(RANK_FILE.fullmatch, names if RANKS_METADATA in names else ()):
        if one is not None:
            found.setdefault(one["item"], {})[int(one["rank"])] = one[0]
    return found


def _names_nearby(step: Path) -> list[list[str]]:
    """Return the names in the folders of the steps before and after `step`."""
    steps = [one.path for one in run_at(step.parent).steps] if is_step(step) else []
    at = steps.index(step) if step in steps else len(steps) + 1
    return [names_in(one) for one in (*steps[at + 1 : at + 2], *steps[at - 1 : at]) if one.is_dir()]


def _is_of_deepspeed(names: Collection[str]) -> bool:
    return LATEST in names or any(map(ANY_STEP.fullmatch, names))


def _has_optimizer(names: Collection[str]) -> bool:
    return _is_of_deepspeed(names) or any(name.startswith("optimizer") for name in names)
