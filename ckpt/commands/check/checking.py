"""Whether checkpoints are whole: `ckpt check`, and the list of a run's checkpoints.

A checkpoint is whole where its format's reader describes it, the parts of every tensor make it up exactly once, a
config of its architecture tells of no other names and shapes, no file beside it is missing, empty or cut off
(`ckpt.commands.check.files`), and none that looks like training state was left unread (`ckpt.runs.not_read`).
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
from ckpt.adapters.config import CONFIG as ADAPTER_CONFIG
from ckpt.adapters.config import KINDS
from ckpt.base.errors import (
    CkptError,
    CorruptError,
    IncompleteError,
    LossError,
    NotFoundError,
    SeveralModelsError,
    printable,
)
from ckpt.base.returned import Returned
from ckpt.base.sizes import show_size
from ckpt.base.text import counted
from ckpt.base.typed import typed
from ckpt.commands.check.files import (
    DAMAGED,
    HALF,
    INCOMPLETE,
    LACKING,
    LEFT,
    NOT_READ,
    UNKNOWN,
    UNPROVED,
    ComparedBytes,
    Problem,
    files_below,
    problem_of,
    problems_of,
    read_all,
    relative,
    size_of,
)
from ckpt.commands.check.finding import ValueFinding, sentences
from ckpt.move.files import confined, is_staged, translate_os_errors
from ckpt.move.listing import listed_once, names_in
from ckpt.plan import registry, services
from ckpt.plan.checkpoint import HUB, OWN, Checkpoint, Format, ReadRequest
from ckpt.plan.namespace import OF_THE_MODEL
from ckpt.plan.tiling import damaged
from ckpt.runs.choosing import has_model_part, is_stray
from ckpt.runs.emptiness import empty_parameters, lacking_states
from ckpt.runs.halves import check_holds_model, formats_of
from ckpt.runs.model_files import CONFIG
from ckpt.runs.models import free_tags, missing_models, models_of, number_of
from ckpt.runs.not_read import STATE, may_hold_tensors, not_read, stray_names
from ckpt.runs.one_save import different_steps
from ckpt.runs.opening import AUTO, has_optimizer, is_run, open_checkpoint
from ckpt.runs.search import run_below
from ckpt.runs.steps import (
    ANY_STEP,
    LATEST,
    LATEST_UNIVERSAL,
    TRACKER,
    TRAINER_STATE,
    TRAINER_STEP,
    missing_last_of_megatron,
    of_another_step,
    one_with_state,
    recorded_step,
    run_at,
    trainer_step,
)
from ckpt.runs.trainer_files import carried_files
from ckpt.stores.places import local

WHOLE = "whole"
HEADS = ("checkpoint", "format", "step", "size", "state")
_MANY_FILES = 1000  # of one checkpoint, in the list of all of a run
_MAX_SHOWN = 20  # tensors whose parts do not make them up
#: Names of folders that are being written, around the name to come: `tmp-checkpoint-3` (transformers before 4.40),
#: `global_step3.tmp`, `step-3.orbax-checkpoint-tmp-0`.
_STAGING = re.compile(r"\.?tmp[-_.](?P<to_come>.+)|(?P<before>.+?)[._-](?:[\w-]+-)?tmp(?:[._-].*)?")
#: What Megatron-LM's tracker says of a model that is given away (megatron/training/checkpointing.py).
_RELEASE = "release"
#: DeepSpeed's own name of a step (runtime/engine.py, `save_checkpoint`).
_DEEPSPEED_STEP = re.compile(r"global_step\d+")


@dataclass(frozen=True, slots=True)
class Checked:
    """One checkpoint of a run: `path` relative to what was asked about, and what is wrong with it.

    `format` is None where it cannot be read; `usable` is what still can be read where files are missing.  Files that
    were not looked into, and what the config promises and no file has, stand last in `problems`; with these alone it is
    whole.
    """

    path: str
    format: str | None
    step: int | None
    num_files: int
    num_bytes: int
    problems: tuple[Problem, ...]
    usable: str | None = None
    findings: tuple[ValueFinding, ...] | None = None

    @property
    def exit_code(self) -> int:
        """The exit code of the first error that left it open whether the checkpoint is whole; 0 if there was none."""
        return next((problem.exit_code for problem in self.problems if problem.kind == UNKNOWN), 0)

    @property
    def state(self) -> str:
        """`whole`, or the worst of the problems' kinds."""
        kinds = {problem.kind for problem in self.problems}
        return next((kind for kind in (DAMAGED, INCOMPLETE, HALF, UNKNOWN, NOT_READ, UNPROVED) if kind in kinds), WHOLE)

    def row(self) -> tuple[str, ...]:
        """The cells under `HEADS`."""
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
            **({} if self.findings is None else {"values": [one.to_json() for one in self.findings]}),
        }


@dataclass(frozen=True, slots=True, repr=False)
class CheckReport(Returned):
    """All checkpoints of a folder, the newest first, and what is wrong with the folder itself."""

    verdict: ClassVar[str] = ".whole"

    path: str
    checkpoints: tuple[Checked, ...]
    problems: tuple[Problem, ...]
    bytes: ComparedBytes | None = None

    def __repr__(self) -> str:
        whole = "whole" if self.whole else "not whole"
        return f"<{printable(self.path)}: {counted(len(self.checkpoints), 'checkpoint')}, {whole}>"

    @property
    def whole(self) -> bool:
        return not self.exit_code and all(one.state != UNPROVED for one in self.checkpoints)

    @property
    def exit_code(self) -> int:
        """0 where all is whole, 4 where something is not; otherwise that of what cannot be told."""
        problems = [*self.problems, *(problem for one in self.checkpoints for problem in one.problems)]
        if any(problem.kind in (INCOMPLETE, DAMAGED, HALF, NOT_READ) for problem in problems):
            return CorruptError.exit_code
        return next((one.exit_code for one in self.checkpoints if one.exit_code), 0)

    def lines(self) -> Iterator[str]:
        for one in self.checkpoints:
            usable = f"usable as {one.usable}" if one.usable else "not readable"
            facts = [one.format or usable, *([] if one.step is None else [f"step {one.step}"])]
            yield printable(
                f"{one.path}: {one.state} ({', '.join(facts)}, {show_size(one.num_bytes)} in "
                f"{counted(one.num_files, 'file')})"
            )
            yield from (printable(f"  - {problem}") for problem in one.problems)
            yield from (f"  - note: {line}" for line in sentences(one.findings or ()))
        yield from (printable(f"- {problem}") for problem in self.problems)
        if self.bytes is not None:
            yield (
                f"{show_size(self.bytes.compared)} of records are as their checksums say; "
                f"{show_size(self.bytes.without)} were read and have none"
            )
        elif self.whole and not any(problem.kind == LACKING for one in self.checkpoints for problem in one.problems):
            read = all(one.findings is not None for one in self.checkpoints)
            unread = "bytes were not read (--bytes reads them)"
            yield f"every part of every tensor is there; {'every value was read' if read else unread}"

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


@typed
def check(
    path: str | os.PathLike[str],
    format: str = AUTO,
    *,
    tag: str | None = None,
    every_byte: bool = False,
    values: bool = False,
    progress: Callable[[int], None] | None = None,
) -> CheckReport:
    """Look whether the checkpoint at `path` is whole, or each of those of the run folder `path`; `tag` names one.

    Tensor data is read where `every_byte` is asked for: then checksums in torch's files and ckpt's manifest are
    compared too.  `values` reads every value: NaN and infinities are damage; zeros, constants, equal experts, tensors
    that did not change since the step before and untrained adapters are noted.  `progress` is told of bytes.  Raises
    NotFoundError where there is nothing, UsageError for several runs.

    Args:
        path: The checkpoint or run folder.
        format: The format to read; `auto` finds it.
        tag: The step's folder or number; None for the latest.
        every_byte: Read all tensor data and compare checksums.
        values: Read every value and look for damage.
        progress: Called with the number of bytes since the last call.
    """
    path = local(path)
    takes_long = every_byte or values  # a trainer may save or remove steps meanwhile
    with translate_os_errors(path), nullcontext() if takes_long else listed_once():
        run, places = (path, [_tagged(path, tag, format)]) if tag is not None else _run_of(path)
        count = ComparedBytes() if every_byte else None
        found = [_check_one(place, path, places, format, count, values, progress) for place in places]
        if len(found) == 1 and found[0].format is None and found[0].exit_code == NotFoundError.exit_code:
            open_checkpoint(path, format, tag=tag)  # raises what says so
        of_run = [] if tag is not None else _run_problems(run, places)
        named = [replace(one, where=str(run.relative_to(path) / one.where)) for one in of_run]
        return CheckReport(str(path), tuple(found), tuple(named), count)


@listed_once()
def survey(path: Path, every: list[Path], limit: int | None = None) -> list[Checked]:
    """What the first `limit` of all checkpoints in `path` are; those of very many files are counted alone."""
    with translate_os_errors(path):
        return [_counted(place, path, every) or _check_one(place, path, every, AUTO) for place in every[:limit]]


def _counted(place: Path, root: Path, every: list[Path]) -> Checked | None:
    files = files_below(place, [other for other in every if other != place])
    if len(files) <= _MANY_FILES:
        return None
    told = Problem(UNKNOWN, place.name, "it has too many files to be looked into here; `ckpt check` does")
    size = size_of(files)
    return Checked(str(place.relative_to(root)), None, trainer_step(place), len(files), size, (told,))


def expected_bytes(path: str | Path, tag: str | None = None) -> int:
    """Bytes of all files that `check` looks at."""
    path = local(path)
    with translate_os_errors(path):
        return size_of(files_below(path if tag is None else _tagged(path, tag, AUTO)))


def checkpoints_of(path: Path) -> list[Path]:
    """The checkpoints in a run folder, the newest first; `path` itself where it is one, or holds none.

    Steps are known by their names and not opened; a `checkpoint-N` is one, whatever is in it.  Raises SeveralRunsError
    for the folder of several runs.
    """
    return _run_of(path)[1]


def _run_of(path: Path) -> tuple[Path, list[Path]]:
    """Return the run folder that `path` is or holds alone, and the checkpoints in it."""
    if models_of(path):
        return path, [path]
    recorded = [path / name for name in _recorded(path).values() if (path / name).is_dir()]
    run = run_at(path)
    inside = list(dict.fromkeys([*run.last, *(step.path for step in run.steps), *recorded, *free_tags(path)]))
    if TRAINER_STEP.fullmatch(path.absolute().name) or (not inside and has_model_part(path)):
        return path, [path]
    if _is_checkpoint(path):
        return path, [path, *inside]
    below = None if inside else run_below(path, is_run)
    return (path, inside or [path]) if below is None else _run_of(below)


def _is_checkpoint(path: Path) -> bool:
    """Whether the files of a folder itself are a checkpoint, and not those of a step in it."""
    return any(not _is_stray(one, path) for one in formats_of(path))


def _is_stray(one: Format, place: Path) -> bool:
    try:
        return bool(stray_names(place)) and is_stray(one.read(place, ReadRequest()))
    except CkptError:  # opening it will report that
        return False


def _tagged(path: Path, tag: str, format: str) -> Path:
    """Return the folder of the step `tag` in `path`, or in a step or a run there, as for every command."""
    if path.is_dir() and tag:
        named, steps = confined(path, tag), run_at(path).tagged(tag)
        if named != path and (named.is_dir() or steps):
            return named if named.is_dir() else steps[0].path
    return Path(open_checkpoint(path, format, tag=tag).path)


def _recorded(path: Path) -> dict[str, str]:
    """What `latest` and its like name, by the file that does; of a tracker the folder without a number."""
    names = {name: recorded_step(path / name) for name in (LATEST, LATEST_UNIVERSAL)}
    if recorded_step(path / TRACKER) == _RELEASE:
        names[TRACKER] = _RELEASE
    return {name: tag for name, tag in names.items() if tag and "/" not in tag and "\0" not in tag and tag != ".."}


def _run_problems(path: Path, places: list[Path]) -> Iterator[Problem]:
    """What is wrong with the record of which step is meant, and steps that never got their name."""
    recorded = _recorded(path)
    for name in (LATEST, LATEST_UNIVERSAL, TRACKER):
        said = recorded_step(path / name)
        if said == "" and (path / name).is_file():
            yield Problem(INCOMPLETE, name, "the file is empty")
        elif said == "":
            yield Problem(DAMAGED, name, "it is no file")
        elif said and (not said.isdecimal() and said != _RELEASE if name == TRACKER else name not in recorded):
            yield Problem(DAMAGED, name, f"it names no step: {said[:40]!r}")
    for name, tag in recorded.items():
        if not (path / tag).exists():
            yield Problem(INCOMPLETE, name, f"it names {tag}, which is not there")
    if (
        path not in places
        and any(_DEEPSPEED_STEP.fullmatch(place.name) for place in places)
        and not (path / LATEST).is_file()
    ):
        yield Problem(INCOMPLETE, LATEST, "missing; DeepSpeed writes it last, and without it loads no step by itself")
    step = recorded_step(path / TRACKER)
    numbers = {int("".join(filter(str.isdigit, place.name)) or -1) for place in places}
    if step is not None and step.isdecimal() and int(step) not in numbers:
        yield Problem(INCOMPLETE, TRACKER, f"it names step {step}, which is not there")
    for name in names_in(path) if path.is_dir() else ():
        if _is_being_written(path / name):
            yield Problem(INCOMPLETE, name, "it was being written: it never got its name")


def _is_being_written(place: Path) -> bool:
    """Return True if a folder has a temporary name, and that of a step or a file that may hold tensors in it."""
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
    while waiting:
        model, tag = waiting.pop(0)
        own = _own_formats(model, format, others)
        try:
            if place != root and _DEEPSPEED_STEP.fullmatch(place.name):  # its files are the run's, in which it lies
                confined(root, str(place.relative_to(root)))
            opened.append(one := open_checkpoint(model, next(own, format), tag=tag))
            check_holds_model(one)
            problems += _damaged_tensors(one)
            problems += _of_two_saves(one)
            problems += _empty(one)
            problems += _quantized(one)
            problems += _adapter(one)
        except CkptError as error:
            if isinstance(error, SeveralModelsError) and tag is None and error.tags:
                waiting += [(model, key) for key in error.tags]
                continue
            is_every_model_open = False
            problems.append(problem_of(error, place))
            if isinstance(error, IncompleteError):
                usable = next(_read_alone(model, own), None)
    problems += [
        Problem(INCOMPLETE, name, "missing; a later model of the save is here") for name in missing_models(place)
    ]
    checkpoint = _together(opened, place) if is_every_model_open else None
    problems += problems_of(place, files, {file.path for one in opened for file in one.files})
    problems += _damaged_beside(root, files, opened)
    if number_of(place) is not None:  # the optimizer and the files of other ranks are next to it
        files += {Path(file.path): None for one in opened for file in one.files if Path(file.path) not in files}
    problems += _lacking_beside(place, checkpoint)
    if count is not None:
        problems += read_all(place, files, count, progress or (lambda _: None))
        problems += _differing_from_manifest(place)
    if checkpoint is not None:
        problems += _not_read(checkpoint, place, of_run=place == every[0])
    for one in opened:
        if one.missing_optimizer is not None:
            problems.append(Problem(INCOMPLETE, "optimizer", one.missing_optimizer))
        problems += _against_config(one)
        problems += _lacking(one)
    found = [one for model in opened for one in _findings(model, place, every, problems, progress)] if values else None
    told: dict[str, Problem] = {}
    # the reader's own problem with a file comes before a second one about the same file
    for problem in sorted(problems, key=lambda problem: problem.kind in (LEFT, LACKING)):
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
    )


def _together(models: list[Checkpoint], place: Path) -> Checkpoint:
    """Return the only model of a save, or the first of several with the files of all."""
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
    """Read every value; add what makes the model wrong to `problems`."""
    from ckpt.commands.check.findings import findings  # it takes numpy, which looking at headers does not

    try:
        found = findings(checkpoint, _step_before(checkpoint, place, every), progress)
    except CkptError as error:
        problems.append(problem_of(error, place))
        return []
    damage = [one for one in found if one.is_damage]
    problems += [Problem(DAMAGED, one.where, one.what) for one in damage[:_MAX_SHOWN]]
    if (more := len(damage) - _MAX_SHOWN) > 0:
        problems.append(Problem(DAMAGED, f"{counted(more, 'further tensor')}", "NaN, infinite or contradicting values"))
    return found


def _step_before(checkpoint: Checkpoint, place: Path, every: list[Path]) -> Checkpoint | None:
    """Return the checkpoint of the step before `place` in its run, if it can be read."""
    steps = every if place in every[:-1] else [step.path for step in run_at(place.parent).steps]
    earlier = steps[steps.index(place) + 1 :] if place in steps else []
    for other in earlier[:1]:
        with suppress(CkptError):
            before = open_checkpoint(other, checkpoint.format)
            is_same_step = before.state.step is not None and before.state.step == checkpoint.state.step
            return None if is_same_step else before
    return None


def _own_formats(place: Path, format: str, others: list[Path]) -> Iterator[str]:
    """Formats to open `place` by so that none of the `others` is opened, which may lie below it."""
    below = [other for other in others if other.is_relative_to(place)]
    is_first = True
    for one in registry.all_formats():
        if one.reads and format in (AUTO, one.name):
            try:
                found = one.find(place, None)
            except CkptError:  # of this format, and damaged: opening it will report that
                found = place
            if found == place and _is_stray(one, place):
                continue
            if found is not None:
                if not any(found.is_relative_to(other) for other in below):
                    yield format if is_first else one.name
                is_first = False


def _read_alone(place: Path, formats: Iterator[str]) -> Iterator[str]:
    """The formats that can be read in a folder of which something else is missing, and what they do not hold."""
    for name in formats:
        with suppress(CkptError):
            open_checkpoint(place, name)
            yield name if registry.get(name).carries_optimizer else f"{name}, without an optimizer"


def _not_read(checkpoint: Checkpoint, place: Path, *, of_run: bool) -> Iterator[Problem]:
    """Yield files in and next to the checkpoint's folder that no reader opened; those of its run only if `of_run`."""
    for one in not_read(checkpoint):
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
    """Tensors whose parts do not make them up exactly once."""
    found = list(damaged(checkpoint.tensors.values()))
    for one in found[:_MAX_SHOWN]:
        yield Problem(DAMAGED, f"{one.fqn} ({one.role})", "; ".join(one.faults[:4]))
    if len(found) > _MAX_SHOWN:
        yield Problem(
            DAMAGED, f"{counted(len(found) - _MAX_SHOWN, 'further tensor')}", "their parts do not make them up"
        )


def _of_two_saves(checkpoint: Checkpoint) -> Iterator[Problem]:
    """Report a folder that is named for another step, and a model and an optimizer that count different steps."""
    if what := different_steps(checkpoint):
        yield Problem(LACKING, "optimizer", f"{what} It may have begun anew")
    if told := of_another_step(Path(checkpoint.path), checkpoint.state.step):
        yield Problem(UNKNOWN, Path(checkpoint.path).name, told, CorruptError.exit_code)


def _empty(checkpoint: Checkpoint) -> Iterator[Problem]:
    """Report parameters without elements, and an optimizer that lacks states."""
    states, is_all = lacking_states(checkpoint)
    if states and is_all:
        yield Problem(UNKNOWN, "optimizer", states, CorruptError.exit_code)
    if parameters := empty_parameters(checkpoint):
        yield Problem(LACKING, "parameters", parameters)
    if states and not is_all:
        yield Problem(LACKING, "optimizer", states)


def _quantized(checkpoint: Checkpoint) -> Iterator[Problem]:
    """Report quantized weights without exactly their parts, or that nothing says which parts they have."""
    weights = services.quantization.quantized_weights(checkpoint)
    for fault in weights.faults[:_MAX_SHOWN]:
        yield Problem(INCOMPLETE if fault.is_missing else DAMAGED, fault.fqn, fault.what)
    if (more := len(weights.faults) - _MAX_SHOWN) > 0:
        yield Problem(
            DAMAGED, f"{counted(more, 'further part')} of quantized weights", "missing, unexpected or misshapen"
        )
    if weights.unproved:
        yield Problem(UNPROVED, "quantized weights", weights.unproved)


def _adapter(checkpoint: Checkpoint) -> Iterator[Problem]:
    """Report settings of an adapter that contradict its weights, or that merge-lora would not merge by."""
    if not checkpoint.is_adapter or checkpoint.namespace != OWN:
        return
    try:
        config = adapter_services.settings.adapter_settings(checkpoint)
    except CorruptError as error:
        yield problem_of(error, Path(checkpoint.path))
    except NotFoundError:  # a conversion asks for the config
        return
    except CkptError as error:
        one = problem_of(error, Path(checkpoint.path))
        yield replace(one, kind=UNPROVED if isinstance(error, LossError) else LEFT, exit_code=0)
    else:
        if config.kind not in KINDS:
            what = f"ckpt does not know the kind {config.kind}, so its settings and weights were not checked"
            yield Problem(UNPROVED, ADAPTER_CONFIG, what)


def _lacking(checkpoint: Checkpoint) -> Iterator[Problem]:
    """Report what the model's config promises and the checkpoint lacks.

    A trainer may leave frozen or unused parts out of a run. A folder for from_pretrained needs every tensor.
    """
    parts, tensors = services.expected.lacking_of(checkpoint)
    is_model = checkpoint.namespace == HUB and Path(checkpoint.path).is_dir() and not has_optimizer(checkpoint)
    if tensors and is_model:
        yield Problem(INCOMPLETE, CONFIG, "; ".join(tensors))
    elif parts or tensors:
        yield Problem(LACKING, CONFIG, "; ".join([*parts, *tensors]))


def _against_config(checkpoint: Checkpoint) -> Iterator[Problem]:
    """Names and shapes that contradict the model's config, as a conversion to the Hub's names finds them."""
    if checkpoint.namespace in OF_THE_MODEL or checkpoint.is_adapter:
        return
    namespace = registry.namespace(checkpoint.namespace)
    if not (checkpoint.config or {}).get("model_type"):
        if not namespace.tells(checkpoint):
            what = "none is here, and no record of the run tells which tensors the model has, and in which shapes"
            yield Problem(LEFT, CONFIG, what)
        return
    try:
        namespace.to_hub(checkpoint)
    except CorruptError as error:
        yield replace(problem_of(error, Path(checkpoint.path)), where=error.fqn or CONFIG)
    except CkptError as error:
        yield Problem(LEFT, CONFIG, f"names and shapes were not held against it: {error.what}")


def _damaged_beside(root: Path, files: Iterable[Path], models: Iterable[Checkpoint]) -> Iterator[Problem]:
    """Yield what is wrong with files outside the checkpoint's folder that a conversion copies."""
    carried: set[Path] = set()
    for model in models:
        try:
            carried.update(carried_files(model))
        except CkptError as error:
            yield problem_of(error, root)
    outside = [path for path in carried.difference(files) if path.is_relative_to(root)]
    yield from (one for one in problems_of(root, sorted(outside)) if one.kind != LEFT)


def _lacking_beside(place: Path, checkpoint: Checkpoint | None) -> Iterator[Problem]:
    """What a trainer writes last, HF Trainer's where the run's others have it: the save was interrupted before."""
    if name := missing_last_of_megatron(place, checkpoint is not None and checkpoint.namespace == OWN):
        yield Problem(INCOMPLETE, name, "missing; megatron-core writes it last, and loads no folder without it")
    if (other := one_with_state(place)) is not None:
        yield Problem(INCOMPLETE, TRAINER_STATE, f"missing; HF Trainer writes it last, and {other.name} has it")
