"""Search for a format's checkpoint, and for the models in one save.

Accelerate's `save_state` writes several models into one save:

    pytorch_model/, pytorch_model_1/                      DeepSpeed engines; `latest` names the last
    pytorch_model_fsdp_0/, pytorch_model_fsdp_1/          FSDP, with optimizer_0/, optimizer_1/
    model.safetensors, model_1.safetensors                plain, with optimizer.bin, optimizer_1.bin
    pytorch_model_fsdp.bin, pytorch_model_fsdp_1.bin      FSDP with FULL_STATE_DICT, same optimizers as plain
    pytorch_model_fsdp_rank0.bin, pytorch_model_fsdp_1_rank0.bin      FSDP with rank files

Format facts: accelerate 1.15, `accelerator.py`, `checkpointing.py` and `utils/fsdp_utils.py`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from ckpt.base.errors import CorruptError, IncompleteError, UsageError
from ckpt.base.text import pluralize
from ckpt.base.words import Message, joined
from ckpt.move.files import confined
from ckpt.move.listing import entries_in, is_folder, names_in
from ckpt.runs.steps import LATEST, has_rank_files, recorded_step, searched_folders, step_number

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
    others = newest_first(filter(steps.is_step, searched_folders(path)))
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


_FOLDER = re.compile(r"pytorch_model(?:_fsdp(?=_\d))?(?:_(\d+))?")
_FILE = re.compile(r"(?:pytorch_model(?:_fsdp)?|model)(?:_(\d+))?(?:\.safetensors|(?:_rank\d+)?\.bin)")
#: deepspeed/runtime/engine.py, `_get_ckpt_name`
_ENGINE_FILE = re.compile(r".*mp_rank_\d+_model_states\.pt")
#: These saves also number the first model.
_NUMBERED_FROM_0 = re.compile(r"pytorch_model_fsdp_\d+|optimizer_\d+_rank\d+\.bin")
_OF_RANK = re.compile(r"_rank\d+\.bin$")


def is_models(name: str) -> bool:
    """Return True for the folder of a model, like `pytorch_model_1`."""
    return _FOLDER.fullmatch(name) is not None


def models_of(save: Path) -> dict[int, Path]:
    """Return a save's models by number, or an empty dict for a single model without a number."""
    found: dict[int, Path] = {}
    entries = entries_in(save) if save.is_dir() else {}
    for name, entry in () if has_rank_files(entries) else sorted(entries.items()):
        if match := (_FOLDER if is_folder(entry) else _FILE).fullmatch(name):
            found.setdefault(int(match[1] or 0), save / name)
    return dict(sorted(found.items())) if max(found, default=0) else {}


def free_tags(run: Path) -> list[Path]:
    """Return a run's DeepSpeed checkpoints with tags that are no steps, if `latest` names one of them.

    They are models in one save, like `actor` and `critic`, or saves of one model, like `best` and `final`.
    """
    said = recorded_step(run / LATEST)
    if not said or step_number(said) is not None or not (run / said).is_dir():
        return []
    free = [folder for folder in searched_folders(run) if step_number(folder.name) is None]
    return sorted(folder for folder in free if any(map(_ENGINE_FILE.fullmatch, names_in(folder))))


def save_around(place: Path) -> Path:
    """Return the save's folder around `place`, or `place` itself."""
    is_one = bool((_FILE if place.is_file() else _FOLDER).fullmatch(place.name))
    return place.parent if is_one and place in models_of(place.parent).values() else place


def number_of(place: Path) -> int | None:
    return next((number for number, one in models_of(place.parent).items() if one == place), None)


def sibling_models(place: str) -> list[Path]:
    """Return the other models in the same save. Raise IncompleteError if one is missing."""
    save = save_around(Path(place))
    check_all_there(save)
    models = [one for one in models_of(save).values() if one != Path(place)]
    return models[1:] if save == Path(place) else models


def missing_models(save: Path) -> list[str]:
    if not (models := models_of(save)):
        return []
    last = next(reversed(models.values())).name
    first = "_0" if any(map(_NUMBERED_FROM_0.fullmatch, (last, *names_in(save)))) else ""
    return [_numbered_as(last, number, first) for number in range(max(models)) if number not in models]


def _numbered_as(name: str, number: int, first: str) -> str:
    """Return `name` with a number. `first` is the text for number 0."""
    return re.sub(r"_\d+(?=$|\.|_rank)", f"_{number}" if number else first, name, count=1)


def numbered(name: str, number: int) -> str:
    """Return `optimizer_1.bin` for `optimizer.bin` and number 1."""
    stem, dot, suffix = name.partition(".")
    return f"{stem}_{number}{dot}{suffix}" if number else name


def optimizers_fit(save: Path) -> bool:
    found = {int(m[1] or 0) for name in names_in(save) if (m := re.fullmatch(r"optimizer(?:_(\d+))?\.bin", name))}
    return found == set(models_of(save))


def tagged(save: Path, tag: str) -> Path | None:
    """Return the model file for `tag`: `model_1`, or `model_1.safetensors`."""
    return next((one for one in models_of(save).values() if one.is_file() and _names(tag, one)), None)


def _names(tag: str, model: Path) -> bool:
    return tag in (model.name, model.stem, name_of(model))


def name_of(model: Path) -> str:
    return _OF_RANK.sub("", model.name)


def check_all_there(save: Path) -> None:
    if gone := missing_models(save):
        found = ", ".join(one.name for one in models_of(save).values())
        raise IncompleteError("this save lacks a model", path=save, expected=", ".join(gone), found=found)


def check_one_is_selected(place: Path, requested: Path, tag: str | None) -> None:
    """Raise UsageError if the save has several models and the user named none, IncompleteError if one is missing."""
    save = save_around(place)
    models = models_of(save)
    if not models or (place != save and (requested == place or _names(Path(tag or "").name, place))):
        return
    check_all_there(save)
    raise several_models(save, models.values(), with_tag=save == requested)


def several_models(save: Path, models: Collection[Path], *, with_tag: bool) -> UsageError:
    return UsageError(
        f"this save has {pluralize(len(models), 'model')}: choose one",
        path=save,
        found=", ".join(map(name_of, models)),
        hint=how_to_choose(models, with_tag=with_tag),
        code="several-models",
    )


def how_to_choose(models: Iterable[Path], *, with_tag: bool) -> str:
    return "use " + joined(" or ", (Message("{tag}", tag=name_of(one)) if with_tag else str(one) for one in models))
