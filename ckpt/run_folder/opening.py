"""Find and describe the checkpoint that a path leads to: itself, a step of a run, or a run in a folder of runs."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import partial
from itertools import islice, pairwise, zip_longest
from pathlib import Path

from ckpt.base.errors import CkptError, CorruptError, HalfError, IncompleteError, NotFoundError, UsageError
from ckpt.base.text import HUB_ID, Brief, counted, did_you_mean
from ckpt.move.files import confined, is_staged, translate_os_errors
from ckpt.move.listing import listed_once, names_in
from ckpt.plan import registry
from ckpt.plan.checkpoint import (
    OWN,
    TRANSFORMERS,
    AdapterSlot,
    Checkpoint,
    Format,
    Given,
    ReadRequest,
)
from ckpt.plan.tensors import Tensor
from ckpt.run_folder import from_hub
from ckpt.run_folder.companions import read_config
from ckpt.run_folder.halves import check_optimizer_files, holds_model, with_hint
from ckpt.run_folder.precision import with_computing_dtype
from ckpt.run_folder.runs import run_below
from ckpt.run_folder.steps import (
    RECORDS,
    check_ended,
    enclosing_folders,
    names_step,
    of_another_step,
    recorded_step,
    step_folders,
    step_number,
    trainer_steps,
)
from ckpt.stores import places

AUTO = "auto"
_LATER = "later than the one that is taken"
#: What a folder holds is asked what it is, as far as this, where the folder itself is nothing.
_MAX_ENTRIES = 200
_MAX_NEIGHBOURS = 2000  # names that a mistyped one is compared with


def open_checkpoint(
    path: str | Path,
    format: str = AUTO,
    *,
    tag: str | None = None,
    config: str | None = None,
    replica: int | None = None,
    adapter_slot: str | None = None,
    accept_settings: Sequence[str] | None = None,
    unfinished: bool = False,
) -> Checkpoint:
    """Describe the checkpoint at `path`; arguments and errors as of `ckpt.open`.

    What a conversion is still writing, or left when it was stopped, is refused unless it may be `unfinished`.
    """
    formats = registry.all_formats() if format == AUTO else registry.named(format)
    for one in formats:
        if not one.reads:
            raise UsageError(f"the format {one.name!r} cannot be read", hint="see `ckpt formats`")
    path = places.local(path)
    slot = None if adapter_slot is None else AdapterSlot.parse(adapter_slot)
    accepted = frozenset(accept_settings or ())
    checkpoint = _opened(
        path, formats, tag, config, unfinished=unfinished, slot=slot, accepted=accepted, replica=replica
    )
    if checkpoint is None or (format != AUTO and checkpoint.format not in [one.name for one in formats]):
        with translate_os_errors(path):
            if checkpoint is None:
                check_optimizer_files(path if tag is None else confined(path, tag))
            raise _nothing_found(path, format, tag, [checkpoint.format] if checkpoint else [])
    if slot is not None and checkpoint.adapter_slot is None:
        raise UsageError(
            "there are no slots with several adapters here",
            path=checkpoint.path,
            expected="a run of Megatron-Bridge's MultiLoRA",
            found=checkpoint.framework or checkpoint.format,
            hint="leave --adapter-slot out",
        )
    return checkpoint


def open_training(path: Path, *, tag: str | None = None, config: str | None = None) -> Checkpoint | None:
    """The newest complete checkpoint with an optimizer among `path` itself, its steps and a run in it; None without.

    A final model beside them is passed over, whatever its age.  Raises what `open` does.
    """
    formats = [one for one in registry.all_formats() if one.reads and one.carries_optimizer]
    return _opened(path, formats, tag, config, training=True)


def open_model(path: Path, *, tag: str | None = None, config: str | None = None) -> Checkpoint | None:
    """The model or adapter without an optimizer that `path` or one of its steps holds; None without.

    Raises what `open` does.
    """
    formats = [one for one in registry.all_formats() if one.reads and not one.carries_optimizer]
    return _opened(path, formats, tag, config)


@listed_once()
def _opened(
    path: Path,
    formats: list[Format],
    tag: str | None,
    config: str | None,
    training: bool = False,
    unfinished: bool = False,
    slot: AdapterSlot | None = None,
    accepted: frozenset[str] = frozenset(),
    replica: int | None = None,
) -> Checkpoint | None:
    if tag == "":
        raise UsageError("the tag is empty", expected="the name of a folder")
    with translate_os_errors(path):
        if not path.exists():
            raise NotFoundError("no such file or folder", path=path, hint=_neighbour(path))
        if is_staged(path) and not unfinished:
            what, hint = (
                "this is of a conversion that has not ended",
                "when it has, what it wrote is at its destination",
            )
            raise IncompleteError(what, path=path, hint=hint)
        request = ReadRequest(tag, None if config is None else find_config(config), slot, accepted)
        try:
            checkpoint = _open_first(path, formats, request, training)
        except HalfError as error:
            raise with_hint(error) from None
        checkpoint = checkpoint and replace(checkpoint, accepted=accepted)
        return checkpoint and _noted(_of_rank(_with_config(checkpoint, path, request), replica))


def _of_rank(checkpoint: Checkpoint, replica: int | None) -> Checkpoint:
    if replica is None:
        return checkpoint
    from ckpt.plan.planner import choose_replica

    return choose_replica(checkpoint, replica)


def _noted(checkpoint: Checkpoint) -> Checkpoint:
    """Add notes on a folder named for another step, and on values of one rank."""
    told = of_another_step(Path(checkpoint.path), checkpoint.state.step)
    notes = [note for note in (told, rank_copies_note(checkpoint.tensors.values())) if note]
    return replace(checkpoint, notes=(*checkpoint.notes, *notes)) if notes else checkpoint


def rank_copies_note(tensors: Iterable[Tensor]) -> str:
    """Return a note on tensors whose ranks each have values of their own; empty without any."""
    own = [tensor.fqn for tensor in tensors if tensor.rank_copies]
    if not own:
        return ""
    names = f"{own[0]}, ..." if len(own) > 1 else own[0]
    what = f"every rank saved its own values of {counted(len(own), 'buffer')} ({names})"
    return f"{what}; ckpt reads rank 0's, as DeepSpeed and torch do"


def _neighbour(path: Path) -> str | None:
    """A hint at what is nearly called so beside a path that is not there, or on the Hub."""
    try:
        beside = [entry.name for entry in islice(path.parent.iterdir(), _MAX_NEIGHBOURS)]
    except OSError:
        is_hubs = HUB_ID.fullmatch(str(path)) is not None
        return f"hf://{path} is the Hub's repository of this name" if is_hubs else None
    return did_you_mean(path.name, beside)


def _open_first(path: Path, formats: list[Format], request: ReadRequest, training: bool = False) -> Checkpoint | None:
    """The checkpoint that `path` is or records; otherwise, in a run folder, the newest complete `checkpoint-N`.

    A newer one that was not written to its end is passed over with a note; one that is damaged is an error.  A tag
    names a step in `path`, a `checkpoint-N`, or a step inside one: what the run would open if it had no other step.

    With `training` it is the newest complete one with an optimizer, of the folder itself and all of its steps.
    """
    failure: CkptError | None = None
    found = None
    if request.tag is not None and path.is_dir() and (named := confined(path, request.tag)).is_dir():
        found = _open_here(named, path, formats, request, None, training)
    try:
        found = found or _open_here(path, path, formats, request, request.tag, training)
    except NotFoundError as error:
        if request.tag is None:
            raise
        failure = error  # the tag may be that of a `checkpoint-N`, or of a step in one
    except (CorruptError, IncompleteError) as error:
        if request.tag is None:
            _name_the_one_before(error, path)
        raise
    steps = trainer_steps(path)
    if training and request.tag is None:
        steps = _newer_of_all(path, found[0] if found else None, formats)
    if found is not None and not (training and steps):
        return _with_later_named(path, *found) if request.tag is None else _with_notes(found, [])
    skipped: list[str] = []
    for folder, older in zip_longest(steps, steps[1:]):
        inner = None if folder.name == request.tag else request.tag
        try:
            if request.tag is None:
                check_ended(folder)
            inside = _open_here(folder, path, formats, request, inner, training)
        except (IncompleteError, HalfError) as error:
            failure = failure if isinstance(failure, CorruptError) else error
            skipped.append(f"{folder.name} is skipped, it is not complete: {error.what}")
            continue
        except CorruptError as error:
            if older is not None and request.tag is None:
                _hint_at(error, older, folder)
            raise
        except NotFoundError:
            if inner is None:
                raise
            continue
        if inside is not None:
            return _with_notes(inside, skipped)
        if request.tag is None:
            what = "checkpoint with an optimizer" if training else "checkpoint of the format wanted"
            skipped.append(f"{folder.name} is skipped, it holds no {what}")
    if found is not None:
        return _with_notes(found, skipped)
    if failure is not None:
        raise failure
    if (training or not skipped) and (run := run_below(path, partial(is_run, formats=formats, tag=request.tag))):
        below = _open_first(run, formats, request, training)
        return below and replace(below, notes=(f"taking the run {run.relative_to(path)}", *below.notes))
    return None


def _name_the_one_before(error: CkptError, run: Path) -> None:
    """Add a hint at the step before the one that `run` records, in which the error is."""
    is_told = "--tag" in (error.hint or "")
    for step, older in pairwise(step_folders(run)) if not is_told else ():
        if error.path is not None and Path(error.path).is_relative_to(step):
            _hint_at(error, older, step)


def _hint_at(error: CkptError, older: Path, step: Path) -> None:
    hints = [error.hint] if error.hint else []
    error.hint = "; ".join([*hints, f"--tag {older.name} takes the checkpoint before {step.name}"])


def _with_notes(found: tuple[Checkpoint, list[str]], skipped: list[str]) -> Checkpoint:
    checkpoint, taken = found
    passed_over = (*skipped, *checkpoint.passed_over)
    return replace(checkpoint, notes=(*taken, *skipped, *checkpoint.notes), passed_over=passed_over)


def _with_later_named(path: Path, checkpoint: Checkpoint, taken: list[str]) -> Checkpoint:
    """`checkpoint`, which `path` is or records, with notes on what was taken and on each later `checkpoint-N`."""
    step = checkpoint.state.step
    later = _untold(trainer_steps(path, after=step or -1), checkpoint) if step is not None or not taken else []
    what = _LATER if step else "the model of the folder itself is taken; beside it"
    told = [f"{what}: {', '.join(later[:8])} (--tag takes it)"] if later else []
    passed_over = (*checkpoint.passed_over, *(told if step else ()))
    return replace(checkpoint, notes=(*taken, *checkpoint.notes, *told), passed_over=passed_over)


def _untold(steps: list[Path], checkpoint: Checkpoint) -> list[str]:
    """The names of `steps` that no note of `checkpoint` has yet."""
    told = set(re.findall(r"[\w-]+", " ".join(checkpoint.notes)))
    return [step.name for step in steps if step.name not in told]


def _newer_of_all(path: Path, checkpoint: Checkpoint | None, formats: list[Format]) -> list[Path]:
    """The steps in `path` that are newer than `checkpoint`, which `path` is or records, by their numbers.

    Without those that a framework's own record passes over, and none where it is not known which step `checkpoint` is.
    """
    steps = step_folders(path)
    if checkpoint is not None:
        place = Path(checkpoint.path)
        holder = next((step for step in steps if place.is_relative_to(step)), None)
        number = checkpoint.state.step if holder is None else step_number(holder)
        steps = [step for step in steps if number is not None and step_number(step) > number]
    return [step for step in steps if not any(_is_ruled_out(one, path, step) for one in formats)]


def _is_ruled_out(one: Format, path: Path, step: Path) -> bool:
    """Whether `step` is of the format `one`, but the format's record in `path` names another step."""
    if not _has_record(path) or _has_record(step):
        return False
    recorded = one.find(path, None)
    if recorded is None or not names_step(path, recorded) or recorded.is_relative_to(step):
        return False
    try:
        return _finds(one, step, None)
    except CorruptError:  # whoever opens it says so
        return False


def _has_record(path: Path) -> bool:
    return any((path / name).is_file() for name in RECORDS)


def is_run(folder: Path, formats: list[Format] | None = None, tag: str | None = None) -> bool:
    """Whether `folder` is a checkpoint of any of the formats (None: of all), or the run folder of some.

    Raises CorruptError for one that is damaged so that it is not told what it is.
    """
    formats = [one for one in registry.all_formats() if one.reads] if formats is None else formats
    steps = trainer_steps(folder)
    inner = None if tag in {step.name for step in steps} else tag
    return any(_finds(one, folder, tag) or any(_finds(one, step, inner) for step in steps) for one in formats)


def _finds(one: Format, folder: Path, tag: str | None) -> bool:
    try:
        return one.find(folder, tag) is not None
    except NotFoundError:  # no step of this tag, or of another format
        return False


def _open_here(
    path: Path, asked: Path, formats: list[Format], request: ReadRequest, tag: str | None, training: bool
) -> tuple[Checkpoint, list[str]] | None:
    """The checkpoint that `path` is or records, with a note if it is not the one that was `asked` for.

    What lies in a `checkpoint-N` of `path` may be a model beside the training checkpoint: each step is asked by itself,
    for all formats in turn.
    """
    for one in formats:
        found = one.find(path, tag)
        if found is None or (tag is None and _is_for_the_step(found, path)):
            continue
        checkpoint = one.read(found, request)
        if training and not (has_optimizer(checkpoint) and holds_model(checkpoint)):
            continue
        if request.tag is None:
            checkpoint = _with_newer_named(checkpoint, found, path, one, formats)
        taken = found.relative_to(asked) if found.is_relative_to(asked) else found
        return checkpoint, [] if found == asked else [Brief(f"taking {taken}")]
    return None


def _is_for_the_step(found: Path, path: Path) -> bool:
    is_inside = found != path and any(found.is_relative_to(step) for step in trainer_steps(path))
    return is_inside and not names_step(path, found)


def has_optimizer(checkpoint: Checkpoint) -> bool:
    """Whether there is an optimizer, even if nothing tells which parameters its states belong to.

    Its engine takes such states by number: training can go on from them, but they cannot be converted.
    """
    is_beside = any(Path(file.path).name.startswith("optim") for file in checkpoint.files)
    return knows_optimizer(checkpoint) or is_beside or registry.get(checkpoint.format).always_has_optimizer


def knows_optimizer(checkpoint: Checkpoint) -> bool:
    """Whether states or hyperparameters of an optimizer are read, or what is not read of them is known."""
    return bool(checkpoint.optimizer_states or checkpoint.state.param_groups or checkpoint.unread)


def _with_newer_named(
    checkpoint: Checkpoint, found: Path, path: Path, one: Format, formats: list[Format]
) -> Checkpoint:
    """`checkpoint` with notes on the newer step folders beside the one in which `found` lies below `path`."""
    inside = [folder for folder in (found, *found.parents) if folder != path and folder.is_relative_to(path)]
    holder = next((folder for folder in inside if folder in step_folders(folder.parent)), None)
    if holder is None:
        return checkpoint
    run, newer = holder.parent, [s for s in step_folders(holder.parent) if step_number(s) > step_number(holder)]
    recorded = [step for step in newer if _is_ruled_out(one, run, step)]
    later = [step for step in newer if step not in recorded and _holds_any(step, formats)]
    others = [step.name for step in newer if step not in (*recorded, *later)]
    notes, passed = list(checkpoint.notes), []
    if names := _untold(recorded, checkpoint):
        notes.append(f"{holder.name} is what the run records; there is also {', '.join(names[:8])} (--tag takes it)")
    if later:
        passed.append(f"{_LATER}: {', '.join(step.name for step in later[:8])} (--tag takes it)")
    if others:
        passed.append(f"skipped, no {one.name} checkpoint was found in newer folders: {', '.join(others[:8])}")
    return replace(checkpoint, notes=(*notes, *passed), passed_over=(*checkpoint.passed_over, *passed))


def _holds_any(step: Path, formats: list[Format]) -> bool:
    try:
        return any(_finds(one, step, None) for one in formats)
    except CkptError:  # a damaged one is one
        return True


def _nothing_found(path: Path, format: str, tag: str | None, others: list[str]) -> NotFoundError:
    """What to say where there is nothing of `format`; `others` are the formats that it is known to be instead."""
    wanted = "checkpoint of a known format" if format == AUTO else f"{format} checkpoint"
    if tag is not None:
        wanted += f" with the tag {tag!r}"
    run = path if others else _run_here(path)
    for one in registry.all_formats() if not others else ():
        if one.name != format and one.reads:
            try:
                found = any(one.find(folder, tag) is not None for folder in [run, *trainer_steps(run)])
            except CkptError:
                continue
            others += [one.name] if found else []
    hint = f"this looks like {' or '.join(others)}" if others else "see `ckpt formats`"
    said = {name: recorded_step(path / name) for name in RECORDS} if path.is_dir() and not others else {}
    if name := next(filter(said.get, said), None):
        hint = (
            f"`{name}` says {said[name]!r}, and there is no such step: is the disk mounted, was all of the run copied?"
        )
    if not others and _is_part(path):
        hint = f"this is one file of the checkpoint in {path.parent}: give that folder"
    if tag is None and not others and (inside := _checkpoints_inside(path, format)):
        hint = "there are checkpoints here that stand by themselves, give one: " + ", ".join(inside[:8])
    if tag is not None and not others:
        steps = sorted(step_folders(path), key=lambda step: _without_digits(step.name) != _without_digits(tag))
        there = [step.name for step in steps] or _checkpoints_inside(path, format)
        hint = f"there is {', '.join(there[:8])}" if there else hint
    return NotFoundError(f"no {wanted} here", path=path, hint=hint)


def _without_digits(name: str) -> str:
    return re.sub(r"\d+", "", name)


def _run_here(path: Path) -> Path:
    """The run folder that is meant by `path`, the only one in it or itself."""
    try:
        return path if is_run(path) else run_below(path, is_run) or path
    except CkptError:
        return path


def _is_part(path: Path) -> bool:
    """Whether a file lies in a folder that is a checkpoint."""
    try:
        return path.is_file() and is_run(path.parent)
    except CkptError:  # a damaged one is one
        return True


def _checkpoints_inside(path: Path, format: str) -> list[str]:
    """What in a folder, or in the newest step there, is a checkpoint by itself: files, and models beside each other."""
    formats = [one for one in (registry.all_formats() if format == AUTO else registry.named(format)) if one.reads]
    places = [path, *trainer_steps(path)[:1]] if path.is_dir() else []
    entries = [place / name for place in places for name in names_in(place)][:_MAX_ENTRIES]
    found = [entry for entry in entries if any(_finds(one, entry, None) for one in formats) and not is_staged(entry)]
    return [str(entry.relative_to(path)) for entry in found]


def _with_config(checkpoint: Checkpoint, path: Path, request: ReadRequest) -> Checkpoint:
    """Add the model's config and the folders of the run's other files, where the reader did not."""
    folders = [request.config] if request.config is not None else []
    folders += [f for folder in checkpoint.folders for f in enclosing_folders(Path(folder))]
    distinct = tuple(dict.fromkeys(folders))
    config = checkpoint.config or read_config(distinct)
    namespace = checkpoint.namespace
    if namespace == OWN and config and config.get("model_type"):
        namespace = TRANSFORMERS
    given = Given((str(path),), None if request.config is None else str(request.config))
    found = replace(checkpoint, folders=tuple(map(str, distinct)), given=given, config=config, namespace=namespace)
    if namespace == TRANSFORMERS and (own := registry.service("namespace_of")(found)):
        found = replace(found, namespace=own)
    return with_computing_dtype(found)


def find_config(where: str) -> Path:
    """The folder of a model's config: a folder or URL, that of a config.json, or a Hub id's files in the cache."""
    path = places.local(where)
    if where and path.is_dir():
        return path
    if path.is_file():
        return path.parent
    if HUB_ID.fullmatch(where):
        return from_hub.fetched(where)
    raise NotFoundError("no such config", path=where, expected="a folder, a config.json or a Hub id like org/name")
