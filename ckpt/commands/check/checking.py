"""Completeness checks for `ckpt check` and run lists.

A checkpoint is whole if its format's reader can open it, every tensor's parts cover it exactly once, names and shapes
match the model's config, no file is missing, empty or truncated, and no unread file looks like training state.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Iterator
from contextlib import nullcontext, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

from ckpt.adapters import services as adapter_services
from ckpt.adapters.config import KINDS
from ckpt.adapters.names import ADAPTER_CONFIG, factor_faults
from ckpt.base.errors import (
    CkptError,
    CorruptError,
    IncompleteError,
    LossError,
    NotFoundError,
    SeveralModelsError,
    SeveralRunsError,
    printable,
)
from ckpt.base.flags import check_types
from ckpt.base.results import Returned
from ckpt.base.text import pluralize, show_size
from ckpt.commands.check.files import (
    DAMAGED,
    HALF,
    INCOMPLETE,
    LACKING,
    LEFT,
    NOT_READ,
    NOTED,
    UNKNOWN,
    UNPROVED,
    ComparedBytes,
    Problem,
    files_below,
    problem_of,
    read_all,
    relative,
    size_of,
)
from ckpt.commands.check.finding import ValueFinding, sentences
from ckpt.commands.check.step_files import step_problems
from ckpt.move.files import confined, is_staged, translate_os_errors
from ckpt.move.listing import listed_once, names_in
from ckpt.plan import registry, services
from ckpt.plan.checkpoint import OWN, Checkpoint, Format, ReadRequest
from ckpt.plan.namespace import OF_THE_MODEL
from ckpt.plan.tiling import damaged
from ckpt.runs.finding import free_tags, missing_models, models_of, number_of
from ckpt.runs.half_checkpoints import MODEL_FILE, check_holds_model, formats_of
from ckpt.runs.model_files import CONFIG
from ckpt.runs.opening import AUTO, is_run, open_checkpoint, with_folders_around
from ckpt.runs.recorded_precision import contradicting_records
from ckpt.runs.search import models_of_pipeline, run_below
from ckpt.runs.selection import has_model_part, is_stray
from ckpt.runs.source_checks import different_steps, empty_parameters, missing_states, step_mismatch
from ckpt.runs.step_checks import content_faults
from ckpt.runs.steps import (
    ANY_STEP,
    LATEST,
    LATEST_UNIVERSAL,
    TRACKER,
    TRAINER_STEP,
    folders_beside,
    is_closed,
    link_target,
    recorded_step,
    run_at,
    runs_inside,
    trainer_step,
)
from ckpt.runs.unread_files import STATE, list_unread, may_hold_tensors, stray_names
from ckpt.stores.placeholder_files import local

WHOLE = "whole"
HEADS = ("checkpoint", "format", "step", "size", "state")
_MANY_FILES = 1000  # per checkpoint, in a run's list
_MAX_SHOWN = 20  # damaged tensors per report
#: During a save: `tmp-checkpoint-3` (transformers before 4.40), `global_step3.tmp`, `step-3.orbax-checkpoint-tmp-0`.
_STAGING = re.compile(r"\.?tmp[-_.](?P<to_come>.+)|(?P<before>.+?)[._-](?:[\w-]+-)?tmp(?:[._-].*)?")
#: Megatron-LM's release checkpoints (megatron/training/checkpointing.py).
_RELEASE = "release"
#: DeepSpeed's default step name (runtime/engine.py, `save_checkpoint`).
_DEEPSPEED_STEP = re.compile(r"global_step\d+")


@dataclass(frozen=True, slots=True)
class Checked:
    """A checkpoint's problems. `path` is relative to the checked path.

    `format` is None if the checkpoint can't be read. `usable` names the readable part if files are missing. Unread
    files and tensors that only the config expects come last in `problems`: alone, they leave the checkpoint whole.
    """

    path: str
    format: str | None
    step: int | None
    num_files: int
    num_bytes: int
    problems: tuple[Problem, ...]
    usable: str | None = None
    findings: tuple[ValueFinding, ...] | None = None
    #: For each optimizer state that readers skip.
    skipped_states: tuple[str, ...] = ()
    #: Folders or files, if the save has several models.
    models: tuple[str, ...] = ()
    #: False if only the files say what tensors the model has.
    is_listed: bool = True

    @property
    def exit_code(self) -> int:
        """Exit code of the error that prevented a verdict, or 0."""
        return next((problem.exit_code for problem in self.problems if problem.kind == UNKNOWN), 0)

    @property
    def state(self) -> str:
        """`whole`, or the worst kind of problem."""
        kinds = {problem.kind for problem in self.problems}
        return next((kind for kind in (DAMAGED, INCOMPLETE, HALF, UNKNOWN, NOT_READ, UNPROVED) if kind in kinds), WHOLE)

    def row(self) -> tuple[str, ...]:
        more = f" (and {len(self.problems) - 1} more)" if len(self.problems) > 1 else ""
        state = printable(f"{self.state}: {self.problems[0]}{more}") if self.problems else WHOLE
        step = "" if self.step is None else str(self.step)
        return printable(self.path), self.format or "?", step, show_size(self.num_bytes), state

    def to_json(self) -> dict[str, Any]:
        return {
            "path": printable(self.path),
            "format": self.format,
            "usable": self.usable,
            "step": self.step,
            "files": self.num_files,
            "bytes": self.num_bytes,
            "state": self.state,
            "problems": [problem.to_json() for problem in self.problems],
            **({"skipped_states": list(map(printable, self.skipped_states))} if self.skipped_states else {}),
            **({"models": list(map(printable, self.models))} if self.models else {}),
            **({} if self.findings is None else {"values": [one.to_json() for one in self.findings]}),
        }


@dataclass(frozen=True, slots=True, repr=False)
class CheckReport(Returned):
    """A folder's checkpoints, newest first, and its own problems."""

    verdict: ClassVar[str] = ".whole"

    path: str
    checkpoints: tuple[Checked, ...]
    problems: tuple[Problem, ...]
    bytes: ComparedBytes | None = None

    def __repr__(self) -> str:
        whole = "whole" if self.whole else "not whole"
        return f"<{printable(self.path)}: {pluralize(len(self.checkpoints), 'checkpoint')}, {whole}>"

    @property
    def whole(self) -> bool:
        return not self.exit_code and all(one.state != UNPROVED for one in self.checkpoints)

    @property
    def exit_code(self) -> int:
        """0 if whole, 4 if not, or the exit code if an error prevented a verdict."""
        problems = [*self.problems, *(problem for one in self.checkpoints for problem in one.problems)]
        if any(problem.kind in (INCOMPLETE, DAMAGED, HALF, NOT_READ) for problem in problems):
            return CorruptError.exit_code
        return next((one.exit_code for one in self.checkpoints if one.exit_code), 0)

    def lines(self) -> Iterator[str]:
        for one in self.checkpoints:
            usable = f"usable as {one.usable}" if one.usable else "not readable"
            facts = [one.format or usable, *([] if one.step is None else [f"step {one.step}"])]
            facts += [f"models {' + '.join(one.models)}"] if one.models else []
            yield printable(
                f"{one.path}: {one.state} ({', '.join(facts)}, {show_size(one.num_bytes)} in "
                f"{pluralize(one.num_files, 'file')})"
            )
            yield from (printable(f"  - {problem}") for problem in one.problems)
            yield from (printable(f"  - note: not read: {sentence}") for sentence in one.skipped_states)
            yield from (f"  - note: {line}" for line in sentences(one.findings or ()))
        yield from (printable(f"- {problem}") for problem in self.problems)
        if self.bytes is not None:
            yield (
                f"{show_size(self.bytes.compared)} of records are as their checksums say; "
                f"{show_size(self.bytes.without)} were read and have none"
            )
        elif self.whole and not any(problem.kind == LACKING for one in self.checkpoints for problem in one.problems):
            read = all(one.findings is not None for one in self.checkpoints)
            how = "every value was read" if read else "bytes were not read (--bytes reads them)"
            is_listed = all(one.is_listed for one in self.checkpoints)
            what = " is there" if is_listed else " in the files is there; the model's tensors are not listed"
            yield f"every part of every tensor{what}{'; ' if is_listed else ', and '}{how}"

    def to_json(self) -> dict[str, Any]:
        found: dict[str, Any] = {
            "path": self.path,
            "whole": self.whole,
            "problems": [problem.to_json() for problem in self.problems],
            "checkpoints": [one.to_json() for one in self.checkpoints],
        }
        if self.bytes is not None:
            found["bytes"] = {"compared": self.bytes.compared, "without_checksum": self.bytes.without}
        return found


@check_types
def check(
    path: str | os.PathLike[str],
    format: str = AUTO,
    *,
    tag: str | None = None,
    every_byte: bool = False,
    values: bool = False,
    progress: Callable[[int], None] | None = None,
) -> CheckReport:
    """Check that the checkpoint at `path`, or each checkpoint in the run folder `path`, is whole.

    By default, no tensor data is read. With `values`, NaN and infinities are damage, and zeros, constants, equal
    experts, untrained adapters and tensors unchanged since the previous step are noted. Raises NotFoundError if nothing
    is there, UsageError for several runs.

    Args:
        path: The checkpoint or run folder.
        format: The format to read; `auto` finds it.
        tag: The step's folder or number; None for the latest.
        every_byte: Read all tensor data, and compare the checksums in torch's files and ckpt's manifest.
        values: Read every value and look for damage.
        progress: Called with the number of new bytes.
    """
    path = link_target(with_folders_around(local(path)))
    takes_long = every_byte or values  # a trainer may save or remove steps in the meantime
    with translate_os_errors(path), nullcontext() if takes_long else listed_once():
        run, places = (path, [_tagged(path, tag, format)]) if tag is not None else _run_of(path)
        count = ComparedBytes() if every_byte else None
        found = [_check_one(place, path, places, format, count, values, progress) for place in places]
        if len(found) == 1 and found[0].format is None and found[0].exit_code == NotFoundError.exit_code:
            open_checkpoint(path, format, tag=tag)  # raises the right error
        of_run = [] if tag is not None else _run_problems(run, places)
        named = [replace(one, where=str(run.relative_to(path) / one.where)) for one in of_run]
        named += _record_problems(path) if tag is None and run != path else []
        return CheckReport(str(path), tuple(found), tuple(named), count)


@listed_once()
def survey(path: Path, every: list[Path], limit: int | None = None) -> list[Checked]:
    """Check the first `limit` checkpoints. For very large ones, only count files."""
    with translate_os_errors(path):
        return [_uninspected(place, path, every) or _check_one(place, path, every, AUTO) for place in every[:limit]]


def _uninspected(place: Path, root: Path, every: list[Path]) -> Checked | None:
    files = files_below(place, [other for other in every if other != place])
    if len(files) <= _MANY_FILES:
        return None
    told = Problem(UNKNOWN, place.name, "it has too many files to be looked into here; `ckpt check` does")
    size = size_of(files)
    return Checked(str(place.relative_to(root)), None, trainer_step(place), len(files), size, (told,))


def expected_bytes(path: str | Path, tag: str | None = None) -> int:
    path = local(path)
    with translate_os_errors(path):
        return size_of(files_below(path if tag is None else _tagged(path, tag, AUTO)))


def checkpoints_of(path: Path) -> list[Path]:
    """Return the checkpoints in a run folder, newest first.

    `path` itself comes first if it is a checkpoint or has no steps. Raise SeveralRunsError for several runs.
    """
    return _run_of(path)[1]


def _run_of(path: Path) -> tuple[Path, list[Path]]:
    """Return the run at or below `path`, and its checkpoints."""
    if models_of(path):
        return path, [path]
    recorded = [path / name for name in _recorded(path).values() if (path / name).is_dir()]
    run = run_at(path)
    inside = list(
        dict.fromkeys([*run.last, *(step.path for step in run.steps), *recorded, *run.best, *free_tags(path)])
    )
    if TRAINER_STEP.fullmatch(path.absolute().name) or (not inside and has_model_part(path)):
        return path, [path]
    is_checkpoint = _is_checkpoint(path)
    parts = models_of_pipeline(path)
    below = None if inside or is_checkpoint or len(parts) > 1 else run_below(path, is_run)
    if below is not None:
        return _run_of(below)
    own = [path, *inside] if is_checkpoint or parts else inside or [path]
    return path, [*own, *(place for one in runs_inside(path) if _may_be_run(one) for place in _run_of(one)[1])]


def _may_be_run(path: Path) -> bool:
    try:
        return is_run(path)
    except CkptError:  # opening it reports the error
        return True


def _is_checkpoint(path: Path) -> bool:
    return any(not _is_stray(one, path) for one in formats_of(path))


def _is_stray(one: Format, place: Path) -> bool:
    try:
        return bool(stray_names(place)) and is_stray(one.read(place, ReadRequest()))
    except CkptError:  # opening it reports the error
        return False


def _tagged(path: Path, tag: str, format: str) -> Path:
    if path.is_dir() and tag:
        named, steps = confined(path, tag), run_at(path).tagged(tag)
        if named != path and (named.is_dir() or steps):
            return named if named.is_dir() else steps[0].path
    return Path(open_checkpoint(path, format, tag=tag).path)


def _recorded(path: Path) -> dict[str, str]:
    """Return the tags in `latest` and similar files. A tracker counts if it names a release."""
    names = {name: recorded_step(path / name) for name in (LATEST, LATEST_UNIVERSAL)}
    if recorded_step(path / TRACKER) == _RELEASE:
        names[TRACKER] = _RELEASE
    return {name: tag for name, tag in names.items() if tag and "/" not in tag and "\0" not in tag and tag != ".."}


def _record_problems(path: Path) -> Iterator[Problem]:
    recorded = _recorded(path)
    for name in (LATEST, LATEST_UNIVERSAL, TRACKER):
        said = recorded_step(path / name)
        if said == "" and (path / name).is_file():
            yield Problem(INCOMPLETE, name, "the file is empty")
        elif said == "":
            yield Problem(DAMAGED, name, "it is not a file")
        elif said and (not said.isdecimal() and said != _RELEASE if name == TRACKER else name not in recorded):
            yield Problem(DAMAGED, name, f"it names no step: {said[:40]!r}")
    for name, tag in recorded.items():
        if not (path / tag).exists():
            yield Problem(INCOMPLETE, name, f"it names {tag}, but {tag} is missing")


def _run_problems(path: Path, places: list[Path]) -> Iterator[Problem]:
    yield from _record_problems(path)
    if (
        path not in places
        and any(_DEEPSPEED_STEP.fullmatch(place.name) for place in places)
        and not (path / LATEST).is_file()
    ):
        yield Problem(INCOMPLETE, LATEST, "missing; DeepSpeed writes it last, and without it loads no step by itself")
    step = recorded_step(path / TRACKER)
    numbers = {int("".join(filter(str.isdigit, place.name)) or -1) for place in places}
    if step is not None and step.isdecimal() and int(step) not in numbers:
        yield Problem(INCOMPLETE, TRACKER, f"it names step {step}, but step {step} is missing")
    for name in names_in(path) if path.is_dir() else ():
        if _is_being_written(path / name):
            yield Problem(INCOMPLETE, name, "it was being written: it never got its name")
    run = run_at(path)
    for folder in folders_beside(run) if run.steps else ():
        if folder not in places and any(map(MODEL_FILE.fullmatch, names_in(folder))):
            yield Problem(LEFT, run.name(folder), "a model next to the steps, not checked with them")
    for folder in map(path.joinpath, names_in(path) if path.is_dir() and path not in places else ()):
        if folder not in places and is_closed(folder):
            yield Problem(LEFT, folder.name, "not looked into: the folder can't be listed")


def _is_being_written(place: Path) -> bool:
    found = _STAGING.fullmatch(place.name)
    if found is None or not place.is_dir() or is_staged(place):
        return False
    return ANY_STEP.fullmatch(found["to_come"] or found["before"]) is not None or may_hold_tensors(place)


@listed_once()
def _check_one(
    place: Path,
    root: Path,
    every: list[Path],
    format: str,
    count: ComparedBytes | None = None,
    values: bool = False,
    progress: Callable[[int], None] | None = None,
) -> Checked:
    others = [other for other in every if other != place]
    files = files_below(place, others)
    problems: list[Problem] = []
    usable = None
    opened: list[Checkpoint] = []
    waiting: list[tuple[Path, str | None]] = [(model, None) for model in models_of(place).values() or [place]]
    is_every_model_open = True
    models: list[Path] = []
    while waiting:
        model, tag = waiting.pop(0)
        own = _own_formats(model, format, others)
        try:
            if place != root and _DEEPSPEED_STEP.fullmatch(place.name):  # its files belong to the run around it
                confined(root, str(place.relative_to(root)))
            opened.append(one := open_checkpoint(model, next(own, format), tag=tag))
            check_holds_model(one)
            for problems_in in (_damaged_tensors, _mixed_save_problems, _empty, _quantized, _adapter):
                problems += _in_model(problems_in(one), one, place, models)
        except CkptError as error:
            if isinstance(error, SeveralModelsError) and tag is None and error.tags:
                waiting += [(model, key) for key in error.tags]
                continue
            if isinstance(error, SeveralRunsError) and model == place:
                models = list(map(Path, error.runs))
                waiting += [(one, None) for one in models]
                continue
            is_every_model_open = False
            is_missing = model in models and isinstance(error, NotFoundError)
            problem = problem_of(error, place)
            problems.append(replace(problem, kind=INCOMPLETE) if is_missing else problem)
            if isinstance(error, IncompleteError):
                usable = next(_read_alone(model, own), None)
    problems += [
        Problem(INCOMPLETE, name, "missing; a later model of the save is here") for name in missing_models(place)
    ]
    checkpoint = _together(opened, place) if is_every_model_open else None
    problems += step_problems(place, root, files, opened, checkpoint)
    if number_of(place) is not None:  # the optimizer and other ranks' files are next to it
        files += {Path(file.path): None for one in opened for file in one.files if Path(file.path) not in files}
    if count is not None:
        problems += read_all(place, files, count, progress or (lambda _: None))
        problems += _differing_from_manifest(place)
    if checkpoint is not None:
        problems += _unread_findings(checkpoint, place, of_run=place == every[0])
    for one in opened:
        if one.missing_optimizer is not None:
            problems.append(Problem(INCOMPLETE, "optimizer", one.missing_optimizer))
        if one.lost_weights:
            problems += _in_model([Problem(INCOMPLETE, "weights", one.lost_weights)], one, place, models)
        problems += _in_model(_against_config(one), one, place, models)
        problems += _in_model(_missing_content(one), one, place, models)
    found = [one for model in opened for one in _findings(model, place, every, problems, progress)] if values else None
    told: dict[str, Problem] = {}
    # report the reader's problem first
    for problem in sorted(problems, key=lambda problem: problem.kind in (LEFT, LACKING, NOTED)):
        told.setdefault(problem.where, problem)
    return Checked(
        str(place.relative_to(root)) if place != root else str(root),
        checkpoint.format if checkpoint is not None else None,
        checkpoint.state.step if checkpoint is not None else trainer_step(place) if place.is_dir() else None,
        len(files),
        size_of(files),
        tuple(told.values()),
        usable,
        None if found is None or not opened else tuple(found),
        tuple(dict.fromkeys(sentence for one in opened for sentence in one.unread)),
        tuple(relative(one, place) for one in models),
        all(map(_is_listed, opened)),
    )


def _in_model(
    problems: Iterable[Problem], checkpoint: Checkpoint, place: Path, models: list[Path]
) -> Iterator[Problem]:
    """Yield problems with the model's name if the save has several."""
    model = next((one for one in models if Path(checkpoint.path).is_relative_to(one)), None)
    for one in problems:
        yield one if model is None else replace(one, where=f"{relative(model, place)}: {one.where}")


def _together(models: list[Checkpoint], place: Path) -> Checkpoint:
    if len(models) == 1:
        return models[0]
    files = {file.path: file for one in models for file in one.files}
    return replace(models[0], path=str(place), files=tuple(files.values()))


def _findings(
    checkpoint: Checkpoint,
    place: Path,
    every: list[Path],
    problems: list[Problem],
    progress: Callable[[int], None] | None,
) -> list[ValueFinding]:
    from ckpt.commands.check.findings import findings  # imports numpy; header checks don't need it

    try:
        found = findings(checkpoint, _step_before(checkpoint, place, every), progress)
    except CkptError as error:
        problems.append(problem_of(error, place))
        return []
    damage = [one for one in found if one.is_damage]
    problems += [Problem(DAMAGED, one.where, one.what) for one in damage[:_MAX_SHOWN]]
    if (more := len(damage) - _MAX_SHOWN) > 0:
        problems.append(
            Problem(DAMAGED, f"{pluralize(more, 'further tensor')}", "NaN, infinite or contradicting values")
        )
    return found


def _step_before(checkpoint: Checkpoint, place: Path, every: list[Path]) -> Checkpoint | None:
    steps = every if place in every[:-1] else [step.path for step in run_at(place.parent).steps]
    earlier = steps[steps.index(place) + 1 :] if place in steps else []
    for other in earlier[:1]:
        with suppress(CkptError):
            before = open_checkpoint(other, checkpoint.format)
            is_same_step = before.state.step is not None and before.state.step == checkpoint.state.step
            return None if is_same_step else before
    return None


def _own_formats(place: Path, format: str, others: list[Path]) -> Iterator[str]:
    below = [other for other in others if other.is_relative_to(place)]
    is_first = True
    for one in registry.all_formats():
        if one.reads and format in (AUTO, one.name):
            try:
                found = one.find(place, None)
            except CkptError:  # damaged: opening it reports the error
                found = place
            if found == place and _is_stray(one, place):
                continue
            if found is not None:
                if not any(found.is_relative_to(other) for other in below):
                    yield format if is_first else one.name
                is_first = False


def _read_alone(place: Path, formats: Iterator[str]) -> Iterator[str]:
    for name in formats:
        with suppress(CkptError):
            open_checkpoint(place, name)
            yield name if registry.get(name).carries_optimizer else f"{name}, without an optimizer"


def _unread_findings(checkpoint: Checkpoint, place: Path, *, of_run: bool) -> Iterator[Problem]:
    for one in list_unread(checkpoint):
        path = Path(os.path.normpath(Path(checkpoint.path) / one.name))
        is_within = path.is_relative_to(place)
        if is_within or of_run:
            where = relative(path, place) if is_within else os.path.relpath(path, place)
            yield Problem(NOT_READ if one.kind == STATE else LEFT, where, f"not read: {one.why}")


def _differing_from_manifest(place: Path) -> list[Problem]:
    from ckpt.compare import manifest

    if not (place / manifest.MANIFEST).is_file():
        return []
    found = manifest.check(place)
    return [Problem(DAMAGED, manifest.MANIFEST, what) for what in found.problems]


def _damaged_tensors(checkpoint: Checkpoint) -> Iterator[Problem]:
    found = list(damaged(checkpoint.tensors.values()))
    for one in found[:_MAX_SHOWN]:
        yield Problem(DAMAGED, f"{one.fqn} ({one.role})", "; ".join(one.faults[:4]))
    if len(found) > _MAX_SHOWN:
        yield Problem(
            DAMAGED, f"{pluralize(len(found) - _MAX_SHOWN, 'further tensor')}", "their parts do not make them up"
        )


def _mixed_save_problems(checkpoint: Checkpoint) -> Iterator[Problem]:
    """Yield problems if folder name, model and optimizer disagree on the step."""
    if what := different_steps(checkpoint):
        yield Problem(LACKING, "optimizer", f"{what} The optimizer may have been reset")
    if told := step_mismatch(checkpoint):
        yield Problem(UNKNOWN, Path(checkpoint.path).name, told, CorruptError.exit_code)


def _empty(checkpoint: Checkpoint) -> Iterator[Problem]:
    if checkpoint.unmapped_optimizer:
        yield Problem(LACKING, "optimizer", checkpoint.unmapped_optimizer)
    states, is_all = missing_states(checkpoint)
    if states and is_all:
        yield Problem(UNKNOWN, "optimizer", states, CorruptError.exit_code)
    if parameters := empty_parameters(checkpoint):
        yield Problem(LACKING, "parameters", parameters)
    if states and not is_all:
        yield Problem(LACKING, "optimizer", states)


def _quantized(checkpoint: Checkpoint) -> Iterator[Problem]:
    weights = services.quantization.quantized_weights(checkpoint)
    for fault in weights.faults[:_MAX_SHOWN]:
        yield Problem(INCOMPLETE if fault.is_missing else DAMAGED, fault.fqn, fault.what)
    if (more := len(weights.faults) - _MAX_SHOWN) > 0:
        yield Problem(
            DAMAGED, f"{pluralize(more, 'further part')} of quantized weights", "missing, unexpected or misshapen"
        )
    if weights.unproved:
        yield Problem(UNPROVED, "quantized weights", weights.unproved)
    if found := contradicting_records(checkpoint.config, checkpoint.folders):
        record, key, value, of_config = found
        yield Problem(DAMAGED, record.file, f"{key} is {value}, but {of_config} in {CONFIG}")


def _adapter(checkpoint: Checkpoint) -> Iterator[Problem]:
    for module, fault in factor_faults(checkpoint.shapes):
        yield Problem(DAMAGED, module, fault)
    if not checkpoint.is_adapter or checkpoint.namespace != OWN:
        return
    try:
        config = adapter_services.settings.adapter_settings(checkpoint)
    except CorruptError as error:
        yield problem_of(error, Path(checkpoint.path))
        return
    except NotFoundError:  # a conversion reports the missing config
        return
    except CkptError as error:
        one = problem_of(error, Path(checkpoint.path))
        yield replace(one, kind=UNPROVED if isinstance(error, LossError) else LEFT, exit_code=0)
        return
    if config.kind not in KINDS:
        what = f"ckpt does not know the kind {config.kind}, so its settings and weights were not checked"
        yield Problem(UNPROVED, ADAPTER_CONFIG, what)
    differences, missing = adapter_services.settings.adapter_differences(checkpoint, config)
    for what in differences:
        yield Problem(LEFT, ADAPTER_CONFIG, what)
    if missing:
        names = ", ".join(missing)
        what = f"modules_to_save names {names}, and the file has no tensor of it: merge-lora checks if the base has it"
        yield Problem(UNPROVED, ADAPTER_CONFIG, what)


def _missing_content(checkpoint: Checkpoint) -> Iterator[Problem]:
    for where, what, is_needed in content_faults(checkpoint):
        yield Problem({True: INCOMPLETE, False: LACKING, None: UNPROVED}[is_needed], where, what)


def _is_listed(checkpoint: Checkpoint) -> bool:
    if checkpoint.is_adapter:
        return True
    if checkpoint.namespace not in OF_THE_MODEL:
        is_known = registry.namespace(checkpoint.namespace).tells(checkpoint)
        return is_known or "model_type" in (checkpoint.config or {})
    return registry.get(checkpoint.format).records_shapes or services.expected.has_list(checkpoint.config)


def _against_config(checkpoint: Checkpoint) -> Iterator[Problem]:
    if checkpoint.namespace in OF_THE_MODEL or checkpoint.is_adapter:
        return
    namespace = registry.namespace(checkpoint.namespace)
    if not (checkpoint.config or {}).get("model_type"):
        if not namespace.tells(checkpoint):
            what = "missing, and the run does not record the model's tensors and shapes"
            yield Problem(LEFT, CONFIG, what)
        return
    try:
        namespace.to_hub(checkpoint)
    except CorruptError as error:
        yield replace(problem_of(error, Path(checkpoint.path)), where=error.fqn or CONFIG)
    except CkptError as error:
        yield Problem(LEFT, CONFIG, f"names and shapes were not compared with it: {error.what}")
