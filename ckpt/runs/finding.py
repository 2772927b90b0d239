"""Search for a format's checkpoint."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from ckpt.base.errors import CorruptError, IncompleteError
from ckpt.base.words import Message
from ckpt.move.files import confined
from ckpt.move.listing import folders_in, names_in
from ckpt.runs.models import is_models
from ckpt.runs.steps import recorded_step

#: Training state from DCP, FSDP, Accelerate, HF Trainer or Megatron.
_OTHERS_STATE = re.compile(
    r"\.metadata|__\d+_\d+\.distcp|(?:model|optim)_world_size_\d+_rank_\d+\.pt|optimizer(?:_\d+)?\.(?:pt|bin)"
    r"|(?:pytorch_model_fsdp|optimizer)_\d+|mp_rank_\d+(?:_\d+)*"
)


def _recorded_folders(said: str) -> Sequence[str]:
    return (said,) if said else ()


def _never(folder: Path) -> bool:
    return False


@dataclass(frozen=True, slots=True)
class Steps:
    """A format's rules for steps in a run's folder.

    Example:
        _STEPS = Steps(_is_step, record="latest")  # `latest` holds a step folder's name
        step = find_step(Path("outputs"), None, _STEPS)
    """

    #: From names and small files.
    is_step: Callable[[Path], bool]
    #: Folder names for a tag.
    of_tag: Callable[[str], Sequence[str]] = _recorded_folders
    #: In the run's folder.
    record: str | None = None
    of_record: Callable[[str], Sequence[str]] = _recorded_folders
    #: True if the engine loads no step without a record.
    needs_record: bool = False
    #: True if only this format has the record. A record without a valid step is then damaged.
    owns_record: bool = False
    may_be_others: Callable[[Path], bool] = _never
    #: From file names, if possible.
    is_finished: Callable[[Path], bool] | None = None


def find_step(path: Path, tag: str | None, steps: Steps) -> Path | None:
    """Return the step at `path` or in its record, or the step for a tag.

    Raise CorruptError if the record names a missing step, IncompleteError if the record is missing.
    """
    if not path.is_dir():
        return None
    if steps.is_step(path) and (tag is None or (tag == path.name and steps.record is not None)):
        return path
    folders = candidate_folders(path, tag, steps)
    named = next((folder for folder in folders if folder.is_dir() and steps.is_step(folder)), None)
    if named is not None or tag is not None:
        return named
    said = recorded_step(path / steps.record) if steps.record is not None else None
    if said is not None or steps.needs_record:
        _check_record(path, said, folders, steps)
    return None


def candidate_folders(path: Path, tag: str | None, steps: Steps) -> list[Path]:
    """Return the folders that the tag or record may name. They need not exist."""
    if tag is not None:
        return [confined(path, name) for name in steps.of_tag(tag)]
    said = recorded_step(path / steps.record) if steps.record is not None else None
    names = steps.of_record(said or "")
    if said is not None and said.isdecimal() and steps.of_record is not _recorded_folders:
        return [path / name for name in names]  # derived from a number, so it stays inside
    return [confined(path, name) for name in names]


def _check_record(path: Path, said: str | None, named: Sequence[Path], steps: Steps) -> None:
    """Raise an error if the record should name a step in this format, but is damaged or missing."""
    others = newest_first(filter(steps.is_step, folders_in(path)))
    if steps.owns_record and said is not None:
        is_others = any(map(steps.may_be_others, named)) or any(map(_OTHERS_STATE.fullmatch, names_in(path)))
        if not others and is_others:
            return
    elif not others or any(folder.is_dir() for folder in named):
        return  # another format's record with the same name
    error = IncompleteError if steps.needs_record and not (named and others) else CorruptError
    raise error(
        f"`{steps.record}` names a missing step folder, or a step without this format"
        if named
        else f"`{steps.record}` does not name a step",
        path=path if said is None else path / str(steps.record),
        expected=f"a checkpoint in {named[0].name}/" if named else "the name of a step folder",
        found="no such file" if said is None else repr(said),
        hint=newest_whole(others, steps.is_finished),
    )


def newest_whole(found: Iterable[Path], is_whole: Callable[[Path], bool] | None) -> str | None:
    """Return a hint with the first whole step. The other models of a save are no steps."""
    steps = (one for one in found if re.search(r"\d", one.name) and not is_models(one.name))
    whole = next((step.name for step in steps if is_whole is None or is_whole(step)), None)
    which = "complete " if is_whole else ""
    return Message("the newest {}step here is {}: {tag}", which, whole, tag=whole) if whole else None


def newest_first(steps: Iterable[Path]) -> list[Path]:
    """Sort step folders by the last number in their names."""
    return sorted(steps, key=lambda step: (int([-1, *re.findall(r"\d+", step.name)][-1]), step.name), reverse=True)
