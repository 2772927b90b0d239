"""API of `ckpt resume`."""

from __future__ import annotations

import contextlib
import json
import os
import shlex
import shutil
import socket
import sys
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import astuple, replace
from functools import cache, partial
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeVar, overload

from ckpt import api
from ckpt.adapters.names import factor_faults
from ckpt.base.errors import (
    CkptError,
    CorruptError,
    IncompleteError,
    LossError,
    NeverWholeError,
    NotFoundError,
    StorageError,
    UsageError,
    printable,
)
from ckpt.base.flags import check_types
from ckpt.base.progress import progress
from ckpt.base.text import pluralize, scheme_of, show_size
from ckpt.base.words import Message, joined, keywords_in, on_command_line
from ckpt.commands.check.files import LACKING, LEFT, NOTED
from ckpt.commands.check.files import files_below as visible_files_below
from ckpt.commands.check.step_files import step_problems
from ckpt.commands.resume.caller import caller
from ckpt.commands.resume.copies import RECORD, copies_folder, copies_in, remove_staging, unfinished_in
from ckpt.move.files import confined, destination_of, translate_os_errors
from ckpt.move.json_files import read_json
from ckpt.move.listing import files_below, files_in, folders_in, listed_once
from ckpt.plan import registry
from ckpt.plan.checkpoint import AXES, HUB, OWN, Checkpoint, Format, Layout, ReadRequest, SourceFile
from ckpt.plan.dtypes import CASTABLE
from ckpt.plan.groups import Cast, OptionValue
from ckpt.processes.group import Alone, check_alike, the_callers
from ckpt.runs import unread_files
from ckpt.runs.data_loaders import LoaderStates, loader_states
from ckpt.runs.file_checks import check_carried
from ckpt.runs.file_table import TENSOR_SUFFIXES
from ckpt.runs.finding import models_of, name_of, save_around, sibling_models
from ckpt.runs.half_checkpoints import OPTIMIZER_FILE, check_holds_model
from ckpt.runs.lost_files import (
    OTHERS_HAVE_IT,
    lost_rank_files,
    lost_schedule,
    lost_trainer_files,
    random_states,
)
from ckpt.runs.opening import has_optimizer, knows_optimizer, open_model, open_training
from ckpt.runs.sentence_modules import MODULES, module_faults
from ckpt.runs.step_checks import check_ranks, content_faults
from ckpt.runs.steps import (
    ANY_STEP,
    LATEST,
    OLMOS_MODEL,
    RECORDS,
    SCHEDULE,
    TRACKER,
    TRAINER_STATE,
    is_step,
    missing_last_of_megatron,
    recorded_step,
    run_at,
)
from ckpt.runs.trainer_files import files_to_resume, hook_files, rank_notes, run_files

T = TypeVar("T")

_MODEL_ONLY = Message("{model_only=True} continues from the model, with a new optimizer")
#: Check larger copies without their tensor data.
_AFFORDABLE = 4_000_000_000


_SKIPS_OPTIMIZER = (
    "Accelerate will not load the optimizer with FSDP1 and SHARDED_STATE_DICT, because a new optimizer holds no states "
    "yet; use FULL_STATE_DICT in the new run"
)


def say_on_stderr(line: str) -> None:
    print(printable(line), file=sys.stderr, flush=True)


@overload
def resume(
    path: str | os.PathLike[str],
    *,
    format: str | None = ...,
    world_size: int | None = ...,
    tag: str | None = ...,
    config: str | None = ...,
    dtype: Cast | None = ...,
    model_only: bool = ...,
    missing_ok: Literal[False] = ...,
    say: Callable[[str], None] = ...,
    **options: OptionValue,
) -> str: ...
@overload
def resume(
    path: str | os.PathLike[str],
    *,
    format: str | None = ...,
    world_size: int | None = ...,
    tag: str | None = ...,
    config: str | None = ...,
    dtype: Cast | None = ...,
    model_only: bool = ...,
    missing_ok: bool,
    say: Callable[[str], None] = ...,
    **options: OptionValue,
) -> str | None: ...
@check_types
def resume(
    path: str | os.PathLike[str],
    *,
    format: str | None = None,
    world_size: int | None = None,
    tag: str | None = None,
    config: str | None = None,
    dtype: Cast | None = None,
    model_only: bool = False,
    missing_ok: bool = False,
    say: Callable[[str], None] = say_on_stderr,
    **options: OptionValue,
) -> str | None:
    """Return the folder to resume from, on the current engine and ranks. Convert the checkpoint if it does not fit.

    The folder is the newest complete checkpoint with an optimizer, in `path` or its steps. A converted copy goes into a
    hidden folder next to `path` (`.NAME.ckpt-resume`). The next call uses the copy again, or continues an interrupted
    conversion. It deletes copies of older steps, and copies with a changed or missing source. A used copy is first
    compared with its manifest: every bit up to 4 GB, otherwise only the sizes and non-tensor data.

    `format` and `world_size` are detected: from torch.distributed, from the environment of torchrun, deepspeed, srun,
    mpirun and accelerate, and from HF Trainer's DeepSpeed config. The fallback is the source's own.

    If torch.distributed is initialized, call it in every process: each process converts its share, and all return the
    same path or raise the same error.

    Raises the errors of `ckpt.open` and `ckpt.plan`, and:

    - LossError if there is only a model without an optimizer, and `model_only` is False.
    - StorageError if the processes do not see the same files.
    - UsageError if their arguments differ, or if there are several processes without torch.distributed.

    Args:
        path: The checkpoint or run folder.
        format: The engine's format; None detects it.
        world_size: Number of ranks; None detects it.
        tag: The step's folder or number; None for the latest.
        config: The model's config: a folder, a config.json or a Hub id.
        dtype: Dtype of the weights, such as `bf16`; None uses the DeepSpeed config's.
        model_only: Use a model without an optimizer if there is nothing else.
        missing_ok: Return None if `path` is missing or holds no tensor files and no record of a step. A damaged or
            unknown checkpoint still raises an error.
        say: Called with each line about the progress, in the first process.
        **options: The format's options, such as Megatron's `tp=2`.
    """
    if scheme_of(path) is not None:
        hint = "ckpt.open, ckpt.StorageReader and `ckpt convert` read from a store"
        raise UsageError("only a run in a local folder can be resumed", path=path, hint=hint)
    path = Path(path)
    now = caller()
    precision = now.dtype if dtype is None or dtype == "keep" else dtype
    if precision is not None and precision not in CASTABLE:
        raise UsageError("unknown dtype for weights", expected=f"one of {', '.join(CASTABLE)}", found=repr(precision))
    if world_size is not None and (not isinstance(world_size, int) or world_size < 1):
        raise UsageError("invalid rank count", expected="1 or more", found=f"{world_size=}")
    layout = Layout(
        CASTABLE[precision] if precision else None, world_size=world_size or now.world_size, options=options
    )
    format = registry.get(format).name if format else now.format
    requested = {"path": path, "tag": tag, "config": config, "format": format, "dtype": precision, **options}
    requested |= {"world_size": layout.world_size, "model_only": model_only, "missing_ok": missing_ok}
    with the_callers() as group:
        check_alike({name: str(value) for name, value in requested.items()}, group)
        is_first = group.rank == 0
        with listed_once():
            if missing_ok and not any(group.gather(_in_all(partial(_has_saved, path), path, group))):
                if is_first:
                    say(f"{path} holds no checkpoint: the run begins")
                return None
            if group.size == 1 and os.environ.get("RANK", "0") != "0":
                raise UsageError(
                    "several processes can't share one conversion without torch.distributed",
                    expected="an initialized torch.distributed",
                    hint="call ckpt.resume after init_process_group (deepspeed.initialize, TrainingArguments), "
                    "or use the path from `ckpt resume`",
                )
            source = _in_all(partial(source_of, path, tag, config, model_only) if is_first else None, path, group)
            way = partial(_way, path, source, format, layout, model_only, say) if source is not None else None
            found = _Way(*group.gather(_in_all(way, path, group))[0])  # type: ignore[misc]
            planned = partial(_planned, found, source, config, layout) if found.format else None
            work = _in_all(planned, path, group)
        if work is not None:
            _convert(found, work, path, say, group)
            group.gather(None)  # the first process has moved it into place
        if source is not None:
            _clear(found, None if tag or ANY_STEP.fullmatch(path.name) else source.state.step, say)
            if now.skips_optimizer and format == now.format and has_optimizer(source):
                say(f"note: {_SKIPS_OPTIMIZER}")
            say(f"resuming from {found.place}, {found.why}")
        _check_seen_by_all(found, group)
        return found.place


class _CopyPlan(NamedTuple):
    """A conversion, the record for its copy, and the source's unread files."""

    conversion: api.Conversion
    record: bytes
    unread: Sequence[Mapping[str, str]]


def _planned(way: _Way, source: Checkpoint | None, config: str | None, layout: Layout) -> _CopyPlan:
    checkpoint = source or api.open(*way.source, config=config)  # this very checkpoint, even if a newer one exists now
    try:
        conversion = api.plan(checkpoint, way.format, way.fitting(layout))
    except LossError as error:
        error.hint = _by_convert(error.hint, checkpoint, way.format)
        raise
    planned = conversion.plan.checkpoint
    record = json.dumps({"source": _sources(planned), "step": planned.state.step}).encode()
    return _CopyPlan(conversion, record, conversion.to_json()["not_read"])


def _by_convert(hint: str | None, source: Checkpoint, format: str) -> str | None:
    option = next((one for one in keywords_in(hint) if one.name == "optimizer_dtype"), None)
    if hint is None or option is None:
        return hint
    command = f"{shlex.join(['ckpt', 'convert', source.format, format, source.path])} {option.on_command_line()}"
    return f"`{command}`{hint.removeprefix(option.on_command_line())}; resume from its output"


def _has_saved(path: Path) -> bool:
    """Return True if there are tensor files or a record of a step.

    The recorded step may be lost, and training must not restart without a word.
    """
    if any(recorded_step(path / name) for name in RECORDS):
        return True
    folders = [place for place in (path, *(step.path for step in run_at(path).steps)) if place.is_dir()]
    return any(file.suffix in TENSOR_SUFFIXES for folder in folders for file in files_below(folder))


def _in_all(action: Callable[[], T] | None, path: Path, group: Alone) -> T | None:
    """Run `action` in the processes that have one, and return its result if all succeed.

    Otherwise every process raises the first error, or a StorageError if the processes do not see the same files.
    """
    result, error = None, None
    try:
        result = action() if action is not None else None
    except CkptError as raised:
        error = raised
    errors = group.gather(error)
    first = next((rank for rank, error in enumerate(errors) if error is not None), None)
    if first is None:
        return result
    if group.size > 1 and isinstance(errors[first], NotFoundError | IncompleteError):
        _check_same_files(path, group)
    if error is not None and group.rank == first:
        raise error
    group.gather(None)  # the other process raises its error here
    raise AssertionError


def _check_same_files(path: Path, group: Alone) -> None:
    """Raise StorageError everywhere if some processes lack files."""
    found = [file for file in files_below(path) if file.is_file()] if path.is_dir() else []
    below = [str(file.relative_to(path)) for file in found]
    seen = [(host, frozenset(names)) for host, names in group.gather((socket.gethostname(), below))]
    every = frozenset[str]().union(*(names for _, names in seen))
    lacking: dict[tuple[str, frozenset[str]], list[int]] = {}
    for rank, (host, names) in enumerate(seen):
        if names != every:
            lacking.setdefault((host, every - names), []).append(rank)
    if not lacking:
        return
    error: Any = StorageError(
        "the nodes see different files: the checkpoint is on node-local storage",
        path=path,
        found="; ".join(
            f"{host} (rank {', '.join(map(str, ranks))}) lacks {pluralize(len(names), 'file')}: "
            f"{', '.join(sorted(names)[:3])}"
            for (host, names), ranks in lacking.items()
        ),
        hint="copy the files from every node to shared storage, and use the new path; if each rank loads its own "
        "node's files (DeepSpeed's use_node_local_storage, on the same ranks), give the engine the path itself",
    )
    error.is_told = True  # not a single rank's error
    raise error


def _check_seen_by_all(found: _Way, group: Alone) -> None:
    """Raise StorageError if a node lacks the folder or a file."""
    hosts = group.gather(socket.gethostname())
    looks = hosts.index(hosts[group.rank]) == group.rank
    lacking = group.gather([file for file in (found.place, *found.files) if looks and not os.path.exists(file)])
    without = [f"{hosts[rank]} (rank {rank}) lacks {files[0]}" for rank, files in enumerate(lacking) if files]
    if without:
        raise StorageError(
            "other nodes don't see the checkpoint: it is not on shared storage",
            path=found.place,
            found="; ".join(without[:8]),
            hint="keep the run on shared storage",
        )


class _Way(NamedTuple):
    """The folder to resume from, and the reason. If `format` is set, it must first be converted to it."""

    place: str
    why: str
    files: Sequence[str] = ()
    format: str = ""
    world_size: int | None = None
    source: tuple[str, str] = ("", "")
    copies: str = ""

    def fitting(self, layout: Layout) -> Layout:
        return Layout(layout.dtype, layout.max_shard_size, self.world_size, layout.options)


@listed_once()
def source_of(path: Path, tag: str | None, config: str | None, model_only: bool) -> Checkpoint:
    """Return the checkpoint to resume from. Raise LossError for a model without an optimizer unless `model_only`."""
    try:
        checkpoint = open_training(path, tag=tag, config=config)
    except NeverWholeError as error:  # keep the optimizer if a step was damaged later
        model = open_model(path, tag=tag, config=config) if model_only else None
        if model is None:
            raise
        note = f"the checkpoint with an optimizer is skipped, it cannot be read: {error.what} ({error.path or path})"
        return replace(model, passed_over=(note, *model.passed_over), notes=(note, *model.notes))
    if checkpoint is not None:
        return checkpoint
    checkpoint = api.open(path, tag=tag, config=config)
    check_holds_model(checkpoint)
    if not model_only:
        found = f"{'an adapter' if checkpoint.is_adapter else 'a model'} alone, format {checkpoint.format}"
        if unread := _unread_optimizer(path, tag):
            raise LossError(
                "ckpt doesn't read this trainer's optimizer: its states would be reset",
                path=path,
                found=f"{found}, and {unread}",
                hint=Message("resume with the trainer itself, on the same number of ranks; {}", _MODEL_ONLY),
            )
        raise LossError(
            "no checkpoint here has an optimizer: its states would be reset",
            path=path,
            expected="a step's checkpoint, like checkpoint-N",
            found=found,
            hint=_MODEL_ONLY,
        )
    return checkpoint


def _unread_optimizer(path: Path, tag: str | None) -> str | None:
    """Return the name of an optimizer's file in the step, or in the newest one."""
    run = run_at(path)
    steps = run.steps[:1] if tag is None else run.tagged(tag)
    place = steps[0].path if steps else path.parent if is_step(path.parent) else path
    place = place if place.is_dir() else place.parent
    files = (file for folder in (place, *folders_in(place)) for file in map(folder.joinpath, files_in(folder)))
    return next((os.path.relpath(one, path) for one in files if OPTIMIZER_FILE.fullmatch(one.name)), None)


def _way(
    path: Path,
    checkpoint: Checkpoint,
    format: str | None,
    layout: Layout,
    model_only: bool,
    say: Callable[[str], None],
) -> _Way:
    copies = str(copies_folder(path))
    for note in (*checkpoint.passed_over, *(note for note in checkpoint.notes if note not in checkpoint.passed_over)):
        say(f"note: {on_command_line(note)}")
    every = [checkpoint, *map(api.open, sibling_models(checkpoint.path))]
    opened = {file.path: file for one in every for file in one.files}
    if has_optimizer(checkpoint) and (beside := _models_in(path, opened)):
        say(f"note: skipped the model in {path} itself ({', '.join(beside)}), it holds no optimizer")
    for one in every:
        _check_content(one)
    _check_rank_files(checkpoint)
    target = registry.get(format or checkpoint.format)
    wanted = target.name
    registry.check_options(wanted, layout.options, "resume")
    if has_optimizer(checkpoint) and not target.carries_optimizer and not model_only:
        raise LossError(
            f"the format {wanted} can't hold this checkpoint's optimizer",
            path=checkpoint.path,
            hint=Message("leave {format} out to keep the optimizer; or {}", _MODEL_ONLY),
        )
    if not (has_optimizer(checkpoint) and target.carries_optimizer):
        what = wanted if has_optimizer(checkpoint) else checkpoint.path
        say(f"note: {what} holds no optimizer: its states are reset")
    as_it_is = _folder_to_load(path, checkpoint)
    loaders = cache(partial(loader_states, checkpoint, layout.world_size))
    misfit = _misfit(checkpoint, target, layout, loaders)
    if as_it_is is not None and misfit is None:
        for one in every:
            _check_whole(one)
        found = checkpoint
        if len(every) > 1:
            found = replace(checkpoint, path=str(as_it_is), files=tuple(opened.values()))
            names = ", ".join(map(name_of, models_of(as_it_is).values()))
            say(f"note: the save holds {pluralize(len(every), 'model')}; the engine loads all: {names}")
        if layout.world_size and (found_loaders := loaders()) is not None:
            say(f"note: {found_loaders.note(layout.world_size)}")
        for note in (*rank_notes(checkpoint, layout.world_size), *_by_products(path, as_it_is, found, every)):
            say(f"note: {note}")
        for line in unread_files.lines([file.to_json() for file in unread_files.list_unread(found)]):
            say(line)
        return _Way(str(as_it_is), "as it is", list(opened), copies=copies)
    if len(every) > 1:
        _refuse_to_lose_models(Path(checkpoint.path), misfit, wanted)
    say(f"{checkpoint.path} does not fit: {misfit or f'{LATEST} or a tracker names another step'}")
    if not (model_only or knows_optimizer(checkpoint)):
        raise LossError(
            "the optimizer's states would be lost: their parameters are unknown",
            path=checkpoint.path,
            found=joined("; ", checkpoint.notes),
            hint=Message("resume it unconverted, with the same engine and ranks; or {}", _MODEL_ONLY),
        )
    size = layout.world_size if target.records_ranks or not target.fits_other_ranks else None
    source = (checkpoint.path, checkpoint.format)
    way = _Way("", f"converted from {checkpoint.path}", (), wanted, size, source, copies)
    destination = Path(copies) / _name(checkpoint, wanted, way.fitting(layout))
    if destination.is_dir():
        try:
            _check_kept(destination, checkpoint)
            _check_whole(api.open(destination, wanted))
        except CkptError as error:
            error.hint = f"it was converted before, and damaged since; remove {destination}"
            raise
        return _Way(str(destination), "converted before", copies=copies)
    return way._replace(place=str(destination))


def _refuse_to_lose_models(place: Path, misfit: str | None, wanted: str) -> None:
    """Raise LossError: a conversion would lose all models but one."""
    save = save_around(place)
    models = list(models_of(save).values())
    others = "".join(f", then {one}" for one in models[1:])
    raise LossError(
        f"resume can't convert a save of {pluralize(len(models), 'model')}",
        path=save,
        expected="a save usable without conversion",
        found=misfit,
        hint=f"convert each model with the same options: `ckpt convert auto {wanted} {models[0]} -o FOLDER`{others}",
    )


def _models_in(path: Path, opened: Collection[str]) -> list[str]:
    """Return formats of models without an optimizer, unless all their files are `opened`."""
    bare = [one for one in registry.all_formats() if one.reads and not one.carries_optimizer]
    return [one.name for one in bare if one.find(path, None) == path and not _is_opened(one, path, opened)]


def _is_opened(one: Format, path: Path, opened: Collection[str]) -> bool:
    try:
        return all(file.path in opened for file in one.read(path, ReadRequest()).files)
    except CkptError:
        return False


def _check_kept(destination: Path, checkpoint: Checkpoint) -> None:
    from ckpt.compare import manifest

    for name in (RECORD, manifest.MANIFEST):
        if not (destination / name).is_file():
            raise CorruptError("a converted file is missing", path=destination / name)
    record = read_json(destination / RECORD)
    if not isinstance(record, dict) or record.get("source") != _sources(checkpoint):
        raise CorruptError("it was converted from another checkpoint", path=destination / RECORD)
    is_small = manifest.expected_bytes(destination) <= _AFFORDABLE
    checked = manifest.check(destination, elements=is_small)
    if checked.problems:
        what = "the conversion doesn't match its manifest"
        raise CorruptError(what, path=destination, found="; ".join(checked.problems[:4]))


def _convert(way: _Way, work: _CopyPlan, path: Path, say: Callable[[str], None], group: Alone) -> None:
    is_quiet = group.rank > 0 or say is not say_on_stderr
    with _own_hints(way, path), progress(0, "check", quiet=is_quiet) as meter:
        num_done = work.conversion.run(
            way.place,
            restart="stale",
            say=say,
            describe=lambda _: {RECORD: work.record},
            group=group,
            progress=meter,
            phase=meter.phase,
        )
    if group.rank == 0:
        if num_done:
            say(f"{show_size(num_done)} were there already, and are unchanged")
        target = work.conversion.plan.target
        for line in (*target.notes, *target.not_written):
            say(f"{'note' if line in target.notes else 'not written'}: {on_command_line(line)}")
        for line in unread_files.lines(work.unread):
            say(line)


@contextlib.contextmanager
def _own_hints(way: _Way, path: Path) -> Iterator[None]:
    """Replace hints about `-o`: `ckpt resume` has no such option."""
    try:
        yield
    except (StorageError, UsageError) as error:
        if os.path.isdir(way.place) or error.what.startswith("another process is writing"):
            error.hint = "another resume is converting this run, or has just finished: start again when it is done"
        elif any(one.name == "output" for one in keywords_in(error.hint)):
            command = f"`ckpt convert auto {way.format} {path} -o FOLDER`, with the same options,"
            error.hint = f"the converted checkpoint is kept next to the run; {command} writes elsewhere"
        raise


def _check_content(checkpoint: Checkpoint) -> None:
    """Raise IncompleteError for a missing tensor: HF Trainer keeps the values in memory for it.

    sentence-transformers' trainer builds the model from its step, and needs each module's config. Raise CorruptError
    for an adapter of diffusers whose factors don't fit.
    """
    place = Path(checkpoint.path)
    for module, fault in factor_faults(checkpoint.shapes):
        raise CorruptError(fault, path=place, fqn=module)
    modules = module_faults([place], checkpoint.shapes) if (place / MODULES).is_file() else ()
    tensors = content_faults(checkpoint) if checkpoint.namespace == HUB else ()
    for name, what in (*modules, *((name, what) for name, what, is_needed in tensors if is_needed)):
        raise IncompleteError(what, path=place / name)


def _check_rank_files(checkpoint: Checkpoint) -> None:
    """Raise IncompleteError for an item of torch_checkpointing that only some ranks still have: it is not read."""
    step = Path(checkpoint.path)
    for name, what in lost_rank_files(step, {file.path for file in checkpoint.files}):
        if what != OTHERS_HAVE_IT:
            raise IncompleteError(f"a rank's file is {what}", path=step / name)


def _check_whole(checkpoint: Checkpoint) -> None:
    """Raise CorruptError for a missing part of a tensor, or a damaged file or other step's file next to the checkpoint.

    torch's DCP keeps the values in memory for a missing part.
    """
    from ckpt.plan.planner import check_source  # imports numpy

    place = Path(checkpoint.path)
    if checkpoint.lost_weights:
        raise IncompleteError(checkpoint.lost_weights, path=place)
    for file in files_to_resume(checkpoint):
        check_carried(file, file.parent)
    for folder in (place, place.parent):
        check_ranks(folder)
    for tensor in checkpoint.tensors.values():
        check_source(tensor)


def _by_products(path: Path, place: Path, found: Checkpoint, models: Sequence[Checkpoint]) -> Iterator[str]:
    """Yield the problems that `ckpt check` finds with a step's files, and that its trainer may not notice.

    Raise IncompleteError if HF Trainer would start a new optimizer in silence.
    """
    step = place if is_step(place) or not run_at(place).steps else Path(found.path)
    lost = lost_schedule(step)
    if lost and (found_elsewhere := dict(lost_trainer_files(step)).get(SCHEDULE)):
        raise IncompleteError(lost, path=step, found=found_elsewhere)
    if lost:
        yield lost
    root = path if step.is_relative_to(path) else step
    for one in step_problems(step, root, visible_files_below(step), models, found):
        if one.kind not in (LEFT, NOTED, LACKING) and (one.what == OTHERS_HAVE_IT or not random_states([one.where])):
            yield f"this step is not whole: {one}"
    with contextlib.suppress(CkptError):  # a damaged file is named above
        for name, what in module_faults(found.folders, found.shapes):
            yield f"this step is not whole: {name}: {what}"


def _folder_to_load(path: Path, checkpoint: Checkpoint) -> Path | None:
    """Return the folder for the engine or Trainer, or None if its record names another step."""
    place, from_run = Path(checkpoint.path), registry.get(checkpoint.format).loads_from == "run"
    if (save := save_around(place)) != place:
        return save
    files = [Path(file.path) for file in checkpoint.files]
    if len(files) == 1 and files[0] in run_at(place).last:  # Lightning loads a file
        return files[0]
    around = [place, place.parent, *(p for p in place.parents[1:] if p.is_relative_to(path))]
    for folder in around:
        # The step's own: another run may be inside a step that lost its optimizer.
        if place.is_dir() and folder in (place, place.parent) and (folder / TRAINER_STATE).is_file():
            return folder
        recorded = [recorded_step(folder / LATEST), recorded_step(folder / TRACKER)]
        if from_run and any(_is_step(place.name, step) for step in recorded if step):
            return folder
    if from_run:
        return None
    is_pair = any(not Path(file.path).is_relative_to(place) for file in checkpoint.files)
    return place.parent if is_pair or place.name == OLMOS_MODEL else place  # next to OLMo-core's trainer state


def _is_step(name: str, recorded: str) -> bool:
    return name == recorded or (recorded.isdecimal() and name == f"iter_{int(recorded):07d}")


def _misfit(
    checkpoint: Checkpoint, target: Format, layout: Layout, loaders: Callable[[], LoaderStates | None]
) -> str | None:
    if checkpoint.format != target.name:
        return f"it is {checkpoint.format}, and {target.name} is loaded"
    size = layout.world_size
    is_bound = checkpoint.bound_to_ranks
    if (is_bound or not target.fits_other_ranks) and size is not None and checkpoint.world_size != size:
        return f"it was written by {pluralize(checkpoint.world_size or 0, 'rank')}, and there are {size}"
    if size is not None and (found := loaders()) is not None and found.on(size) is not None:
        return f"its data position is of {pluralize(checkpoint.world_size or 0, 'rank')}, and there are {size}"
    args: Mapping[str, Any] = checkpoint.state.args or {}
    for name, argument in AXES.items():
        requested, written = layout.options.get(name), args.get(argument) or 1
        if requested is not None and requested != written and (is_bound or not target.fits_other_axes):
            return f"it was written with {argument} {written}, and you asked for {requested}"
    if missing := missing_last_of_megatron(Path(checkpoint.path), checkpoint.namespace == OWN):
        return f"{missing} is missing: megatron-core writes it last, and loads nothing without it"
    form, requested = args.get("ckpt_format", "torch_dist"), layout.options.get("ckpt_format")
    if requested is not None and requested != form:
        return f"it is {form}, and you asked for {requested}"
    return None


def _name(checkpoint: Checkpoint, wanted: str, layout: Layout) -> str:
    from xxhash import xxh3_64

    requested = (layout.dtype, layout.world_size, sorted(layout.options.items()))
    facts = repr((wanted, requested, checkpoint.config, _sources(checkpoint)))
    step = f"step{checkpoint.state.step}" if checkpoint.state.step is not None else Path(checkpoint.path).name
    ranks = f"-on-{layout.world_size}" if layout.world_size else ""
    return f"{step}-{wanted}{ranks}-{xxh3_64(facts.encode('utf-8', 'surrogatepass')).hexdigest()}"


def _sources(checkpoint: Checkpoint) -> list[list[Any]]:
    """Return facts independent of the current folder."""
    others = (*run_files(checkpoint), *hook_files(checkpoint))
    beside = [confined(path.parent, path.name) for path in others]
    files = (*checkpoint.files, *(SourceFile.stat(str(path)) for path in beside))
    return [list(astuple(replace(file, path=os.path.abspath(file.path)))) for file in files]


def _clear(used: _Way, newest: int | None, say: Callable[[str], None]) -> None:
    """Remove copies and staging folders with a changed or missing source, and copies before step `newest`."""
    kept = Path(used.copies)
    for copy in copies_in(kept):
        with contextlib.suppress(CkptError), translate_os_errors(copy.place):
            if str(copy.place) == used.place:
                size = show_size(sum(file.stat().st_size for file in files_below(copy.place)))
                goes = "the next resume removes it if a newer step exists, or if its source is gone or changed"
                say(f"{copy.place} takes {size}: {goes}")
            elif not copy.is_current:
                shutil.rmtree(copy.place)
                say(f"removed {copy.place}: its source is gone or changed")
            elif newest is not None and copy.step is not None and copy.step < newest:
                shutil.rmtree(copy.place)
                say(f"removed {copy.place}: its step {copy.step} is older than step {newest}")
    for left_over in unfinished_in(kept):
        with contextlib.suppress(CkptError):
            place = left_over.place
            if not left_over.is_current:
                remove_staging(destination_of(place))
                say(f"removed {place}, left by a killed resume: its source is gone or changed")
            else:
                say(f"note: {place} belongs to another resume, killed or still running")
