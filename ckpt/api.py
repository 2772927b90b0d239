"""Python functions for the commands."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from io import BufferedReader
from os import PathLike, fspath
from pathlib import Path
from time import monotonic
from typing import TYPE_CHECKING, Annotated, Any, Literal, overload

from ckpt.adapters import services as adapter_services
from ckpt.adapters.names import check_is_no_others, is_others
from ckpt.base.errors import CkptError, CorruptError, LossError, NotFoundError, SourceGoneError, UsageError, shown
from ckpt.base.flags import OptionGroup, check_types, others, takes
from ckpt.base.results import Returned
from ckpt.base.text import parse_size, pluralize, scheme_of, show_size
from ckpt.base.words import Keyword, Message, joined
from ckpt.containers.weights import missing_index
from ckpt.move.files import check_destination, is_inside_folder
from ckpt.move.listing import listed_once, names_in
from ckpt.plan import registry, services
from ckpt.plan.checkpoint import (
    BUFFER,
    HUB,
    MASTER,
    OWN,
    PART,
    TRANSFORMERS,
    WEIGHT,
    Checkpoint,
    Format,
    Key,
    Layout,
    ParamGroup,
)
from ckpt.plan.dtypes import CASTABLE, FLOAT32, DType
from ckpt.plan.groups import (
    Cast,
    Check,
    Comparison,
    Measuring,
    Only,
    OptionValue,
    Planning,
    Precision,
    Processes,
    Progress,
    ReadOptions,
    Selection,
    Sharding,
    Sides,
    Watching,
    WriteOptions,
)
from ckpt.plan.namespace import OF_THE_MODEL, TORCHTITAN
from ckpt.plan.options import MAX_SIZE, Option
from ckpt.runs.data_loaders import with_data_positions
from ckpt.runs.from_hub import cached_snapshot, is_repository
from ckpt.runs.half_checkpoints import check_holds_model
from ckpt.runs.opening import AUTO, open_checkpoint, warn_of_skipped
from ckpt.runs.output_place import check_place, place_notes
from ckpt.runs.sentence_modules import modules_in, trainers_prefix
from ckpt.state.kept_dtypes import check_casts, check_parts, quantized_parts, with_tensor_kinds, with_uncast_parts
from ckpt.state.kept_dtypes import check_place as check_quantized_place
from ckpt.state.naming import as_hub, to_namespace, with_trainers_prefix, without_wrappers
from ckpt.state.positions import with_step_count
from ckpt.state.same_model import difference
from ckpt.stores import placeholder_files
from ckpt.stores.placeholder_files import local
from ckpt.views.lazy import OpenCheckpoint

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from ckpt.compare.diff import Diff
    from ckpt.compare.digest import Digests
    from ckpt.compare.manifest import ManifestCheck
    from ckpt.compare.pairs import Report
    from ckpt.compare.quantized import QuantizedReport
    from ckpt.compare.training import RunReport
    from ckpt.compare.transformers_loads import Loading
    from ckpt.move.workers import FileDigests, Resources
    from ckpt.plan.keywords import (
        ConvertKeywords,
        DiffKeywords,
        MountKeywords,
        PlanKeywords,
        SidesKeywords,
        VerifyKeywords,
    )
    from ckpt.plan.planner import Plan
    from ckpt.processes.group import Alone
    from ckpt.views.files import Views
    from ckpt.views.mount import Mount

Source = str | PathLike[str] | Checkpoint

#: Resolved by `check_types`.
ReadOption = Annotated[OptionValue, registry.options_for_reading]

_RANKS = Option("world_size", int, None, "Number of ranks to write", min=1, max=MAX_SIZE)
_REPLICA = Option("replica", int, None, "Rank to read replicas from", min=0)
WORKERS = Option("workers", int, 0, "Threads that copy", min=0, max=256)


@check_types
def open(
    path: str | PathLike[str],
    format: str = AUTO,
    *,
    tag: str | None = None,
    config: str | PathLike[str] | None = None,
    replica: int | None = None,
    accept_settings: Sequence[str] | None = None,
    **options: ReadOption,
) -> OpenCheckpoint:
    """Describe the checkpoint at `path`, or the newest in a run folder, without reading tensor data.

    With a URL (`s3://bucket/run`, `hf://org/name`), only the needed bytes are fetched. The result's `notes` say how the
    checkpoint was found. Raises the errors of `ckpt.errors`.

    Args:
        path: The checkpoint or run folder, or its URL.
        format: The format to read; `auto` finds it.
        tag: The step's folder or number; None for the latest.
        config: The model's config: a folder, a config.json or a Hub id.
        replica: Rank to read replicas from.
        accept_settings: Recorded settings to ignore, even if the target can't hold them.
        **options: The format's read options. `adapter_slot="1:8:16"` selects a MultiLoRA adapter by slot, rank and
            alpha.
    """
    place = None if config is None else fspath(config)
    requested: dict[str, Any] = {"tag": tag, "config": place, "replica": replica, "options": options}
    requested["accept_settings"] = accept_settings
    return OpenCheckpoint.of(open_checkpoint(fspath(path), format, **requested))


def opened(source: Source, format: str = AUTO, **options: Any) -> Checkpoint:
    if not isinstance(source, Checkpoint):
        source = open(source, format, **options)
    else:
        requested = {"format": None if format == AUTO else format, **options}
        if given := [name for name, value in requested.items() if value is not None]:
            raise UsageError(f"{given[0]} has no effect on an open checkpoint", path=source.path)
    if source.unreadable is not None:
        raise source.unreadable
    return source


def _warn_if_opened(*sources: tuple[Source, Checkpoint]) -> None:
    """Warn of skipped newer checkpoints, unless the caller opened the source."""
    warn_of_skipped(*(checkpoint for source, checkpoint in sources if not isinstance(source, Checkpoint)))


def check_apart(destination: Path, checkpoint: Checkpoint) -> None:
    for place in (checkpoint.path, *checkpoint.given.places, *(file.path for file in checkpoint.files)):
        check_destination(destination, Path(place))
    for folder in checkpoint.folders:  # config folders too; output may lie inside them, but not replace them
        if is_inside_folder(Path(folder), destination):
            raise UsageError(
                "the destination contains files from the source",
                path=destination,
                found=folder,
                hint=Message("give another folder with {output}"),
            )


@listed_once()
def _check_replaceable(destination: Path, format: str) -> None:
    """Raise UsageError if `--overwrite` would delete a folder without a checkpoint, such as a home folder."""
    names = names_in(destination) if destination.is_dir() else []
    if not names:
        return
    for name in (format, *registry.names()):
        try:
            if registry.get(name).find(destination, None) is not None:
                return
        except CkptError:
            return  # a damaged checkpoint counts too
    raise UsageError(
        Message("the destination is not a checkpoint, and {overwrite=True} would delete its files"),
        path=destination,
        found=", ".join(names[:4]),
        hint=Message("give another folder with {output}, or remove this one first"),
    )


@contextmanager
def _naming_overflow(plan: Plan) -> Iterator[None]:
    """Name the tensor in the error about a number too large for its new dtype."""
    try:
        yield
    except LossError as error:
        from ckpt.move.finite import first_overflow

        if error.fqn is not None or (found := first_overflow(plan)) is None:
            raise
        raise found from None


def dequantized(checkpoint: Checkpoint, dtype: DType | None = None) -> Checkpoint:
    """Return `checkpoint` with plain weights instead of quantized ones.

    The values have the same bits as in transformers and bitsandbytes, in `dtype` (None: the model config's). Raise
    UsageError for an unknown quantization method, CorruptError if a weight lacks a part or contradicts itself.
    """
    if checkpoint.blocks:
        checkpoint = _with_finite_blocks(checkpoint)
    return replace(services.dequantizing.dequantized(checkpoint, dtype), blocks={})


def _with_finite_blocks(checkpoint: Checkpoint) -> Checkpoint:
    from ckpt.move.finite import with_finite_blocks  # imports numpy

    return with_finite_blocks(checkpoint)


@dataclass(frozen=True, repr=False)
class Conversion(Returned):
    """A proved plan, ready to run.

    `quantization` has the method and the rounding rule of `--quantize`, for the manifest. `must_be_finite` if NaN and
    infinity are refused.
    """

    plan: Plan
    resources: Resources
    format: str
    source: Checkpoint
    quantization: Mapping[str, str] = field(default_factory=dict, kw_only=True)
    must_be_finite: bool = field(default=False, kw_only=True)

    def to_json(self, destination: str | None = None) -> dict[str, Any]:
        """Return the report printed by `ckpt convert --dry-run --json`."""
        return self._report | {"destination": destination}

    @cached_property
    def _report(self) -> dict[str, Any]:
        """Report without its destination, created once because it lists the source's folders."""
        from ckpt.runs.plan_lines import plan_report

        return plan_report(self.plan, None, self.peak_buffers)

    def lines(self) -> list[str]:
        from ckpt.runs.plan_lines import plan_lines

        return plan_lines(self.to_json())

    def __repr__(self) -> str:
        size = show_size(self.plan.total_bytes)
        return f"<{shown(self.plan.checkpoint.path)} to {self.format}: {pluralize(len(self.files), 'file')}, {size}>"

    def check_destination(self, destination: Path) -> None:
        """Raise UsageError if `destination` overlaps an input, or if a trainer would mistake it for its own step."""
        check_apart(destination, self.plan.checkpoint)
        check_place(destination)

    @property
    def peak_buffers(self) -> int:
        """Upper bound in bytes for all buffers while it runs."""
        return self.resources.peak_buffers(self.plan)

    @property
    def files(self) -> tuple[str, ...]:
        """Target file names, relative to the folder."""
        return tuple(file.name for file in self.plan.target.files)

    def as_written(self) -> Checkpoint:
        """Describe the output. Cast and computed tensors are computed on reading."""
        from ckpt.compare.output_checks import as_written

        return as_written(self.plan, every_cast=True)

    @cached_property
    def views(self) -> Views:
        """The target's files, readable by offset from several threads."""
        from ckpt.views.files import Views

        return Views(self.plan, self.resources.max_memory)

    def open(self, name: str) -> BufferedReader:
        """Open a target file without writing it: its bytes are computed on reading.

        The file is read-only and seekable. Each thread opens its own. Replicas are not compared (`ckpt.verify` does).
        Raises NotFoundError if the target has no such file. Reading raises CorruptError if the source was replaced,
        LossError for a number too large for its new dtype, or StorageError.
        """
        return self.views.open(name)

    @check_types
    def run(
        self,
        destination: str | PathLike[str],
        *,
        overwrite: bool = False,
        restart: bool | Literal["stale"] = False,
        progress: Progress | None = None,
        manifest: bool = True,
        phase: Callable[[str, int], None] = lambda *_: None,
        check: bool = False,
        verify: bool = False,
        describe: Callable[[Path], Mapping[str, bytes]] = lambda _: {},
        group: Alone | None = None,
        say: Callable[[str], None] = lambda _: None,
    ) -> int:
        """Write the target to `destination`, which must not overlap the source.

        It continues an interrupted run, and returns the number of bytes already written. In a `group`, all processes
        call it.

        Args:
            destination: The folder or URL to write to.
            overwrite: Replace a checkpoint at `destination`.
            restart: Delete the files of an interrupted run first; "stale" deletes only files that can't be continued.
            progress: Called with the number of new bytes.
            manifest: Write digests to ckpt-manifest.json.
            phase: Called with each phase's name and bytes.
            check: First compare masters with the weights next to them.
            verify: Read back and compare every bit before moving the output to `destination`.
            describe: Returns more files for the written folder: their content by name.
            group: The processes that each write their share.
            say: Called with each note.
        """
        from ckpt.move.run import execute
        from ckpt.processes.group import Alone

        place = Path(destination) if scheme_of(destination) is None else placeholder_files.place(str(destination))
        self.check_destination(place)
        for note in place_notes(place):
            say(note)
        if verify and self.plan.target.is_rearranged:
            raise UsageError(
                Message("{verify=True} compares tensors by name, and this layout changes the names"),
                hint="leave it out; the manifest has the digests",
            )
        what: dict[str, Any] = {
            "progress": progress,
            "check": partial(self._check_source, check),
            "describe": partial(self._described, describe, manifest),
        }
        if placeholder_files.is_standin(str(place)):
            from ckpt.stores.upload import upload

            for requested, is_given in (
                (Message("{overwrite=True}"), overwrite),
                (Message("{restart=True}"), restart),
                (Message("{verify=True}"), verify),
            ):
                if is_given:
                    raise UsageError(requested + " works on local folders only, not on a store", path=place)
            if group is not None and group.size > 1:
                raise UsageError(f"only one process can write to a store, and there are {group.size}", path=place)
            phase("move", self.plan.moved_bytes)
            with _naming_overflow(self.plan):
                upload(self.plan, self.views, place, hashing=manifest, **what)
            return 0
        if overwrite and (group is None or group.rank == 0):
            _check_replaceable(place, self.format)
        try:
            what |= {"phase": phase, "say": say}
            if verify:
                what["verify"] = partial(self._check_written, phase)

            def run(group: Alone, number: int) -> int:
                what.update(group=group, resources=self.resources.part(number))
                return execute(self.plan, place, overwrite=overwrite, restart=restart, **what)

            with _naming_overflow(self.plan):
                return (group or Alone()).share(run, self.resources.num_processes(self.plan))
        except (CorruptError, NotFoundError) as error:
            try:
                for file in self.plan.sources:
                    file.check_unchanged()  # a file replaced in the meantime explains any other error
            except SourceGoneError as gone:
                vars(gone)["__notes__"] = [*getattr(error, "__notes__", ())]  # keep the note with the output's path
                raise
            raise

    def write(
        self, output: str | PathLike[str], *, manifest: bool = True, verify: bool = False, **options: Any
    ) -> Converted:
        """Run with the same options as `run`."""
        start = monotonic()
        num_done = self.run(output, manifest=manifest, verify=verify, **options)
        return Converted(fspath(output), self, manifest, verify, monotonic() - start, num_done)

    def _check_source(self, masters: bool) -> None:
        if masters:
            from ckpt.compare.compare import check_masters

            check_masters(self.plan.checkpoint)
        if any(tensor.replicas for tensor in self.plan.checkpoint.tensors.values()):
            from ckpt.compare.compare import check_replicas_of

            check_replicas_of(self.plan.checkpoint, self._written_keys())
        if self.must_be_finite:
            from ckpt.move.values import check_finite

            checkpoint = self.plan.checkpoint
            check_finite(
                {key: checkpoint.tensors[key] for key in self._written_keys() if key[1] != BUFFER},
                checkpoint.computed,
                checkpoint.path,
                parts=frozenset(fqn for fqn, why in checkpoint.uncast.items() if why == PART),
            )

    def _written_keys(self) -> Iterator[Key]:
        return (slot.key for file in self.plan.target.files for slot in file.slots)

    def _check_written(self, phase: Callable[[str, int], None], folder: Path, progress: Progress) -> None:
        """Raise CkptError if `folder` differs from the source."""
        from ckpt.compare.compare import check_replicas_of
        from ckpt.compare.output_checks import as_written, changed_files, has_more, is_as_the_source, is_equal

        what = "what was written is not what the source holds, and is removed"
        if changed := [*changed_files(self.plan, folder)]:
            raise CkptError(what, path=folder, found="; ".join(changed[:4]))
        # Blocks of quantized states are tensors in a plan, and states when they are read.
        has_blocks = self.source.quantized.blocks and registry.get(self.format).carries_optimizer
        source = self.source if has_blocks else as_written(self.plan)
        how: dict[str, Any] = {"progress": progress, "expected": partial(phase, "verify")}
        written = OpenCheckpoint.of(open_checkpoint(folder, self.format, unfinished=True))
        report = verify(source, written, cast=bool(self.plan.casts), **how)
        check_replicas_of(written)
        if has_more(report):  # computed tensors have no partner in the source
            for name in self.files:
                with self.open(name) as view:
                    if not is_equal(view, folder / name):
                        raise CkptError(what, path=folder, found=f"{name} has other bytes")
        if not is_as_the_source(report):
            raise CkptError(what, path=folder, found="; ".join([report.outcome, *report.lines()][:4]))

    def _described(
        self, describe: Callable[[Path], Mapping[str, bytes]], manifest: bool, folder: Path, digests: FileDigests
    ) -> dict[str, bytes]:
        files = dict(describe(folder))
        if manifest:
            from ckpt.compare.manifest import MANIFEST, make_manifest
            from ckpt.move.file_pieces import digest_of_bytes

            digests = {**digests, **{name: digest_of_bytes(content) for name, content in files.items()}}
            files[MANIFEST] = make_manifest(folder, registry.get(self.format), digests, self.quantization)
        return files


@takes(Planning, others=OptionValue)
@listed_once()
def plan(
    source: Source,
    to: str,
    layout: Layout | None = None,
    resources: Resources | None = None,
    *,
    format: str = AUTO,
    **options: Unpack[PlanKeywords],
) -> Conversion:
    """Plan the conversion of `source` to the format `to`, and prove it complete, without writing anything.

    Options match `ckpt convert`. Raises LossError if a tensor would be lost or stay empty in the target, UsageError for
    wrong options.

    Args:
        source: A path, a URL or the result of `ckpt.open`.
        to: The format to write.
        layout: A layout of your own, in place of the options.
        resources: Memory and threads, in place of `max_memory` and `workers`.
        format: The format to read; `auto` finds it.
        tag: The step's folder or number; None for the latest.
        config: The model's config: a folder, a config.json or a Hub id.
        replica: Rank to read replicas from.
        accept_settings: Recorded settings to ignore.
        complete_from: A model with the tensors that the run lacks.
        dtype: Dtype of the weights: `keep`, `fp32`, `bf16` or `fp16`.
        dequantize: Write the plain values of quantized weights.
        quantize: Quantization method for attention and MLP weights.
        like: Quantized model with the quantization to copy.
        optimizer_dtype: `keep`, or `fp32` for the plain values of quantized states.
        max_shard_size: Largest weight file, in bytes or as `5GB`.
        world_size: Number of ranks in a sharded target; None for the source's.
        max_memory: Limit for all buffers, in bytes or as `512MB`.
        workers: Number of copying threads; 0 chooses.
        **options: The target format's options, such as `tp=2`, and read options.
    """
    from ckpt.move.workers import Resources
    from ckpt.plan.planner import make_plan  # imports numpy; describing a checkpoint doesn't need it

    requested, of_format = Planning.of(options), others(options, Planning)
    reading: dict[str, Any] = {name: of_format.pop(name) for name in of_format.keys() & registry.options_for_reading()}
    reading |= vars(ReadOptions.of(options))
    wanted = Layout(
        CASTABLE.get(requested.dtype),
        parse_size(requested.max_shard_size),
        requested.world_size,
        of_format,
        requested.quantize,
    )
    if layout is not None and wanted != Layout():
        raise UsageError("give a layout or options, not both", found=f"{layout} and options")
    layout = layout or wanted
    resources = resources or Resources(parse_size(requested.max_memory), requested.workers)
    for one, value in ((_RANKS, requested.world_size), (_REPLICA, requested.replica), (WORKERS, requested.workers)):
        if value is not None:
            one.check(value)
    target = registry.get(to)
    if not target.writes:
        written = ", ".join(one.name for one in registry.all_formats() if one.writes)
        raise UsageError(
            f"the format {to!r} cannot be written", expected=f"one of {written}", hint="see `ckpt formats`"
        )
    registry.check_layout(target, layout)  # reading the source may take long
    if requested.like is not None and not (layout.quantize and target.carries_quantized):
        raise UsageError(
            Message("{like} needs {quantize=METHOD}, and a format with quantized weights"), found=f"format {to}"
        )
    checkpoint = opened(source, format, **reading)
    check_holds_model(checkpoint)
    if target.carries_optimizer and is_others({fqn for fqn, _ in checkpoint.tensors}):
        check_is_no_others(checkpoint)
    if requested.dequantize:
        checkpoint = dequantized(checkpoint, layout.dtype)
    elif checkpoint.blocks:
        checkpoint = _with_finite_blocks(checkpoint)
    if services.quantization.is_quantized(checkpoint):
        check_parts(checkpoint)
        check_quantized_place(checkpoint, target)
    added: tuple[str, ...] = ()
    quantization: dict[str, str] = {}
    if requested.complete_from is not None:
        done = _completed(replace(checkpoint, notes=()), requested.complete_from, target)
        added, checkpoint = done.notes, replace(done, notes=checkpoint.notes)
    if requested.optimizer_dtype == "fp32":
        _check_holds_optimizer(target, Message("{optimizer_dtype}"))
        checkpoint = checkpoint.with_plain_states()
    # Writers see no notes, so the renaming's notes are new.
    if target.carries_optimizer:
        _check_states_are_plain(checkpoint, target, layout)
    named = replace(checkpoint, notes=())
    if target.loads_from == "step" or target.namespace != TRANSFORMERS:  # DeepSpeed's engine keeps its model's wrappers
        named = without_wrappers(named)
    named = to_namespace(named, _namespace(target, layout), layout)
    renamed = named.notes
    if target.loads_from == "run":
        named, counted_step = with_step_count(named)
        renamed += counted_step
    if layout.world_size is not None:
        named, moved = with_data_positions(named, layout.world_size)
        renamed += moved
    named = with_tensor_kinds(named, layout)
    if layout.quantize is not None and target.carries_quantized:
        run_dtype = named.computes_in and named.computes_in.dtype
        like = None if requested.like is None else _quantized_model(requested.like, named)
        quantization = {"method": layout.quantize, "rule": services.quantizing.rule(named, layout.quantize)}
        named = services.quantizing.quantized(named, layout.quantize, layout.dtype or run_dtype, like)
        if like is not None:
            quantization["like"] = "rows with unchanged values have the original's bytes"
        check_parts(named)
        added += named.notes
        named = replace(named, notes=())
    is_quantized = services.quantization.is_quantized(named)
    if is_quantized:
        named = with_uncast_parts(named, layout)
    if target.namespace == TRANSFORMERS:
        is_run = target.splits_modules or named.optimizer_states or named.state.param_groups
        # Without an optimizer, the files may be loaded as a model, by its own names.
        prefix, inner = trainers_prefix(named.folders) if is_run else None, (*modules_in(named.folders),)
        named = with_trainers_prefix(replace(named, notes=()), prefix, inner, splits_modules=target.splits_modules)
        renamed += named.notes
    laid_out = target.lay_out(replace(named, notes=()), layout)
    if layout.quantize is not None and laid_out.rule:
        quantization = {"method": layout.quantize, "rule": laid_out.rule}
    if is_quantized:
        check_casts(named, laid_out)
    unread = checkpoint.unread if target.carries_optimizer else ()
    if not target.carries_optimizer and any(map(_is_at_gradients_point, checkpoint.state.param_groups)):
        note = (
            "the run's schedule-free optimizer was in training mode: these are the weights for gradients, "
            "not the averages for evaluation (save after optimizer.eval() to get the averages)"
        )
        laid_out = replace(laid_out, notes=(*laid_out.notes, note))
    laid_out = replace(laid_out, notes=(*added, *renamed, *laid_out.notes), dropped=(*laid_out.dropped, *unread))
    if named.quantized.blocks and target.carries_optimizer:
        named = services.stored_states.as_stored(named)
    made = make_plan(named, laid_out, carries_optimizer=target.carries_optimizer)
    how: dict[str, Any] = {"quantization": quantization, "must_be_finite": layout.quantize is not None}
    return Conversion(made, resources, to, checkpoint, **how)


def _quantized_model(source: Source, checkpoint: Checkpoint) -> Checkpoint:
    """Return the model at `source`, maybe a cached Hub id. Raise UsageError unless its architecture is the same."""
    is_cached = isinstance(source, str) and is_repository(source)
    found = opened(cached_snapshot(str(source), None) if is_cached else source)
    if (differing := difference(checkpoint.config, found.config)) is not None:
        key, one, other = differing
        what, expected = Message("{like} names another model"), f"{key} {one}"
        raise UsageError(what, path=found.path, expected=expected, found=f"{key} {other}")
    return found


def _completed(checkpoint: Checkpoint, source: Source, target: Format) -> Checkpoint:
    """Raise UsageError if the model at `source` does not match."""
    from ckpt.state.base_completion import completed

    if target.carries_optimizer or target.name == "peft":
        raise UsageError(
            Message("{complete_from} writes models only, not format {!r}", target.name),
            hint="convert to hf first, then convert the result",
            code="option-not-taken",
        )
    base = opened(source)
    if quantized_parts(base) and not quantized_parts(checkpoint):
        raise UsageError(
            "can't combine a quantized base with a run in plain dtypes",
            path=base.path,
            hint=f"`ckpt convert auto hf {shlex.quote(base.path)} --dequantize` makes a plain base; give that",
        )
    return completed(checkpoint, base)


@dataclass(frozen=True, repr=False)
class Converted(Returned):
    """Result of a conversion. `num_done` bytes were there already."""

    path: str
    conversion: Conversion
    has_manifest: bool
    verified: bool
    seconds: float
    num_done: int

    def __repr__(self) -> str:
        return f"<{shown(self.path)}: {self.conversion.format}, written>"

    def to_json(self) -> dict[str, Any]:
        return self.conversion.to_json(self.path)

    def lines(self, verbose: bool = False) -> list[str]:
        from ckpt.runs.plan_lines import load_lines

        return [*self.outcome(verbose), *load_lines(self.to_json())]

    def outcome(self, verbose: bool = False) -> list[str]:
        """Return lines on lost, unread and written data."""
        from ckpt.runs.plan_lines import model_dtypes, output_lines

        how: dict[str, Any] = {"seconds": self.seconds, "num_done": self.num_done, "verified": self.verified}
        how |= {"has_manifest": self.has_manifest, "verbose": verbose}
        return output_lines(self.to_json(), model_dtypes(self.conversion.plan), **how)


@takes(Planning, Check, WriteOptions, Watching, Processes, others=OptionValue)
def convert(
    source: Source,
    to: str,
    output: str | PathLike[str],
    *,
    format: str = AUTO,
    **options: Unpack[ConvertKeywords],
) -> Converted:
    """Convert `source` to the format `to` and write it to `output`, a folder or a URL.

    This combines `ckpt.plan` and `Conversion.run`. Raises the errors of `ckpt.errors`.

    Args:
        source: A path, a URL or the result of `ckpt.open`.
        to: The format to write.
        output: The folder or URL to write to.
        format: The format to read; `auto` finds it.
        tag: The step's folder or number; None for the latest.
        config: The model's config: a folder, a config.json or a Hub id.
        replica: Rank to read replicas from.
        accept_settings: Recorded settings to ignore.
        complete_from: A model with the tensors that the run lacks.
        dtype: Dtype of the weights: `keep`, `fp32`, `bf16` or `fp16`.
        dequantize: Write the plain values of quantized weights.
        quantize: Quantization method for attention and MLP weights.
        like: Quantized model with the quantization to copy.
        optimizer_dtype: `keep`, or `fp32` for the plain values of quantized states.
        max_shard_size: Largest weight file, in bytes or as `5GB`.
        world_size: Number of ranks in a sharded target; None for the source's.
        max_memory: Limit for all buffers, in bytes or as `512MB`.
        workers: Number of copying threads; 0 chooses.
        check: First compare float32 masters with the weights next to them.
        manifest: Write digests to ckpt-manifest.json.
        overwrite: Replace a checkpoint at `output`.
        restart: Delete an interrupted run's files, and start again.
        verify: Read back and compare every bit.
        progress: Called with the number of new bytes.
        phase: Called with each phase's name and bytes.
        say: Called with each note.
        planned: Called with the proved `Conversion`, before writing.
        group: The processes that each write their share.
        **options: The target format's options, such as `tp=2`, and read options.
    """
    with listed_once():
        conversion = plan(source, to, format=format, **others(options, Check, WriteOptions, Watching, Processes))
        conversion.to_json()  # also lists the source's folders
    if Watching.of(options).planned is None:
        _warn_if_opened((source, conversion.source))
    how = {**vars(Check.of(options)), **vars(WriteOptions.of(options)), **vars(Processes.of(options))}
    return conversion.write(output, **how, **Watching.of(options).callbacks(conversion))


def _is_at_gradients_point(group: ParamGroup) -> bool:
    """Return True if parameters are at schedulefree's training point (1.4, `AdamWScheduleFree.train`)."""
    return group.options.get("train_mode") is True and "weight_sum" in group.options


def _check_states_are_plain(checkpoint: Checkpoint, target: Format, layout: Layout) -> None:
    to, has_place = target.name, target.carries_blocks
    is_renamed = _namespace(target, layout) not in (None, checkpoint.namespace) and checkpoint.namespace != OWN
    methods = checkpoint.quantized.methods
    if not methods or (has_place and not is_renamed and checkpoint.quantized.blocks.keys() == methods.keys()):
        return
    (fqn, state), method = next(iter(methods.items()))
    raise LossError(
        f"{to} can't hold optimizer states quantized in blocks",
        path=checkpoint.path,
        fqn=fqn,
        found=f"{state} of {method}, and {len(methods) - 1} others",
        hint=Message("{optimizer_dtype=fp32} writes the values the optimizer computes from them"),
    )


def _namespace(target: Format, layout: Layout) -> str | None:
    """Return the namespace to write, or raise UsageError."""
    names = layout.options.get("names")
    if target.namespace == TRANSFORMERS and names == TORCHTITAN:
        return TORCHTITAN
    if names is not None and (target.namespace != HUB or names == TORCHTITAN):
        raise UsageError(
            f"the format {target.name!r} cannot be written under these names",
            found=Message("{names}", names=names),
            hint=Message("leave {names} out"),
        )
    if layout.options.get("flat_optimizer"):
        _check_holds_optimizer(target, Message("{flat_optimizer=True}"))
    return target.namespace


def _check_holds_optimizer(target: Format, option: str) -> None:
    if not target.carries_optimizer:
        raise UsageError(
            f"the format {target.name!r} holds no optimizer", found=option, hint=Message("leave {} out", option)
        )


def digests(checkpoint: Checkpoint, **options: Any) -> Digests:
    """Return digests under Hub names, or an unknown model's own names."""
    from ckpt.compare.digest import digests as digests_as_named
    from ckpt.compare.skipped_content import not_hashed

    named = as_hub(without_wrappers(checkpoint))
    layout = Layout(options.get("dtype"))
    named = with_uncast_parts(with_tensor_kinds(named, layout), layout)
    found = digests_as_named(named, names=services.ties.kept_names(named), **options)
    return replace(found, not_hashed=tuple(not_hashed(checkpoint, named)))


@takes(Selection, Precision, Sharding, others=OptionValue)
def mount(
    source: str | PathLike[str],
    to: str = "hf",
    view: str | PathLike[str] | None = None,
    **options: Unpack[MountKeywords],
) -> Mount:
    """Show a checkpoint as a read-only folder in the format `to`, without copying.

    A `with` block gets the folder; `serve` shows it until it is unmounted. Options match `ckpt.plan`. Raises its
    errors, NotFoundError without FUSE, and StorageError if mounting fails.

    Args:
        source: A path or a URL.
        to: The format to write.
        view: An empty or new folder to show it in; None for a temporary one.
        format: The format to read; `auto` finds it.
        tag: The step's folder or number; None for the latest.
        config: The model's config: a folder, a config.json or a Hub id.
        accept_settings: Recorded settings to ignore.
        dtype: Dtype of the weights: `keep`, `fp32`, `bf16` or `fp16`.
        dequantize: Write the plain values of quantized weights.
        quantize: Quantization method for attention and MLP weights.
        like: Quantized model with the quantization to copy.
        max_shard_size: Largest weight file, in bytes or as `5GB`.
        world_size: Number of ranks in a sharded target; None for the source's.
        **options: The target format's options, such as `tp=2`, and read options.
    """
    from ckpt.views.mount import Mount, library

    library()
    conversion = plan(source, to, **options)
    given: dict[str, Any] = dict(options)
    accepted = given.pop("accept_settings", None) or ()
    requested = {name: value for name, value in given.items() if value is not None and value is not False}
    flags = [
        f"--{name.replace('_', '-')}" + ("" if value is True else f"={value}") for name, value in requested.items()
    ]
    flags += [f"--accept-setting={name}" for name in accepted]
    words = ["mount", *flags, "--foreground", "--quiet", to, fspath(source)]
    return Mount(conversion, None if view is None else Path(view), words)


@check_types
def hash(
    source: Source,
    format: str = AUTO,
    *,
    tag: str | None = None,
    config: str | PathLike[str] | None = None,
    accept_settings: Sequence[str] | None = None,
    dtype: Cast = "keep",
    workers: int = 0,
    progress: Progress | None = None,
) -> Digests:
    """Compute digests of a checkpoint's contents, independent of format, sharding and file order.

    Raises the errors of `ckpt.errors`.

    Args:
        source: A path, a URL or the result of `ckpt.open`.
        format: The format to read; `auto` finds it.
        tag: The step's folder or number; None for the latest.
        config: The model's config: a folder, a config.json or a Hub id.
        accept_settings: Recorded settings to ignore.
        dtype: Dtype of the hashed weights: `keep`, or `fp32`, `bf16` or `fp16` as cast by `ckpt.convert`.
        workers: Number of reading threads; 0 chooses.
        progress: Called with the number of new bytes.
    """
    WORKERS.check(workers)
    checkpoint = opened(source, format, tag=tag, config=config, accept_settings=accept_settings)
    _warn_if_opened((source, checkpoint))
    return digests(checkpoint, dtype=CASTABLE.get(dtype), workers=workers, progress=progress)


@overload
def verify(
    a: Source,
    b: Source,
    *,
    measured: bool = ...,
    run: Literal[False] = ...,
    **options: Unpack[VerifyKeywords],
) -> Report: ...
@overload
def verify(a: Source, b: Source, *, quantized: Literal[True], **options: Unpack[VerifyKeywords]) -> QuantizedReport: ...
@overload
def verify(a: Source, b: Source, *, run: Literal[True], **options: Unpack[SidesKeywords]) -> RunReport: ...
@overload
def verify(a: str | PathLike[str], *, progress: Progress | None = ...) -> ManifestCheck: ...
@overload
def verify(a: str | PathLike[str], *, loads: Literal[True]) -> Loading: ...
@takes(Comparison, Sides, Measuring)
def verify(
    a: Source,
    b: Source | None = None,
    *,
    measured: bool = False,
    run: bool = False,
    quantized: bool = False,
    loads: bool = False,
    **options: Unpack[VerifyKeywords],
) -> Report | RunReport | QuantizedReport | ManifestCheck | Loading:
    """Compare two checkpoints in any formats, tensor by tensor and bit by bit, or the folder `a` with its manifest.

    A training checkpoint's float32 master or weight is rounded to match the other side's 16-bit weight, as in
    `ckpt.convert`.

    Raises the errors of `ckpt.errors`.

    Args:
        a: The first checkpoint: a path, a URL or the result of `ckpt.open`.
        b: The second checkpoint; None compares the folder `a` with its manifest.
        measured: Add the size of each difference.
        run: Compare training states instead of tensors: schedule, scaler, random states, data position.
        quantized: Measure a quantized model's rounding errors against the plain model.
        loads: Let transformers load `a`, without data.
        only: `all`, `weights` or `optimizer`.
        cast: Round the wider of two floating-point dtypes to the narrower first.
        exact: Round nothing.
        from_a: The format of `a`.
        from_b: The format of `b`.
        tag_a: The step of `a`.
        tag_b: The step of `b`.
        config: The model's config: a folder, a config.json or a Hub id.
        accept_settings: Recorded settings to ignore.
        progress: Called with the number of new bytes.
        expected: Called first with the total number of bytes.
    """
    how, sides, measuring = Comparison.of(options), Sides.of(options), Measuring.of(options)
    check_goes_together(a, b, how, sides, run=run, loads=loads, quantized=quantized)
    if b is None:
        place = local(a.path if isinstance(a, Checkpoint) else a)
        from ckpt.compare.manifest import check

        return check_loads(place) if loads else check(place, measuring.progress)
    from ckpt.compare.pairs import verify as verify_same_names
    from ckpt.compare.skipped_content import not_tensors

    with listed_once():
        one, other = open_sides(a, b, sides)
        _warn_if_opened((a, one), (b, other))
        if run:
            return verify_runs(one, other)
        beside = list(not_tensors(one, other))
    if quantized:
        return _verify_quantized(one, other, beside, **vars(how), **vars(measuring))
    one, other, notes = _as_pair(one, other)
    report = verify_same_names(one, other, measured=measured, **vars(how), **vars(measuring))
    return replace(report, notes=(*report.notes, *notes, *beside))


def _verify_quantized(a: Checkpoint, b: Checkpoint, beside: Sequence[str], **options: Any) -> QuantizedReport:
    """Raise UsageError unless one side is quantized and the other is not."""
    from ckpt.compare.quantized import verify_quantized

    sides = [a, b]
    are_quantized = [bool(quantized_parts(side) or side.blocks) for side in sides]
    if are_quantized[0] == are_quantized[1]:
        raise UsageError(
            Message("{quantized=True} compares a quantized model with the plain one"),
            expected="one side with quantized weights",
            found="two" if are_quantized[0] else "none",
            hint=Message("leave {quantized=True} out to compare bit by bit"),
        )
    is_b = are_quantized[1]
    if sides[is_b].blocks:
        return _verify_blocks(sides, is_b, beside, **options)
    weights = services.rounding.rounded_weights(sides[is_b])
    stored = {fqn for fqn, _ in sides[is_b].tensors}
    sides[is_b] = dequantized(sides[is_b], FLOAT32)
    kept = {fqn for fqn, _ in sides[is_b].tensors}.union(*(weight.parts for weight in weights.values()))
    sides[not is_b], num_masters = _without_masters(sides[not is_b])
    one, other, notes = _as_pair(*sides)
    report = verify_quantized(one, other, weights, is_b, **options)
    if num_masters:
        notes.append(f"{pluralize(num_masters, 'master')} not compared: the weights next to them were")
    if unused := sorted(stored - kept):
        notes.append(f"{pluralize(len(unused), 'scale')} for activations not compared, for example {unused[0]}")
    return replace(report, notes=(*report.notes, *notes, *beside))


def _verify_blocks(sides: list[Checkpoint], is_b: bool, beside: Sequence[str], **options: Any) -> QuantizedReport:
    from ckpt.compare.quantized import verify_quantized

    blocks, plain = sides[is_b], without_wrappers(_without_masters(sides[not is_b])[0])
    sides[not is_b] = to_namespace(replace(plain, config=plain.config or blocks.config), blocks.namespace)
    a, b = registry.namespace(blocks.namespace).comparable(*map(_with_computing_dtype, sides))
    report = verify_quantized(a, b, services.rounding.rounded_blocks(blocks), is_b, **options)
    return replace(report, notes=(*report.notes, *_new_notes(sides, (a, b)), *beside))


def _without_masters(checkpoint: Checkpoint) -> tuple[Checkpoint, int]:
    tensors = checkpoint.tensors
    kept = {(fqn, role): t for (fqn, role), t in tensors.items() if role != MASTER or (fqn, WEIGHT) not in tensors}
    return replace(checkpoint, tensors=kept), len(tensors) - len(kept)


@takes(Sides, Measuring)
def diff(
    a: Source,
    b: Source,
    *,
    only: Only = "all",
    rtol: float | None = None,
    atol: float | None = None,
    **options: Unpack[DiffKeywords],
) -> Diff:
    """Measure the changes from `a` to `b`, in any formats: relative error, cosine and largest change.

    Different dtypes are compared as numbers, without rounding. With `rtol` or `atol`, elements may differ by `atol +
    rtol * abs(a)`, and the result's `within` is True if all do.

    Raises the errors of `ckpt.errors`.

    Args:
        a: The first checkpoint: a path, a URL or the result of `ckpt.open`.
        b: The second checkpoint.
        only: `all`, `weights` or `optimizer`.
        rtol: Relative tolerance.
        atol: Absolute tolerance.
        from_a: The format of `a`.
        from_b: The format of `b`.
        tag_a: The step of `a`.
        tag_b: The step of `b`.
        config: The model's config: a folder, a config.json or a Hub id.
        accept_settings: Recorded settings to ignore.
        progress: Called with the number of new bytes.
        expected: Called first with the total number of bytes.
    """
    from ckpt.compare.changes import Tolerance
    from ckpt.compare.diff import diff as diff_same_names

    one, other = open_sides(a, b, Sides.of(options))
    _warn_if_opened((a, one), (b, other))
    one, other, notes = _as_pair(one, other)
    tolerance = None if rtol is None and atol is None else Tolerance(rtol or 0.0, atol or 0.0)
    found = diff_same_names(one, other, only=only, tolerance=tolerance, **vars(Measuring.of(options)))
    return replace(found, notes=(*found.notes, *notes))


def open_sides(a: Source, b: Source, sides: Sides) -> tuple[Checkpoint, Checkpoint]:
    both: dict[str, Any] = {"config": sides.config, "accept_settings": sides.accept_settings}
    return opened(a, sides.from_a, tag=sides.tag_a, **both), opened(b, sides.from_b, tag=sides.tag_b, **both)


def check_goes_together(
    a: Source, b: Source | None, how: Comparison, sides: Sides, *, run: bool, loads: bool, quantized: bool = False
) -> None:
    if quantized and (b is None or run or loads or how.only == "optimizer"):
        raise UsageError(
            Message("{quantized=True} needs two models, without {run=True}, {loads=True} or {only=optimizer}")
        )
    if how.cast and how.exact:
        raise UsageError(Message("{cast=True} rounds, and {exact=True} forbids rounding"), hint="give only one")
    if run and (b is None or loads or how != Comparison()):
        raise UsageError(
            Message(
                "{run=True} needs two runs or checkpoints, without {only}, {cast=True}, {exact=True} or {loads=True}"
            )
        )
    if loads and b is not None:
        raise UsageError(Message("{loads=True} takes one folder"), found=f"{a} and {b}")
    path = a.path if isinstance(a, Checkpoint) else fspath(a)
    if loads and (scheme_of(path) is not None or placeholder_files.is_standin(path)):
        raise UsageError(
            "transformers itself loads local folders only",
            path=path,
            hint=f"`ckpt convert auto hf {path} -o FOLDER` makes a local one",
        )
    if b is None and not loads:
        differing = {**_differing(how), **_differing(sides)}
        if of_two := joined(" ", (Message("{}", Keyword.without_value(*one)) for one in differing.items())):
            what = "these options need two checkpoints: a single folder is compared with its manifest"
            raise UsageError(what, path=path, found=of_two, hint="give a second checkpoint, or leave them out")


def _differing(group: OptionGroup) -> dict[str, Any]:
    usual = vars(type(group)())
    return {name: value for name, value in vars(group).items() if value != usual[name]}


def verify_runs(a: Checkpoint, b: Checkpoint) -> RunReport:
    from ckpt.compare.training import compare_runs

    return compare_runs(a, b)


def prove_names(path: Path) -> None:
    """Prove that a model folder has its architecture's names and shapes, or that PEFT loads an adapter's names.

    Other folders and configs without an architecture pass. Raise LossError for any difference, UsageError for an
    unknown architecture.
    """
    if not path.is_dir():
        return
    adapter_services.names.prove_names(path)
    if registry.get("hf").find(path, None) is None:
        return
    checkpoint = open(path, "hf")
    if checkpoint.config is None:
        raise LossError(
            "from_pretrained cannot load this folder: config.json is missing",
            path=path,
            hint=Message(
                "copy the model's config.json into it, or convert again with {config=ORG/NAME} {overwrite=True}; "
                "{names=own} pushes it without"
            ),
        )
    for file in checkpoint.files:
        if missing := missing_index(Path(file.path)):
            raise LossError(
                f"from_pretrained cannot load this folder: {missing} is missing",
                path=Path(file.path).parent,
                hint=Message(
                    "copy it into the folder, or write it with `ckpt convert hf hf {}`; {names=own} pushes without it",
                    shlex.quote(str(path)),
                ),
            )
    config = checkpoint.config
    if config.get("model_type") or config.get("architectures"):
        weights = services.quantization.quantized_weights(checkpoint)
        check_parts(checkpoint)
        services.proof.prove(config, weights.in_place(checkpoint.shapes), str(path))


def check_loads(path: Path) -> Loading:
    """Let transformers load a folder, and compare its names with its architecture's.

    Loading proves little: transformers accepts names that other tools do not.
    """
    from ckpt.compare.transformers_loads import check_loads as check

    loading = check(path)
    if loading.good and registry.get("hf").find(path, None) is not None:
        checkpoint = open(path, "hf")
        weights = services.quantization.quantized_weights(checkpoint)
        if faults := weights.faults:
            return replace(loading, problems=tuple(map(str, faults)))
        unknown = [why for why in (weights.unproved, weights.untried) if why]
        loading = replace(loading, looked_at=(*loading.looked_at, *unknown))
        if wrong := services.proof.differences(checkpoint.config or {}, weights.in_place(checkpoint.shapes)):
            return replace(loading, problems=(f"names: {wrong}",))
    return loading


def _as_pair(a: Checkpoint, b: Checkpoint) -> tuple[Checkpoint, Checkpoint, list[str]]:
    a, b, notes = _as_saved_adapters(a, b)
    pair = _comparable(a, b)
    if {one.namespace for one in pair} == {a.namespace, b.namespace}:  # no names were converted
        notes += _new_notes((a, b), pair)
    a, b = map(_with_computing_dtype, pair)
    return a, b, notes


def _new_notes(before: Sequence[Checkpoint], after: Sequence[Checkpoint]) -> list[str]:
    known = {note for side in before for note in side.notes}
    return [note for side in after for note in side.notes if note not in known]


def _as_saved_adapters(a: Checkpoint, b: Checkpoint) -> tuple[Checkpoint, Checkpoint, list[str]]:
    """Let a run next to a PEFT folder become the adapter that PEFT would save."""
    from ckpt.adapters.names import is_adapter, under_saved_names

    sides, notes = [a, b], []
    for this, other in ((0, 1), (1, 0)):
        run, saved = sides[this], sides[other]
        if not saved.is_adapter or run.is_adapter or not is_adapter(fqn for fqn, _ in run.tensors):
            continue
        sides[this] = under_saved_names(run, {fqn for fqn, _ in saved.tensors})
        frozen = len({fqn for fqn, _ in run.tensors}) - len({fqn for fqn, _ in sides[this].tensors})
        if frozen:
            notes.append(
                f"the base model in {'AB'[this]}, {pluralize(frozen, 'tensor')}, is not compared: "
                f"{'AB'[other]} has none"
            )
    return sides[0], sides[1], notes


def _with_computing_dtype(checkpoint: Checkpoint) -> Checkpoint:
    dtype, tensors = checkpoint.computes_in and checkpoint.computes_in.dtype, checkpoint.tensors
    if dtype is None:
        return checkpoint
    return replace(
        checkpoint, tensors={k: t._replace(native=dtype) if k[1] == WEIGHT else t for k, t in tensors.items()}
    )


def _without_one_prefix(a: Checkpoint, b: Checkpoint) -> tuple[Checkpoint, Checkpoint]:
    """Remove the prefix of sentence-transformers' trainer if one side has it."""
    prefix = trainers_prefix((*a.folders, *b.folders))
    plain_a, plain_b = (with_trainers_prefix(one, prefix, (), splits_modules=True) for one in (a, b))
    return (plain_a, plain_b) if (plain_a is a) != (plain_b is b) else (a, b)


def _comparable(a: Checkpoint, b: Checkpoint) -> tuple[Checkpoint, Checkpoint]:
    """Use the Hub's names, unless both share another namespace."""
    a, b = _without_one_prefix(without_wrappers(a), without_wrappers(b))
    spaces = {a.namespace, b.namespace}
    if spaces <= OF_THE_MODEL - {HUB}:
        return a, b
    if len(spaces) == 1 and HUB not in spaces:
        return registry.namespace(a.namespace).comparable(a, b)
    a, b = (replace(c, config=c.config or other.config) for c, other in ((a, b), (b, a)))
    return as_hub(a), as_hub(b)
