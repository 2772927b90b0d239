"""Open, plan, convert, verify: what the command line does, for use from Python."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace
from functools import cached_property, partial
from io import BufferedReader
from itertools import islice, zip_longest
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ckpt import registry
from ckpt.base.errors import CkptError, CorruptError, IncompleteError, LossError, NotFoundError, UsageError, shown
from ckpt.base.sizes import show_size
from ckpt.base.text import HUB_ID, counted, did_you_mean, scheme_of
from ckpt.move.files import check_destination, confined, is_filled, lies_in, translate_os_errors
from ckpt.plan.checkpoint import (
    BUFFER,
    HUB,
    OWN,
    TRANSFORMERS,
    WEIGHT,
    Checkpoint,
    Format,
    Layout,
    ParamGroup,
    ReadRequest,
    Target,
)
from ckpt.plan.dtypes import DType
from ckpt.plan.namespace import OF_THE_MODEL, TORCHTITAN, in_words
from ckpt.run_folder import from_hub
from ckpt.run_folder.companions import read_config
from ckpt.run_folder.precision import with_computing_dtype
from ckpt.run_folder.runs import run_below
from ckpt.run_folder.steps import (
    RECORDS,
    check_ended,
    enclosing_folders,
    names_step,
    step_folders,
    step_number,
    trainer_steps,
)
from ckpt.stores import places, standins
from ckpt.views.lazy import OpenCheckpoint

if TYPE_CHECKING:
    from ckpt.move.workers import FileDigests, Progress, Resources
    from ckpt.plan.planner import Plan
    from ckpt.processes.group import Alone
    from ckpt.show.rows import Only, Picture
    from ckpt.verify.digest import Digests
    from ckpt.verify.pairs import Report
    from ckpt.verify.training import RunReport
    from ckpt.verify.transformers_loads import Loading
    from ckpt.views.files import Views

AUTO = "auto"
_LATER = "later than what is taken"
#: Formats that are known by their optimizer's files, also where nothing tells whose the states in these are.
_WITH_OPTIMIZER = ("zero0", "zero1", "zero2", "zero3", "trainer")
#: What a folder holds is asked what it is, as far as this, where the folder itself is nothing.
_MAX_ENTRIES = 200
_MAX_NEIGHBOURS = 2000  # names that a mistyped one is compared with


def open(
    path: str | Path,
    format: str = AUTO,
    *,
    tag: str | None = None,
    config: str | None = None,
    replica: int | None = None,
) -> OpenCheckpoint:
    """Describe the checkpoint at `path`, which may be a checkpoint or a run folder; no tensor data is read.

    `path` may be a URL (`s3://bucket/run`, `hf://org/name`), of which only the bytes that are needed are fetched.
    `format` is a name from the registry or `auto`; `tag` names a step folder; `config` is a folder, a config.json or a
    Hub id; `replica` is the rank whose copy of replicated tensors is taken.  How the checkpoint was found is in its
    `notes`.  Raises the errors of `ckpt.base.errors`.
    """
    formats = registry.all_formats() if format == AUTO else [registry.get(format)]
    for one in formats:
        if not one.reads:
            raise UsageError(f"the format {one.name!r} cannot be read", hint="see `ckpt formats`")
    path = places.local(path)
    checkpoint = _opened(path, formats, tag, config)
    if checkpoint is None or (format != AUTO and checkpoint.format != formats[0].name):
        with translate_os_errors(path):
            raise _nothing_found(path, format, tag, [checkpoint.format] if checkpoint else [])
    if replica is not None:
        from ckpt.plan.planner import choose_replica

        checkpoint = choose_replica(checkpoint, replica)
    return OpenCheckpoint(**{field.name: getattr(checkpoint, field.name) for field in fields(Checkpoint)})


def open_training(path: Path, *, tag: str | None = None, config: str | None = None) -> Checkpoint | None:
    """The newest complete checkpoint with an optimizer at `path`, of itself, its steps and a run in it; None without.

    A final model beside them is passed over, whatever its age.  Raises what `open` does.
    """
    formats = [one for one in registry.all_formats() if one.reads and one.carries_optimizer]
    return _opened(path, formats, tag, config, training=True)


def _opened(
    path: Path, formats: list[Format], tag: str | None, config: str | None, training: bool = False
) -> Checkpoint | None:
    if tag == "":
        raise UsageError("the tag is empty", expected="the name of a folder")
    with translate_os_errors(path):
        if not path.exists():
            raise NotFoundError("no such file or folder", path=path, hint=_neighbour(path))
        request = ReadRequest(tag, None if config is None else find_config(config))
        checkpoint = _open_first(path, formats, request, training)
        return checkpoint and replace(_with_config(checkpoint, request), origins=(str(path),))


def _neighbour(path: Path) -> str | None:
    """A hint at what beside a path that is not there is nearly called so."""
    try:
        beside = [entry.name for entry in islice(path.parent.iterdir(), _MAX_NEIGHBOURS)]
    except OSError:
        return None
    return did_you_mean(path.name, beside)


def _open_first(path: Path, formats: list[Format], request: ReadRequest, training: bool = False) -> Checkpoint | None:
    """The checkpoint that `path` is or records; otherwise, in a run folder, the newest complete `checkpoint-N`.

    A newer one that was not written to its end is passed over, which is said; one that is damaged is an error.  A tag
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
        except IncompleteError as error:
            failure = failure if isinstance(failure, CorruptError) else error
            skipped.append(f"{folder.name} is skipped, it is not complete: {error.what}")
            continue
        except CorruptError as error:
            if older is not None and request.tag is None:
                hints = [error.hint] if error.hint else []
                error.hint = "; ".join([*hints, f"--tag {older.name} takes the checkpoint before {folder.name}"])
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


def _with_notes(found: tuple[Checkpoint, list[str]], skipped: list[str]) -> Checkpoint:
    checkpoint, taken = found
    passed_over = (*skipped, *checkpoint.passed_over)
    return replace(checkpoint, notes=(*taken, *skipped, *checkpoint.notes), passed_over=passed_over)


def _with_later_named(path: Path, checkpoint: Checkpoint, taken: list[str]) -> Checkpoint:
    """`checkpoint`, which `path` is or records, with notes on what was taken and on each later `checkpoint-N`."""
    step = checkpoint.state.step
    later = _untold(trainer_steps(path, after=step or -1), checkpoint) if step is not None or not taken else []
    what = _LATER if step else "what is taken is the model of the folder itself; beside it"
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
    """Whether `step` is of the format `one`, of which a record in `path` names another step."""
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
    """The checkpoint that `path` is or records, and a note on what was taken where that is not what was `asked`.

    What lies in a `checkpoint-N` of `path` may be a model beside the training checkpoint: each step is asked by itself,
    for all formats in turn.
    """
    for one in formats:
        found = one.find(path, tag)
        if found is None or (tag is None and _is_for_the_step(found, path)):
            continue
        checkpoint = one.read(found, request)
        if training and not has_optimizer(checkpoint):
            continue
        if request.tag is None:
            checkpoint = _with_newer_named(checkpoint, found, path, one, formats)
        taken = found.relative_to(asked) if found.is_relative_to(asked) else found
        return checkpoint, [] if found == asked else [f"taking {taken}"]
    return None


def _is_for_the_step(found: Path, path: Path) -> bool:
    is_inside = found != path and any(found.is_relative_to(step) for step in trainer_steps(path))
    return is_inside and not names_step(path, found)


def has_optimizer(checkpoint: Checkpoint) -> bool:
    """Whether there is an optimizer, also one of which nothing tells whose its states are.

    Its engine takes these by number: it can be gone on with as it is, and not be converted (`knows_optimizer`).
    """
    is_beside = any(Path(file.path).name.startswith("optim") for file in checkpoint.files)
    return knows_optimizer(checkpoint) or checkpoint.format in _WITH_OPTIMIZER or is_beside


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
        passed.append(f"skipped, no {one.name} checkpoint was found in what is newer: {', '.join(others[:8])}")
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
    hint = f"what is here looks like {' or '.join(others)}" if others else "see `ckpt formats`"
    if not others and _is_part(path):
        hint = f"this is one file of the checkpoint in {path.parent}: give that folder"
    if tag is None and not others and (inside := _checkpoints_inside(path, format)):
        hint = "there are checkpoints here that stand by themselves, give one: " + ", ".join(inside[:8])
    if tag is not None and not others and (steps := trainer_steps(path)):
        hint = "there is " + ", ".join(folder.name for folder in steps[:8])
    return NotFoundError(f"no {wanted} here", path=path, hint=hint)


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
    formats = [one for one in registry.all_formats() if one.reads and format in (AUTO, one.name)]
    places = [path, *trainer_steps(path)[:1]] if path.is_dir() else []
    entries = [entry for place in places for entry in sorted(place.iterdir())][:_MAX_ENTRIES]
    return [str(entry.relative_to(path)) for entry in entries if any(_finds(one, entry, None) for one in formats)]


def check_apart(destination: Path, checkpoint: Checkpoint) -> None:
    """Raise UsageError where `destination` is, holds or lies in what the user named or `checkpoint` was read from."""
    for place in (checkpoint.path, *checkpoint.origins, *(file.path for file in checkpoint.files)):
        check_destination(destination, Path(place))
    for folder in checkpoint.folders:  # the config's too; output may lie in these, but not replace them
        if lies_in(Path(folder), destination):
            raise UsageError(
                "the destination holds files of the source",
                path=destination,
                found=folder,
                hint="give another folder with -o",
            )


def _check_replaceable(destination: Path) -> None:
    """Raise UsageError unless the folder that `--overwrite` would delete is a checkpoint.

    Guards against a home folder given by mistake.
    """
    if not is_filled(destination):
        return
    for one in registry.all_formats():
        try:
            if one.find(destination, None) is not None:
                return
        except CkptError:
            return  # a damaged one is recognised, too
    raise UsageError(
        "the destination holds files that are no checkpoint, and --overwrite would delete them",
        path=destination,
        found=", ".join(sorted(entry.name for entry in destination.iterdir())[:4]),
        hint="give another folder with -o, or remove this one first",
    )


def _with_config(checkpoint: Checkpoint, request: ReadRequest) -> Checkpoint:
    """Add the model's config and the folders of the run's other files, where the reader did not."""
    folders = [request.config] if request.config is not None else []
    folders += [f for folder in checkpoint.folders for f in enclosing_folders(Path(folder))]
    distinct = tuple(dict.fromkeys(folders))
    config = checkpoint.config or read_config(distinct)
    namespace = checkpoint.namespace
    if namespace == OWN and config and config.get("model_type"):
        namespace = TRANSFORMERS
    given = None if request.config is None else str(request.config)
    found = replace(
        checkpoint, folders=tuple(map(str, distinct)), config_folder=given, config=config, namespace=namespace
    )
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


def to_namespace(checkpoint: Checkpoint, namespace: str | None, layout: Layout | None = None) -> Checkpoint:
    """`checkpoint` under the names of `namespace`, where the two are related and differ.

    Every way leads over the Hub's names; `layout` decides what a namespace leaves open, as how far Megatron's
    vocabulary is padded.  Raises LossError where a relation does not place a tensor, NotFoundError where it takes a
    config and none is there.
    """
    if namespace is None or namespace == OWN:
        return checkpoint
    layout = layout or Layout()
    if namespace == checkpoint.namespace:
        return checkpoint if namespace in OF_THE_MODEL else registry.namespace(namespace).adapted(checkpoint, layout)
    if checkpoint.namespace == TORCHTITAN and namespace == TRANSFORMERS:
        return checkpoint  # a run's own names, whichever framework's, are what it goes on under
    if not {checkpoint.namespace, namespace} <= OF_THE_MODEL:
        checkpoint = _with_known_names(checkpoint, namespace)
    if checkpoint.namespace in (OWN, namespace):
        return checkpoint
    if checkpoint.namespace != HUB:
        checkpoint = registry.namespace(checkpoint.namespace).to_hub(checkpoint)
    return checkpoint if namespace == HUB else registry.namespace(namespace).from_hub(checkpoint, layout)


def _with_known_names(checkpoint: Checkpoint, namespace: str) -> Checkpoint:
    """`checkpoint` with the names of its config's architecture; NotFoundError if there is no config that tells it."""
    model_type = (checkpoint.config or {}).get("model_type")
    if not model_type:
        raise NotFoundError(
            f"it takes the model's config.json to turn {in_words(checkpoint.namespace)} into {in_words(namespace)}",
            path=checkpoint.path,
            expected="a config.json with a model_type",
            found="none beside the checkpoint" if checkpoint.config is None else "a config.json without a model_type",
            hint="--config takes the folder of a config.json, or a Hub id",
        )
    return replace(checkpoint, namespace=TRANSFORMERS) if checkpoint.namespace == OWN else checkpoint


def dequantized(checkpoint: Checkpoint, dtype: DType | None = None) -> Checkpoint:
    """`checkpoint` with plain weights in place of those that are stored quantized (MXFP4, bitsandbytes, FP8).

    They have the bits that transformers and bitsandbytes compute, in `dtype` (None: the model config's), and are
    computed where they are written.  Raises UsageError for a method of quantization that is not known, CorruptError
    where a weight lacks a part or contradicts itself.
    """
    found: Checkpoint = registry.service("dequantized")(checkpoint, dtype)
    return found


def quantized_parts(checkpoint: Checkpoint) -> frozenset[str]:
    """Names of the tensors that are parts of weights stored quantized, packed values, scales and the like."""
    names = (fqn for fqn, role in checkpoint.tensors if role in (WEIGHT, BUFFER))
    found: frozenset[str] = registry.service("quantized_parts")(names)
    return found


def check_casts(checkpoint: Checkpoint, target: Target, layout: Layout) -> None:
    """Raise UsageError where `target` would have a part of a quantized weight in another dtype."""
    parts = quantized_parts(checkpoint)
    for slot in (slot for file in target.files for slot in file.slots) if parts else ():
        tensor = checkpoint.tensors.get(slot.key)
        if tensor is not None and tensor.fqn in parts and slot.extent.dtype != tensor.dtype:
            raise UsageError(
                "a part of a quantized weight would be cast, and the weight be another one",
                path=checkpoint.path,
                fqn=tensor.fqn,
                expected=tensor.dtype,
                found=slot.extent.dtype,
                hint="--dequantize makes plain weights of them" + ("; or leave --dtype out" if layout.dtype else ""),
            )


@dataclass(frozen=True)
class Conversion:
    """A plan that has been proved and can be run."""

    plan: Plan
    resources: Resources
    format: str

    def __repr__(self) -> str:
        size = show_size(self.plan.total_bytes)
        return f"<{shown(self.plan.checkpoint.path)} to {self.format}: {counted(len(self.files), 'file')}, {size}>"

    def check_destination(self, destination: Path) -> None:
        """Raise UsageError where `destination` is, holds or lies in anything that the conversion reads."""
        check_apart(destination, self.plan.checkpoint)

    @property
    def peak_buffers(self) -> int:
        """Upper bound of the bytes of all buffers while it runs."""
        return self.resources.peak_buffers(self.plan)

    @property
    def files(self) -> tuple[str, ...]:
        """Names of the target's files, relative to its folder."""
        return tuple(file.name for file in self.plan.target.files)

    @cached_property
    def views(self) -> Views:
        """The target's files to be read without being written, by offset and by several threads at a time."""
        from ckpt.views.files import Views

        return Views(self.plan, self.resources.max_memory)

    def open(self, name: str) -> BufferedReader:
        """A file of the target that is not written: the bytes that `run` would write are computed as they are read.

        Read-only and seekable; each thread opens its own.  Replicas are not compared (`ckpt.verify` does).  Raises
        NotFoundError where the target has no such file, and when it is read CorruptError where the source was
        replaced meanwhile, StorageError.
        """
        return self.views.open(name)

    def run(
        self,
        destination: str | Path,
        *,
        overwrite: bool = False,
        resume: bool = False,
        progress: Progress | None = None,
        manifest: bool = True,
        phase: Callable[[str], None] = lambda _: None,
        check: bool = False,
        describe: Callable[[Path], Mapping[str, bytes]] = lambda _: {},
        group: Alone | None = None,
        clearing: Callable[[Path, int], None] = lambda *_: None,
    ) -> int:
        """Write it to `destination`, which must not overlap the source; see `ckpt.move.run.execute`.

        `resume` goes on where a run that was killed stopped, and keeps what is done if it fails; returned is how many
        bytes were there already; without it `clearing` is called with the path and the bytes of what such a run left,
        before that is removed.  `check` first compares masters with the weights stored beside them
        (`ckpt.verify.compare.check_masters`); `manifest` adds `ckpt-manifest.json`, the digests of what was written;
        `describe` makes further files of the filled folder: their content by name.  Where all processes of a `group`
        call it, each writes its share.
        """
        from ckpt.move.run import execute

        place = Path(destination) if scheme_of(destination) is None else standins.place(str(destination))
        self.check_destination(place)
        what: dict[str, Any] = {
            "progress": progress,
            "hashing": manifest,
            "check": partial(self._check_source, check),
            "describe": partial(self._described, describe, manifest),
        }
        if standins.is_standin(str(place)):
            from ckpt.stores.upload import upload

            if overwrite or resume:
                asked = "--overwrite" if overwrite else "--resume"
                raise UsageError(f"{asked} is for local folders, and not for a store", path=place)
            if group is not None and group.size > 1:
                raise UsageError(f"a store is written by one process, and there are {group.size}", path=place)
            phase("move")
            upload(self.plan, self.views, place, **what)
            return 0
        if overwrite and (group is None or group.rank == 0):
            _check_replaceable(place)
        try:
            what |= {"phase": phase, "group": group, "resources": self.resources, "clearing": clearing}
            return execute(self.plan, place, overwrite=overwrite, resume=resume, **what)
        except (CorruptError, NotFoundError):
            for file in self.plan.checkpoint.files:
                file.check_unchanged()  # a file that was replaced meanwhile explains whatever else went wrong
            raise

    def _check_source(self, masters: bool) -> None:
        if masters:
            from ckpt.verify.compare import check_masters

            check_masters(self.plan.checkpoint)
        if any(tensor.replicas for tensor in self.plan.checkpoint.tensors.values()):
            from ckpt.verify.compare import check_plan_replicas

            check_plan_replicas(self.plan)

    def _described(
        self, describe: Callable[[Path], Mapping[str, bytes]], manifest: bool, folder: Path, digests: FileDigests
    ) -> dict[str, bytes]:
        files = dict(describe(folder))
        if manifest:
            from ckpt.move.filehash import digest_of_bytes
            from ckpt.verify.manifest import MANIFEST, make_manifest

            digests = {**digests, **{name: digest_of_bytes(content) for name, content in files.items()}}
            files[MANIFEST] = make_manifest(folder, registry.get(self.format), digests)
        return files


def plan(
    checkpoint: Checkpoint, to: str, layout: Layout | None = None, resources: Resources | None = None
) -> Conversion:
    """The conversion of `checkpoint` to the format `to`, proved to be complete; nothing is written yet.

    Raises LossError where a tensor would go nowhere or part of the target would be filled by nothing.
    """
    from ckpt.move.workers import Resources
    from ckpt.plan.planner import make_plan  # it takes numpy, which describing a checkpoint does not

    target = registry.get(to)
    if not target.writes:
        raise UsageError(f"the format {to!r} cannot be written", hint="see `ckpt formats`")
    layout = layout or Layout()
    registry.check_options(target.name, layout.options)
    # What the reader has said is known; a writer sees no notes, and what is said on the way from names to names is new.
    if target.carries_optimizer:
        _check_states_are_plain(checkpoint, target, layout)
    named = to_namespace(replace(checkpoint, notes=()), _namespace(target, layout), layout)
    laid_out = target.lay_out(replace(named, notes=()), layout)
    check_casts(named, laid_out, layout)
    unread = checkpoint.unread if target.carries_optimizer else ()
    if not target.carries_optimizer and any(map(_is_at_gradients_point, checkpoint.state.param_groups)):
        note = (
            "the run's schedule-free optimizer was in training mode: these are the weights that gradients are taken "
            "at, not the averaged ones to evaluate (which are there when it is saved after optimizer.eval())"
        )
        laid_out = replace(laid_out, notes=(*laid_out.notes, note))
    laid_out = replace(laid_out, notes=(*named.notes, *laid_out.notes), dropped=(*laid_out.dropped, *unread))
    if named.blocks and target.carries_optimizer:
        named = registry.service("as_stored")(named)
    made = make_plan(named, laid_out, carries_optimizer=target.carries_optimizer)
    return Conversion(made, resources or Resources(), to)


def _is_at_gradients_point(group: ParamGroup) -> bool:
    """schedulefree 1.4, `AdamWScheduleFree.train`: the parameters are another point than that of `eval`."""
    return group.options.get("train_mode") is True and "weight_sum" in group.options


def _check_states_are_plain(checkpoint: Checkpoint, target: Format, layout: Layout) -> None:
    """Raise LossError where optimizer states are stored quantized, and the target has no place for them as they are.

    It has one where it may hold blocks (its writer says which) and its names and shapes are the source's.
    """
    to, has_place = target.name, getattr(target, "carries_blocks", False)
    is_renamed = _namespace(target, layout) not in (None, checkpoint.namespace) and checkpoint.namespace != OWN
    if not checkpoint.quantized or (
        has_place and not is_renamed and checkpoint.blocks.keys() == checkpoint.quantized.keys()
    ):
        return
    (fqn, state), method = next(iter(checkpoint.quantized.items()))
    raise LossError(
        f"the optimizer's states are stored quantized, in blocks that {to} has no place for",
        path=checkpoint.path,
        fqn=fqn,
        found=f"{state} of {method}, and {len(checkpoint.quantized) - 1} others",
        hint="--optimizer-dtype fp32 writes the values that the optimizer itself computes of them",
    )


def plain_states(checkpoint: Checkpoint) -> Checkpoint:
    """`checkpoint` with fp32 values in place of optimizer states that are stored quantized (torchao, bitsandbytes).

    They have the bits that the library computes.
    """
    counts = Counter(checkpoint.quantized.values())
    notes = [f"{count} optimizer states dequantized from {method} to float32" for method, count in counts.items()]
    return replace(checkpoint, quantized={}, blocks={}, notes=(*checkpoint.notes, *notes))


def _namespace(target: Format, layout: Layout) -> str | None:
    """The names that are written.  UsageError where others are asked for than the format has."""
    names = layout.options.get("names")
    if target.namespace == TRANSFORMERS and names == TORCHTITAN:
        return TORCHTITAN
    if names is not None and (target.namespace != HUB or names == TORCHTITAN):
        raise UsageError(f"the format {target.name!r} is not written under such names", found=f"--names {names}")
    if layout.options.get("flat_optimizer") and not target.carries_optimizer:
        raise UsageError(f"the format {target.name!r} holds no optimizer", found="--flat-optimizer")
    return target.namespace


def picture(checkpoint: Checkpoint, only: Only = "all") -> Picture:
    """Who holds what, to be drawn by `ckpt.show.svg.draw`; what is damaged about the description is in it."""
    from ckpt.show.rows import picture as picture_of

    space = checkpoint.namespace
    padding = {} if space in OF_THE_MODEL else registry.namespace(space).padding(checkpoint)
    return picture_of(checkpoint, padding, only)


def digests(checkpoint: Checkpoint, **options: Any) -> Digests:
    """Digests of every tensor under the name that the Hub's files give it; options as of `ckpt.verify.digest.digests`.

    Of a model that is not known the names are its own.
    """
    from ckpt.verify.digest import digests as digests_as_named

    named = _as_hub(checkpoint)
    return digests_as_named(named, names=registry.service("kept_names")(named), **options)


def verify(a: Checkpoint, b: Checkpoint, **options: Any) -> Report:
    """Compare two checkpoints of any formats, tensor by tensor and bit by bit; see `ckpt.verify.pairs.verify`."""
    from ckpt.verify.pairs import verify as verify_same_names

    a, b, notes = _as_saved_adapters(a, b)
    report = verify_same_names(*map(_with_computing_dtype, _comparable(a, b)), **options)
    return replace(report, notes=(*report.notes, *notes))


def verify_runs(a: Checkpoint, b: Checkpoint) -> RunReport:
    """Compare what two checkpoints record beside their tensors; see `ckpt.verify.training`."""
    from ckpt.verify.training import compare_runs

    return compare_runs(a, b)


def prove_names(path: Path) -> None:
    """Prove that a model folder holds what the architecture that its config names would save, names and shapes.

    Of an adapter's, that its names are ones that PEFT loads.  Any other folder passes, and a config that names no
    architecture.  Raises LossError where it holds anything else, UsageError where nothing here knows the architecture.
    """
    if not path.is_dir():
        return
    registry.service("prove_adapter_names")(path)
    if registry.get("hf").find(path, None) is None:
        return
    checkpoint = open(path, "hf")
    config = checkpoint.config or {}
    if config.get("model_type") or config.get("architectures"):
        registry.service("prove_names")(config, checkpoint.shapes, str(path))


def check_loads(path: Path) -> Loading:
    """Have transformers load a folder, and compare its names with those that its architecture saves.

    transformers loads some names that are not the Hub's, which others do not.  Errors as of
    `ckpt.verify.transformers_loads.check_loads`.
    """
    from ckpt.verify.transformers_loads import check_loads as check

    loading = check(path)
    if loading.good and registry.get("hf").find(path, None) is not None:
        checkpoint = open(path, "hf")
        if wrong := registry.service("name_differences")(checkpoint.config or {}, checkpoint.shapes):
            return replace(loading, problems=(f"names: {wrong}",))
    return loading


def _as_saved_adapters(a: Checkpoint, b: Checkpoint) -> tuple[Checkpoint, Checkpoint, list[str]]:
    """Both as they are, but a run's checkpoint against a PEFT folder: as PEFT would save its adapter."""
    from ckpt.state.adapter import is_adapter, under_saved_names

    sides, notes = [a, b], []
    for this, other in ((0, 1), (1, 0)):
        run, saved = sides[this], sides[other]
        if not saved.is_adapter or run.is_adapter or not is_adapter(fqn for fqn, _ in run.tensors):
            continue
        sides[this] = under_saved_names(run, {fqn for fqn, _ in saved.tensors})
        frozen = len({fqn for fqn, _ in run.tensors}) - len({fqn for fqn, _ in sides[this].tensors})
        if frozen:
            notes.append(f"the base model in {'AB'[this]}, {frozen} tensors, is not compared: {'AB'[other]} has none")
    return sides[0], sides[1], notes


def _with_computing_dtype(checkpoint: Checkpoint) -> Checkpoint:
    """`checkpoint` with the dtype that the run computes in as that of which its float32 weights are the masters."""
    if checkpoint.computes_in is None:
        return checkpoint
    dtype, tensors = checkpoint.computes_in[0], checkpoint.tensors
    return replace(
        checkpoint, tensors={k: replace(t, native=dtype) if k[1] == WEIGHT else t for k, t in tensors.items()}
    )


def _comparable(a: Checkpoint, b: Checkpoint) -> tuple[Checkpoint, Checkpoint]:
    """Both checkpoints under the same names: the Hub's, unless both have the same or their own model's."""
    spaces = {a.namespace, b.namespace}
    if spaces <= OF_THE_MODEL - {HUB}:
        return a, b
    if len(spaces) == 1 and HUB not in spaces:
        return registry.namespace(a.namespace).comparable(a, b)
    a, b = (replace(c, config=c.config or other.config) for c, other in ((a, b), (b, a)))
    return _as_hub(a), _as_hub(b)


def _as_hub(checkpoint: Checkpoint) -> Checkpoint:
    if checkpoint.namespace == OWN and checkpoint.config and checkpoint.config.get("model_type"):
        checkpoint = replace(checkpoint, namespace=TRANSFORMERS)
    return to_namespace(checkpoint, HUB)
