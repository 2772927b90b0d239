"""Run folders: what a trainer leaves around its checkpoints."""

from __future__ import annotations

import re
from contextlib import suppress
from pathlib import Path

from ckpt.base.errors import CkptError, IncompleteError
from ckpt.move.files import confined
from ckpt.move.listing import entries_in, is_folder
from ckpt.move.source import read_file
from ckpt.run_folder.companions import read_json

#: HF Trainer's record of a step (transformers/trainer_callback.py, `TrainerState`).
TRAINER_STATE = "trainer_state.json"
#: DeepSpeed's file with the tag of the step that was saved last, and that of its universal checkpoints.
LATEST, LATEST_UNIVERSAL = "latest", "latest_universal"
#: Megatron-LM's and verl's file with the number of that step; Megatron-LM's may say `release` instead.
TRACKER = "latest_checkpointed_iteration.txt"
#: What megatron-core writes last into the folder of a step, and what stands beside it since before.
MEGATRONS_LAST, MEGATRONS_COMMON, _OF_DCP = "metadata.json", "common.pt", ".metadata"
#: Files that record which step is meant.
RECORDS = (LATEST, LATEST_UNIVERSAL, TRACKER)
_MAX_RECORDED = 4096

#: A step's folder as HF Trainer, TRL and Axolotl name it (transformers/trainer_utils.py).
TRAINER_STEP = re.compile(r"checkpoint-(\d+)")
#: As torchtitan does (components/checkpoint.py).
TITAN_STEP = re.compile(r"step-(\d+)")
#: As Megatron does (megatron/training/checkpointing.py).
MEGATRON_STEP = re.compile(r"iter_(\d{7,})")
#: As any of these, verl, Megatron and many scripts do.
ANY_STEP = re.compile(r"(?:checkpoint|step|global_step|iter|epoch)[-_]?(\d+)")


def recorded_step(path: Path) -> str | None:
    """What the file `latest` or a tracker says, "" included; None without such a file.

    A link to nothing says "", and a folder in the place of Megatron's tracker; one that is called `latest` is a step.

    Raises UnsafeError for a link out of its folder.
    """
    if path.is_dir():
        return "" if path.name == TRACKER else None
    if not path.exists():
        return "" if path.is_symlink() else None
    return read_file(confined(path.parent, path.name), _MAX_RECORDED).decode("utf-8", "replace").strip()


def step_folders(path: Path, named: re.Pattern[str] = ANY_STEP) -> list[Path]:
    """The folders in `path` that are named like a step, newest first."""
    if not path.is_dir():
        return []
    found = [(m, entry) for name, entry in entries_in(path).items() if (m := named.fullmatch(name))]
    return [path / name for _, name in sorted(((int(m[1]), m[0]) for m, e in found if is_folder(e)), reverse=True)]


def step_number(step: Path) -> int:
    """The number in the name of a step folder."""
    return int(re.findall(r"\d+", step.name)[-1])


def names_step(run: Path, place: Path) -> bool:
    """Whether a record in `run` names the step folder that `place` is or lies in."""
    said = [recorded_step(run / name) for name in RECORDS]
    step = place.relative_to(run).parts[:1]
    return any(step == (one,) or (one.isdecimal() and step and _is_number(step[0], int(one))) for one in said if one)


def _is_number(name: str, number: int) -> bool:
    match = ANY_STEP.fullmatch(name)
    return match is not None and int(match[1]) == number


def trainer_steps(path: Path, *, after: int = -1) -> list[Path]:
    """The `checkpoint-N` folders in a run folder whose N is greater than `after`, newest first."""
    return [folder for folder in step_folders(path, TRAINER_STEP) if step_number(folder) > after]


def one_with_state(step: Path) -> Path | None:
    """A step of the run of `step` that has HF Trainer's record, where `step`, a `checkpoint-N`, lacks it.

    Trainer writes it last: `step` was not written to its end.
    """
    if not TRAINER_STEP.fullmatch(step.name) or (step / TRAINER_STATE).exists():
        return None
    return next((other for other in trainer_steps(step.parent) if (other / TRAINER_STATE).is_file()), None)


def check_ended(step: Path) -> None:
    """Raise IncompleteError for a `checkpoint-N` without HF Trainer's record, which comes last, or with half."""
    if (other := one_with_state(step)) is not None:
        what = f"{TRAINER_STATE} is missing, which HF Trainer writes last"
        raise IncompleteError(what, path=step, found=f"{other.name} has it")
    trainer_step(step)


def enclosing_folders(path: Path) -> list[Path]:
    """Where files of the run that a checkpoint belongs to may stand: its folder, and that around a step's."""
    return [path, path.parent] if ANY_STEP.fullmatch(path.name) else [path]


def trainer_step(folder: Path) -> int | None:
    """The step that HF Trainer records in the `checkpoint-N` folder `folder`, if it is one."""
    if not (folder / TRAINER_STATE).is_file():
        return None
    recorded = read_json(confined(folder, TRAINER_STATE))
    step = recorded.get("global_step") if isinstance(recorded, dict) else None
    return step if type(step) is int else None


def of_another_step(place: Path, step: int | None) -> str | None:
    """What to say where a checkpoint in `place`, whose files record `step`, lies in a folder of another number.

    HF Trainer and Megatron name their folders by nothing else, so that one was copied or renamed over another.
    """
    for folder in (place, place.parent):
        recorded = step if MEGATRON_STEP.fullmatch(folder.name) else None
        if TRAINER_STEP.fullmatch(folder.name):
            with suppress(CkptError):  # damage of the record is another matter
                recorded = trainer_step(folder)
        if recorded is not None and recorded != step_number(folder):
            return (
                f"the folder is called {folder.name}, and its files are of step {recorded}: was it renamed, or copied?"
            )
    return None


def missing_last_of_megatron(step: Path, has_own_names: bool) -> str | None:
    """The file that a step of Megatron's lacks which was not saved, or copied, to its end; it loads no such step.

    Newer versions leave DCP's files alone beside it, so that the folder is read as DCP, whose names are its own.
    """
    is_named = MEGATRON_STEP.fullmatch(step.name) is not None and (step.parent / TRACKER).is_file()
    is_megatrons = (step / MEGATRONS_COMMON).is_file() or (is_named and has_own_names)
    if not is_megatrons or not (step / _OF_DCP).is_file() or (step / MEGATRONS_LAST).exists():
        return None
    return MEGATRONS_LAST
