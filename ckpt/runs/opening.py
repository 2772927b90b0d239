"""Find and describe the checkpoint for a path: the path itself, a run's step, or a run in a folder of runs."""

from __future__ import annotations

import os
import re
import warnings
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

from ckpt.adapters.names import ADAPTER_CONFIG
from ckpt.base.errors import CkptError, HalfError, IncompleteError, NotFoundError, UsageError, shown
from ckpt.base.text import did_you_mean, pluralize
from ckpt.base.words import Keyword, Message, joined
from ckpt.move.files import confined, is_staged, translate_os_errors
from ckpt.move.listing import entries_in, folders_in, is_folder, listed_once, names_in
from ckpt.plan import registry, services
from ckpt.plan.checkpoint import (
    OWN,
    TRANSFORMERS,
    Checkpoint,
    Format,
    Inputs,
    ReadRequest,
)
from ckpt.plan.tensors import Tensor
from ckpt.runs import from_hub
from ckpt.runs.finding import check_one_is_selected, how_to_choose, models_of
from ckpt.runs.foreign_checkpoints import foreign
from ckpt.runs.half_checkpoints import OPTIMIZER_FILE, holds_model, lost_optimizer, lost_weights, with_hint
from ckpt.runs.model_files import CONFIG, hooks_folder, read_config
from ckpt.runs.recorded_precision import with_computing_dtype
from ckpt.runs.search import run_below
from ckpt.runs.selection import ANY, Chooser, Want
from ckpt.runs.selection import is_run as is_run
from ckpt.runs.source_checks import different_steps, empty_parameters, missing_states, step_mismatch
from ckpt.runs.steps import (
    ANY_STEP,
    RECORDS,
    enclosing_folders,
    is_closed,
    is_step,
    link_target,
    lost_step_number,
    lost_trainer_state,
    recorded_step,
    run_at,
    searched_folders,
)
from ckpt.stores import placeholder_files

#: nemo/lightning/io/api.py
_NEMO_CONTEXT = "model.yaml"
AUTO = "auto"
_MAX_ENTRIES = 200
_MAX_LEVELS = 6  # folder levels searched for a checkpoint
_MAX_SHOWN = 8  # names per message
_MAX_NEIGHBOURS = 2000  # names compared with a mistyped one


def open_checkpoint(
    path: str | Path,
    format: str = AUTO,
    *,
    tag: str | None = None,
    config: str | None = None,
    replica: int | None = None,
    accept_settings: Sequence[str] | None = None,
    unfinished: bool = False,
    options: Mapping[str, Any] | None = None,
) -> Checkpoint:
    """Describe the checkpoint at `path`, with the arguments and errors of `ckpt.open`.

    Refuse the folder of a running or stopped conversion unless `unfinished`.
    """
    formats = registry.all_formats() if format == AUTO else registry.named(format)
    for one in formats:
        if not one.reads:
            raise UsageError(f"the format {one.name!r} cannot be read", hint="see `ckpt formats`")
    path = placeholder_files.local(path)
    how: dict[str, Any] = {"unfinished": unfinished, "replica": replica, "options": options}
    checkpoint = _opened(path, formats, tag, config, accepted=frozenset(accept_settings or ()), **how)
    if checkpoint is None or (format != AUTO and checkpoint.format not in [one.name for one in formats]):
        with translate_os_errors(path):
            raise _nothing_found(path, format, tag, [checkpoint.format] if checkpoint else [])
    return checkpoint


def open_training(path: Path, *, tag: str | None = None, config: str | None = None) -> Checkpoint | None:
    """Return the newest complete checkpoint with an optimizer in `path`, its steps or its only run, or None.

    A final model next to them is skipped. Raise the errors of `open`.
    """
    formats = [one for one in registry.all_formats() if one.reads and one.carries_optimizer]
    return _opened(path, formats, tag, config, Want("checkpoint with an optimizer", can_resume, is_newest=True))


def open_model(path: Path, *, tag: str | None = None, config: str | None = None) -> Checkpoint | None:
    """Return the model or adapter without an optimizer, or None."""
    formats = [one for one in registry.all_formats() if one.reads and not one.carries_optimizer]
    return _opened(path, formats, tag, config)


def open_accepted(
    path: Path, want: Want, *, tag: str | None, config: str | None, options: Mapping[str, Any] | None
) -> Checkpoint | None:
    """Return the checkpoint that `open` chooses among accepted ones."""
    formats = sorted((one for one in registry.all_formats() if one.reads), key=lambda one: one.name != want.prefers)
    return _opened(path, formats, tag, config, want, options=options)


@listed_once()
def _opened(
    path: Path,
    formats: list[Format],
    tag: str | None,
    config: str | None,
    want: Want = ANY,
    *,
    unfinished: bool = False,
    accepted: frozenset[str] = frozenset(),
    replica: int | None = None,
    options: Mapping[str, Any] | None = None,
) -> Checkpoint | None:
    if tag == "":
        raise UsageError("the tag is empty", expected="the name of a folder")
    requested = {name: value for name, value in (options or {}).items() if value is not None}
    for name, value in requested.items():
        registry.options_for_reading()[name].check(value)
    with translate_os_errors(path):
        path = with_folders_around(path)
        if not path.exists():
            raise NotFoundError("no such file or folder", path=path, hint=_neighbour(path))
        if is_staged(path) and not unfinished:
            what, hint = (
                "this conversion has not finished",
                "wait until it has finished: the result is at its destination",
            )
            raise IncompleteError(what, path=path, hint=hint)
        request = ReadRequest(tag, None if config is None else find_config(config), accepted, requested)
        try:
            checkpoint = Chooser(formats, request, want).open(path)
        except HalfError as error:
            raise with_hint(error) from None
        if checkpoint is not None:
            _check_used(checkpoint, requested)
        if checkpoint is not None and not want.is_newest:
            check_one_is_selected(Path(checkpoint.path), path, tag)
        checkpoint = checkpoint and replace(checkpoint, accepted=accepted)
        return checkpoint and _with_notes(_select_replica(_with_config(checkpoint, path, request), replica))


def _select_replica(checkpoint: Checkpoint, replica: int | None) -> Checkpoint:
    if replica is None:
        return checkpoint
    from ckpt.plan.planner import choose_replica

    return choose_replica(checkpoint, replica)


def _with_notes(checkpoint: Checkpoint) -> Checkpoint:
    told = step_mismatch(checkpoint)
    empty = (empty_parameters(checkpoint), missing_states(checkpoint)[0])
    steps = different_steps(checkpoint)
    place = Path(checkpoint.path)
    lost = lost_trainer_state(place.parent) if has_optimizer(checkpoint) else lost_optimizer(place)
    number = lost_step_number(place) or lost_step_number(place.parent)
    copies = rank_copies_note(checkpoint.tensors.values())
    notes = [note for note in (checkpoint.lost_weights, told, steps, lost, number, copies, *empty) if note]
    return replace(checkpoint, notes=(*checkpoint.notes, *notes)) if notes else checkpoint


def rank_copies_note(tensors: Iterable[Tensor]) -> str:
    own = [tensor.fqn for tensor in tensors if tensor.rank_copies]
    if not own:
        return ""
    names = f"{own[0]}, ..." if len(own) > 1 else own[0]
    what = f"every rank saved its own values of {pluralize(len(own), 'buffer')} ({names})"
    return f"{what}; ckpt reads rank 0's, like DeepSpeed and torch"


def warn_of_skipped(*checkpoints: Checkpoint) -> None:
    for checkpoint in checkpoints:
        for note in checkpoint.passed_over:
            warnings.warn(f"{shown(checkpoint.path)}: {note}", stacklevel=3)


def _neighbour(path: Path) -> str | None:
    try:
        beside = [entry.name for entry in islice(path.parent.iterdir(), _MAX_NEIGHBOURS)]
    except OSError:
        beside = []
    return did_you_mean(path.name, beside) or from_hub.owner_hint(str(path), "hf://")


def can_resume(checkpoint: Checkpoint) -> bool:
    return has_optimizer(checkpoint) and holds_model(checkpoint)


def has_optimizer(checkpoint: Checkpoint) -> bool:
    """Return True if there is an optimizer, even without a map from its states to parameters.

    Its engine loads such states by number, but a conversion can't.
    """
    if checkpoint.missing_optimizer is not None:
        return False
    is_beside = any(Path(file.path).name.startswith("optim") for file in checkpoint.files)
    is_there = is_beside or bool(checkpoint.unmapped_optimizer)
    return knows_optimizer(checkpoint) or is_there or registry.get(checkpoint.format).always_has_optimizer


def holds_optimizer(file: Path) -> bool:
    """Return True for an optimizer, even if no format reads it."""
    from ckpt.containers.torchfile.read import read
    from ckpt.containers.torchfile.tree import children, is_branch

    def holds_groups(value: object) -> bool:
        if isinstance(value, dict) and "param_groups" in value:
            return True
        return is_branch(value) and any(map(holds_groups, children(value)))

    try:
        return has_optimizer(open_checkpoint(file))
    except HalfError:  # only an optimizer
        return True
    except CkptError:
        try:
            return holds_groups(read(file).root)
        except CkptError:
            return False


def knows_optimizer(checkpoint: Checkpoint) -> bool:
    """Return True if optimizer states or hyperparameters were read, or were skipped for a known reason."""
    return bool(checkpoint.optimizer_states or checkpoint.state.param_groups or checkpoint.unread)


def _nothing_found(path: Path, format: str, tag: str | None, others: list[str]) -> CkptError:
    wanted = "checkpoint of a known format" if format == AUTO else f"{format} checkpoint"
    if tag is not None:
        wanted += f" with the tag {tag!r}"
    place = path if others else _run_here(path)
    for one in registry.all_formats() if not others else ():
        if one.name != format and one.reads:
            try:
                found = is_run(place, [one], tag)
            except CkptError:
                continue
            others += [one.name] if found else []
    if not others and (error := lost_weights(_step_named(path, tag)) or foreign(path)) is not None:
        return error
    hint = f"this looks like {' or '.join(others)}" if others else None
    said = {name: recorded_step(path / name) for name in RECORDS} if path.is_dir() and not others else {}
    if name := next(filter(said.get, said), None):
        hint = f"`{name}` says {said[name]!r}, and this step is missing: is the disk mounted, was the whole run copied?"
    if not others and _is_part(path):
        hint = f"this file belongs to the checkpoint in {path.parent}: give that folder"
    if archive := _archive(path):
        folder = archive.with_suffix("")
        hint = f"a .nemo file is a tar archive: `mkdir {folder} && tar -xf {archive} -C {folder}`, then give {folder}"
    if tag is None and not others and (inside := _checkpoints_inside(path, format)):
        hint = "several checkpoints are here, give one: " + ", ".join(inside[:8])
    if tag is not None and not others:
        run = run_at(path)
        names = [run.name(step.path) for step in run.steps]
        names.sort(key=lambda name: _without_digits(name) != _without_digits(tag))
        if models := models_of(_step_named(path, None)).values():
            hint = how_to_choose(models, with_tag=True)
        elif offered := list(islice((name for name in names if _opens(path, format, name)), 8)):
            hint = joined(" or ", (Message("{tag}", tag=name) for name in offered))
        elif inside := _checkpoints_inside(path, format):
            hint = Message("give one of the checkpoints here, without {tag}: ") + ", ".join(inside[:8])
    if hint is None and (deeper := _checkpoint_deeper(path)):
        hint = f"give the folder with one checkpoint, such as {deeper}"
    contents = None if others or not path.is_dir() else _contents(path)
    return NotFoundError(f"no {wanted} here", path=path, found=contents, hint=hint)


def _opens(path: Path, format: str, tag: str) -> bool:
    formats = [one for one in (registry.all_formats() if format == AUTO else registry.named(format)) if one.reads]
    try:
        return _opened(path, formats, tag, None) is not None
    except CkptError:
        return False


def _step_named(path: Path, tag: str | None) -> Path:
    run = run_at(path)
    steps = run.steps if tag is None else run.tagged(tag)
    return steps[0].path if steps else path if tag is None else confined(path, tag)


def _contents(folder: Path) -> str:
    run = run_at(folder)
    step = run.steps[0].path if run.steps and run.steps[0].path.is_dir() else folder
    entries = {name: entry for name, entry in entries_in(step).items() if not is_staged(step / name)}
    names = [f"{name}/" if is_folder(entry) else name for name, entry in entries.items()]
    more = f" and {len(names) - _MAX_SHOWN} more" if len(names) > _MAX_SHOWN else ""
    inside = f"{', '.join(names[:_MAX_SHOWN])}{more}" if names else "nothing"
    return f"{inside} in the step {run.name(step)}" if step != folder else inside if names else "an empty folder"


def _checkpoint_deeper(path: Path) -> Path | None:
    level = [path]
    for _ in range(_MAX_LEVELS):
        inside = [inner for folder in level for inner in searched_folders(folder) if not inner.name.startswith(".")]
        level = inside[:_MAX_ENTRIES]
        for folder in level:
            with suppress(CkptError):
                if is_run(folder):
                    return folder
    return None


def _archive(path: Path) -> Path | None:
    names = names_in(path) if path.is_dir() else []
    found = [path / name for name in names if name.endswith(".nemo")] or [path] * (path.suffix == ".nemo")
    return found[0] if len(found) == 1 and found[0].is_file() else None


def _without_digits(name: str) -> str:
    return re.sub(r"\d+", "", name)


def _run_here(path: Path) -> Path:
    try:
        return path if is_run(path) else run_below(path, is_run) or path
    except CkptError:
        return path


def _is_part(path: Path) -> bool:
    try:
        return path.is_file() and is_run(path.parent)
    except CkptError:  # damaged, but a checkpoint
        return True


def _checkpoints_inside(path: Path, format: str) -> list[str]:
    formats = [one for one in (registry.all_formats() if format == AUTO else registry.named(format)) if one.reads]
    places = [path, *(step.path for step in run_at(path).steps[:1] if step.path.is_dir())] if path.is_dir() else []
    every = [one for place in places for one in map(place.joinpath, names_in(place)) if not is_closed(one)]
    entries = [entry for entry in every if not OPTIMIZER_FILE.fullmatch(entry.name)][:_MAX_ENTRIES]
    found = [entry for entry in entries if is_run(entry, formats) and not is_staged(entry)]
    return [str(entry.relative_to(path)) for entry in found]


def _with_config(checkpoint: Checkpoint, path: Path, request: ReadRequest) -> Checkpoint:
    folders = [request.config] if request.config is not None else []
    folders += [f for folder in checkpoint.folders for f in enclosing_folders(Path(folder))]
    distinct = tuple(dict.fromkeys(folders))
    config = checkpoint.config or read_config(distinct)
    for step in () if config else map(Path, checkpoint.folders):
        if folder := hooks_folder(step, (fqn for fqn, _ in checkpoint.tensors)):
            distinct = (*distinct, folder)
            config = read_config([folder])
    namespace = checkpoint.namespace
    if namespace == OWN and config and config.get("model_type"):
        namespace = TRANSFORMERS
    given = Inputs((str(path),), None if request.config is None else str(request.config))
    found = replace(checkpoint, folders=tuple(map(str, distinct)), given=given, config=config, namespace=namespace)
    if namespace == TRANSFORMERS and (own := services.run_names.namespace_of(found)):
        found = replace(found, namespace=own)
    return with_computing_dtype(found)


def _check_used(checkpoint: Checkpoint, options: Mapping[str, Any]) -> None:
    for name in options.keys() - checkpoint.used_options:
        option = registry.options_for_reading()[name]
        raise UsageError(
            option.absent,
            path=checkpoint.path,
            expected=option.applies_to,
            found=checkpoint.framework or checkpoint.format,
            hint=Message("leave {} out", Keyword(name)),
        )


def with_folders_around(path: Path) -> Path:
    """Return the full path for `.` and `..`: readers look at the names of the folders around a step."""
    if path.name in ("", ".."):
        return Path(os.path.realpath(path))
    path = path if is_step(path) else link_target(path)
    parent = Path(os.path.realpath(path.parent)) if path.parent.name in ("", "..") else path.parent
    return parent / path.name if ANY_STEP.fullmatch(parent.name) else path


def find_config(where: str) -> Path:
    """Return the folder with a model's config, from a folder, a URL, a config.json, or a Hub id (cached files)."""
    path = placeholder_files.local(where)
    if where and path.is_dir():
        if any((path / name).exists() for name in (CONFIG, ADAPTER_CONFIG, _NEMO_CONTEXT)):
            return path
        inside = [str(one) for one in folders_in(path) if (one / CONFIG).is_file()]
        hint = Message("use {config}", config=inside[0]) if inside else "give the folder with the model's config.json"
        raise NotFoundError(f"this folder has no {CONFIG}", path=where, hint=hint)
    if path.is_file():
        return path.parent
    if from_hub.is_repository(where):
        return from_hub.fetched(where)
    expected = "a folder, a config.json or a Hub id like org/name"
    raise NotFoundError("no such config", path=where, expected=expected, hint=from_hub.unknown_hint(where))
