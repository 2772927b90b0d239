"""DeepSpeed ZeRO stages 1, 2 and 3: reader.

Format facts: deepspeed 0.19.8, runtime/engine.py (`_save_checkpoint`, `_save_zero_checkpoint`),
runtime/zero/stage_1_and_2.py and runtime/zero/stage3.py (`state_dict`), runtime/bf16_optimizer.py (`state_dict`).
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from math import prod
from pathlib import Path
from typing import Any

from ckpt.base.errors import CorruptError, IncompleteError, NotFoundError
from ckpt.base.text import pluralize
from ckpt.containers.sources import RankFile, Sources, check_all_there
from ckpt.containers.torchfile.values import Record, StoredTensor
from ckpt.plan.checkpoint import (
    BUFFER,
    MASTER,
    TRANSFORMERS,
    WEIGHT,
    Checkpoint,
    Format,
    Key,
    Layout,
    ParamGroup,
    QuantizedStates,
    ReadRequest,
    Target,
)
from ckpt.plan.dtypes import DType
from ckpt.plan.tensors import Extent, Shape, Tensor, Whole
from converters.deepspeed import model_file
from converters.deepspeed.autoep import experts_of, routers, sharers_under_stage3, sharing_under_stage3
from converters.deepspeed.autotp import RankSlice, sharing_of, together
from converters.deepspeed.facts import DeepSpeedFacts
from converters.deepspeed.flat_groups import FlatGroup, InFlatGroup, InSlots, flat_group_states, group_states, slot_size
from converters.deepspeed.folder import (
    ALIASES,
    StepFolder,
    check_has_model,
    experts_unsupported,
    find_stage,
    list_step_folder,
    naming_a_complete_step,
    tensor_parallel_rank,
    tensor_parallel_ranks,
)
from converters.deepspeed.layout import before_dealing
from converters.deepspeed.rank_files import (
    base_groups,
    check_lengths,
    check_places,
    expect_groups,
    flat_extent,
    in_group_order,
    in_sub_groups,
    inner_file,
    known_structure,
    parameter_starts,
    partition_counts,
    partition_size,
)
from converters.optimizers.ranks import check_same, check_same_options
from converters.optimizers.states import OptimizerStates

#: Maximum listed in a message.
_SHOWN = 16
#: Compared here; ranks sharing a buffer are compared earlier.
_EXPERT_RANKS = "expert parallel ranks"
#: Default name of a step folder (engine.py, `save_checkpoint`).
_DEFAULT_TAG = re.compile(r"global_step(\d+)")


class Zero(Format):
    aliases = ALIASES
    namespace = TRANSFORMERS  # the in-memory model's names
    always_has_optimizer = True
    records_shapes = True
    loads_from = "run"
    fits_other_ranks = False
    takes = ("world_size",)

    def __init__(self, stage: int) -> None:
        self.stage, self.name, self.title = stage, f"zero{stage}", f"DeepSpeed ZeRO-{stage}"

    def find(self, path: Path, tag: str | None) -> Path | None:
        return find_stage(path, tag, self.stage)

    def read(self, path: Path, request: ReadRequest) -> Checkpoint:
        read = partial(_read_step, config=request.config)
        with naming_a_complete_step(path.parent, read):
            return read(path)

    def lay_out(self, checkpoint: Checkpoint, layout: Layout) -> Target:
        from converters.deepspeed.write import lay_out  # late: faster start

        return lay_out(checkpoint, layout, self.stage)


ZERO1, ZERO2, ZERO3 = Zero(1), Zero(2), Zero(3)


@dataclass
class _ZeroReading:
    folder: StepFolder
    num_tensor_parallel: int = 1
    sources: Sources = field(default_factory=Sources)
    tensors: dict[Key, Tensor] = field(default_factory=dict)
    version: object = None
    states: OptimizerStates = field(default_factory=OptimizerStates)
    models: list[RankFile] = field(default_factory=list)  # rank 0's first
    ties: dict[str, str] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    lost_weights: str = ""
    own_order: bool = False  # ranks order experts differently from the model

    def load(self, path: str, rank: int) -> RankFile:
        file = self.sources.of_rank(path, rank, "DeepSpeed file")
        self.version = self.version or file.content.get("ds_version")
        return file


def _framework(reading: _ZeroReading) -> str:
    return f"deepspeed {reading.version}" if reading.version else "deepspeed"


def _stage(inner: RankFile) -> int:
    """Return 1 for BF16_Optimizer: it records no stage, but partitions like stage 1."""
    stage = inner.content.get("zero_stage")
    if isinstance(stage, Record):
        stage = stage.args[0] if stage.args else None
    if stage is None and "single_partition_of_fp32_groups" in inner.content:
        return 1
    if isinstance(stage, int) and 1 <= stage <= 3:
        return int(stage)
    raise CorruptError("the ZeRO stage is not recorded", **inner.where, found=stage)


def _read_step(path: Path, config: Path | None = None) -> Checkpoint:
    ranks = tensor_parallel_ranks(path)
    if not any(ranks):
        return _read_slice(path, 0, 1).checkpoint
    first = list_step_folder(path, ranks[0])
    if first.experts:
        raise experts_unsupported(str(path), " with tensor parallelism")
    check_has_model(path)
    model = first.model or next(iter(first.model_per_rank.values()), None)
    if model is None:
        raise _without_model_file(path, ranks[0])
    with known_structure(path):
        folders = [one for one in (config, path, path.parent) if one]
        sharing = sharing_of(_ZeroReading(first).load(model, ranks[0]), ranks, folders)
    sources = Sources()
    return together([_read_slice(path, rank, len(ranks), sources) for rank in ranks], sharing, sources)


def _read_slice(path: Path, tp_rank: int, num_ranks: int, every: Sources | None = None) -> RankSlice:
    """Read one tensor-parallel rank's files. `every` collects all ranks' storages."""
    sources = Sources() if every is None else Sources(storages=every.storages)
    reading = _ZeroReading(list_step_folder(path, tp_rank), num_ranks, sources)
    with known_structure(path, lambda: _framework(reading)):
        return _understand(reading)


def _understand(reading: _ZeroReading) -> RankSlice:
    folder, path = reading.folder, reading.folder.path
    if not folder.optimizer:
        raise IncompleteError("a tensor parallel rank has no optimizer files", path=path, found=folder.model)
    first_rank = min(folder.optimizer)
    first = inner_file(reading.load(folder.optimizer[first_rank], first_rank))
    stage = _stage(first)
    counts = partition_counts(first)
    world_size = max(counts)
    there = sorted(rank for rank in folder.optimizer if rank < world_size)
    inners = [first if rank == first_rank else inner_file(reading.load(folder.optimizer[rank], rank)) for rank in there]
    # Before missing files: another run's file must not make ranks look missing.
    for inner in inners:
        if _stage(inner) != stage or sorted(partition_counts(inner)) != sorted(counts):
            raise CorruptError(
                "the folder mixes files from different runs",
                **inner.where,
                expected=_layout_text(stage, counts),
                found=_layout_text(_stage(inner), partition_counts(inner)),
            )
    _check_ranks(folder.optimizer, world_size, path, "optim_states")
    check_has_model(path)
    if stage == 3:
        _check_ranks(folder.model_per_rank, world_size, path, "model_states")
    elif folder.model is None:
        raise _without_model_file(path, tensor_parallel_rank(first.path))
    inners = [in_group_order(inner, counts) for inner in inners]
    reading.sources.check_distinct((inner.rank, inner.path) for inner in inners)
    (_read_stage3 if stage == 3 else _read_stage12)(reading, inners)
    return RankSlice(_checkpoint(reading, inners, stage, world_size), reading.models[0])


def _without_model_file(path: Path, tp_rank: int) -> IncompleteError:
    return IncompleteError("the model file is missing", path=path, expected=f"mp_rank_{tp_rank:02}_model_states.pt")


def _layout_text(stage: int, counts: tuple[int, ...]) -> str:
    """Describe the recorded layout. Stage 3 counts partitions over all groups."""
    groups = f", with {pluralize(len(counts), 'param group')}" if stage < 3 else ""
    return f"ZeRO-{stage} on {_listed(counts)} ranks{groups}"


def _listed(counts: tuple[int, ...]) -> str:
    return ", ".join(map(str, dict.fromkeys(counts)))


def _check_ranks(files: Mapping[int, str], world_size: int, path: Path, kind: str) -> None:
    what = f"{kind} files are missing, so every parameter lacks a part"
    absent = next((rank for rank in range(world_size) if rank not in files), 0)
    check_all_there(what, files, world_size, path, _name_for_rank(files, absent, kind))
    extra = [rank for rank in files if rank >= world_size]
    if extra:
        raise CorruptError(
            f"{kind} files exist for more ranks than the run had: left over from an earlier, larger run",
            path=path,
            rank=", ".join(map(str, extra[:_SHOWN])),
            expected=f"{pluralize(world_size, 'rank')}",
            found=f"{pluralize(len(files), 'file')}",
            hint="move them out of the folder if they do not belong to this run",
        )


def _name_for_rank(files: Mapping[int, str], rank: int, kind: str) -> str:
    for other, path in files.items():
        return Path(path).name.replace(f"zero_pp_rank_{other}_", f"zero_pp_rank_{rank}_")
    return f"zero_pp_rank_{rank}_mp_rank_00_{kind}.pt"


# -- stages 1 and 2 ----------------------------------------------------------------------------------------------------


def _read_stage12(reading: _ZeroReading, inners: list[RankFile]) -> None:
    assert reading.folder.model is not None
    file = reading.load(reading.folder.model, 0)
    reading.models = [file]
    sharing, experts = experts_of(reading.folder.experts, file, reading.sources)
    module, names = model_file.module_and_names(file, reading.num_tensor_parallel)
    again, buffers = routers(file, module), model_file.buffer_names(file)
    reading.ties = model_file.ties(file) | again
    reading.notes = tuple(names.notes())
    groups, num_ranks = model_file.param_shapes(file), len(inners)
    natives = model_file.natives(file, module, buffers)
    trained = dict.fromkeys(fqn for group in groups for fqn in group)
    copies, reading.lost_weights = names.copies(trained), names.lost
    frozen = file.content.get("frozen_param_fragments") or {}
    for fqn, stored in {**frozen, **module, **frozen}.items():
        if isinstance(stored, StoredTensor) and fqn not in reading.ties and fqn not in copies:
            role = BUFFER if fqn in buffers else WEIGHT
            reading.tensors[fqn, role] = model_file.whole(fqn, role, stored, 0)
    reading.tensors.update(model_file.with_replicas(reading.tensors, again, module))
    reading.tensors = {**experts, **reading.tensors, **experts}  # in layer order
    expect_groups(inners, "single_partition_of_fp32_groups", len(groups))
    counts = partition_counts(inners[0])
    counts = counts if len(counts) == len(groups) else (max(counts),) * len(groups)

    options = [group.options for group in base_groups(inners[0])]
    for number, (recorded, count) in enumerate(zip(groups, counts, strict=True)):
        order: list[str] = []
        parts: list[dict[Key, Tensor]] = []
        for ranks, shapes in sharing.sharers(recorded, count, num_ranks):
            dealt = model_file.is_dealt(file, inners[0])
            own = before_dealing(list(shapes), count) if dealt else list(shapes)
            reading.own_order |= sharing.in_order(own) != tuple(own)
            order += own
            sharers = [inners[rank] for rank in ranks]
            parts.append(_read_flat_group(reading, number, sharers, ranks, shapes, natives))
            if not dealt:  # DeepSpeed records places from before the reordering
                check_places(sharers, number, shapes, list(recorded))
        reading.tensors |= {t.key: t for t in sharing.together(parts, [range(num_ranks)] * len(parts))}
        group = ParamGroup(sharing.in_order(order), options[number] if number < len(options) else {})
        reading.states.groups += (group,)
    model_file.check_shapes(file, module, buffers)


def _read_flat_group(
    reading: _ZeroReading,
    number: int,
    inners: list[RankFile],
    ranks: range,
    shapes: Mapping[str, Shape],
    natives: Mapping[str, DType],
) -> dict[Key, Tensor]:
    partition = partition_size(inners, number)
    starts = parameter_starts(shapes, inners[0], number, partition * len(inners))
    nexts = dict(zip(shapes, [*starts.values(), partition * len(inners)][1:], strict=True))
    masters = [flat_extent(inner.need("single_partition_of_fp32_groups")[number], inner) for inner in inners]
    states = flat_group_states(inners, number, partition)
    found: dict[Key, Tensor] = {}
    for role, extents in {MASTER: masters, **states.buffers}.items():
        group = FlatGroup(extents, partition, ranks)
        for fqn, shape in shapes.items():
            weight = reading.tensors.get((fqn, WEIGHT))
            native = weight.dtype if weight else natives.get(fqn)
            source = states.in_blocks(InFlatGroup(group, starts[fqn], nexts[fqn] - starts[fqn] - prod(shape)), role)
            found[fqn, role] = Tensor(fqn, role, extents[0].dtype, shape, source, native)
    states.add_to(reading.states, shapes, inners[0], _EXPERT_RANKS)
    return found


# -- stage 3 -----------------------------------------------------------------------------------------------------------


def _read_stage3(reading: _ZeroReading, inners: list[RankFile]) -> None:
    models = reading.models = [_light(reading, rank) for rank in range(len(inners))]
    file = models[0]
    module, names = model_file.module_and_names(file, reading.num_tensor_parallel)
    reading.notes = tuple(names.notes())
    buffer_names = model_file.buffer_names(file)
    sub_groups = model_file.param_shapes(file)
    reading.lost_weights = names.lost or reading.lost_weights
    if len(set(partition_counts(inners[0]))) > 1:
        raise NotFoundError(
            "parameter groups partitioned over different numbers of ranks are not supported", path=inners[0].path
        )
    frozen = model_file.frozen_shapes(file)
    for model in models[1:]:
        if (model_file.param_shapes(model), model_file.frozen_shapes(model)) != (sub_groups, frozen):
            raise CorruptError("ranks describe different models", **model.where, expected=f"as {file.path}")
    sharing = sharing_under_stage3(models, inners)
    reading.ties = model_file.ties(file) | routers(file, module)
    reading.tensors |= {tensor.key: tensor for tensor in model_file.frozen(models, reading.ties)}
    _add_buffers(reading, models, module, buffer_names)
    expect_groups(inners, "fp32_flat_groups", len(sub_groups))

    natives = model_file.natives(file, module, buffer_names)
    for number, shapes in enumerate(sub_groups):
        groups = sharers_under_stage3(sharing, models, inners, number, shapes)
        parts = [_read_sub_group(reading, number, [inners[r] for r in ranks], shapes, natives) for ranks in groups]
        reading.tensors |= {tensor.key: tensor for tensor in sharing.together(parts, groups)}
    model_file.check_shapes(file, module, buffer_names)
    _add_unrecorded(reading, {fqn: stored for fqn, stored in module.items() if fqn not in names.unmatched})
    reading.states.groups = _stage3_groups(inners[0], sub_groups)


def _read_sub_group(
    reading: _ZeroReading,
    number: int,
    inners: list[RankFile],
    shapes: Mapping[str, Shape],
    natives: Mapping[str, DType],
) -> dict[Key, Tensor]:
    length = sum(slot_size(prod(shape), len(inners)) for shape in shapes.values())
    masters = [_offloaded(reading, inner, inner.need("fp32_flat_groups")[number], None, length) for inner in inners]
    sizes = [(length, master.numel) for master in masters]
    states = group_states(inners, partial(_sub_group_state, reading, number=number, length=length), sizes)
    found: dict[Key, Tensor] = {}
    for role, extents in {MASTER: masters, **states.buffers}.items():
        check_lengths(inners, extents, length, role)
        offset = 0
        for fqn, shape in shapes.items():
            source = states.in_blocks(InSlots(extents, offset), role)
            found[fqn, role] = Tensor(fqn, role, extents[0].dtype, shape, source, natives.get(fqn))
            offset += slot_size(prod(shape), len(inners))
    states.add_to(reading.states, shapes, inners[0], _EXPERT_RANKS)
    return found


def _light(reading: _ZeroReading, rank: int) -> RankFile:
    """Drop parts only needed from rank 0, so a thousand ranks fit in memory."""
    file = reading.load(reading.folder.model_per_rank[rank], rank)
    if rank == 0:
        return file
    names = model_file.buffer_names(file)
    module, matched = model_file.module_and_names(file, reading.num_tensor_parallel)
    reading.lost_weights = reading.lost_weights or matched.lost
    model_file.check_shapes(file, module, names)
    content = {key: value for key, value in file.content.items() if key not in ("ds_config", "optimizer")}
    content["module"] = {fqn: value for fqn, value in module.items() if fqn in names}
    return RankFile(file.path, file.rank, content)


def _add_buffers(
    reading: _ZeroReading, models: list[RankFile], first: Mapping[str, StoredTensor], names: set[str]
) -> None:
    """Add the buffers: every rank wrote a copy. `first` are rank 0's entries; `_light` renamed the others' entries."""
    copies = [first, *(model.content["module"] for model in models[1:])]
    for model, module in zip(models[1:], copies[1:], strict=True):
        if fqn := next((fqn for fqn in module if fqn not in copies[0]), None):
            missing = f"the buffer of rank {model.rank}"
            raise CorruptError("rank 0 lacks a buffer", **models[0].where, fqn=fqn, expected=missing, found="none")
    for fqn in (fqn for fqn in copies[0] if fqn in names):
        tensor = model_file.whole(fqn, BUFFER, copies[0][fqn], 0)
        copies_of_ranks = []
        for model, module in zip(models[1:], copies[1:], strict=True):
            stored = module.get(fqn)
            if stored is None or (stored.extent.shape, stored.extent.dtype) != (tensor.shape, tensor.dtype):
                raise CorruptError(
                    "ranks store one buffer as different kinds",
                    **model.where,
                    fqn=fqn,
                    expected=f"{tensor.dtype} {list(tensor.shape)}",
                    found="none" if stored is None else f"{stored.extent.dtype} {list(stored.extent.shape)}",
                )
            copies_of_ranks.append(Whole(stored.extent, model.rank))
        reading.tensors[fqn, BUFFER] = tensor._replace(rank_copies=tuple(copies_of_ranks))


def _add_unrecorded(reading: _ZeroReading, module: Mapping[str, StoredTensor]) -> None:
    """Add whole tensors that are neither recorded parameters nor buffers."""
    found = {fqn for fqn, _ in reading.tensors} | reading.ties.keys()
    file = reading.models[0]
    for fqn, stored in module.items():
        if fqn in found:
            continue
        if stored.extent.numel:
            reading.tensors[fqn, WEIGHT] = model_file.whole(fqn, WEIGHT, stored, 0)
        else:
            model_file.check_left_out(file, fqn)


def _sub_group_state(reading: _ZeroReading, inner: RankFile, number: int, length: int) -> Mapping[str, Any]:
    optimizer = inner.content.get("optimizer_state_dict") or {}
    state = (optimizer.get("state") or {}).get(number) or {}
    return {
        name: StoredTensor(_offloaded(reading, inner, value, name, length))
        if isinstance(value, StoredTensor) and value.shape == (0,)
        else value
        for name, value in state.items()
    }


def _offloaded(reading: _ZeroReading, inner: RankFile, stored: Any, state: str | None, length: int) -> Extent:
    """Return a rank's sub-group buffer, from its own file if offloaded to NVMe.

    deepspeed/runtime/swap_tensor/optimizer_utils.py: raw elements in `{ds_id}.tensor.swp`, for optimizer states
    `{state}-{ds_id}.tensor.swp`, padded at the end. engine.py copies the folder to `offloaded_tensors/rankNN`.
    """
    extent = flat_extent(stored, inner)
    name = (stored.attributes or {}).get("ds_id")
    if extent.numel or not length or not isinstance(name, str):
        return extent
    if state is not None and not name.startswith(f"{state}-"):
        name = f"{state}-{name}"
    folder = reading.folder.path / "offloaded_tensors" / f"rank{inner.rank:02d}"
    path = folder / f"{name}.tensor.swp"
    if "/" in name or not path.is_file():
        raise CorruptError(
            "a buffer offloaded to NVMe is missing",
            path=path,
            rank=inner.rank,
            expected=f"{pluralize(length, 'element')}",
        )
    file = reading.sources.add(path)
    if file.size < length * extent.dtype.itemsize:
        raise CorruptError(
            "a file with offloaded elements is too short",
            path=path,
            rank=inner.rank,
            expected=f"{pluralize(length * extent.dtype.itemsize, 'byte')}",
            found=f"{pluralize(file.size, 'byte')}",
        )
    return Extent.contiguous(str(path), 0, extent.dtype, (length,))


def _stage3_groups(inner: RankFile, sub_groups: list[dict[str, Shape]]) -> tuple[ParamGroup, ...]:
    """Return the groups by fqn. The file lists sub-groups."""
    groups = base_groups(inner)
    members: list[Sequence[Any]] = [group.fqns for group in groups]
    if sorted(i for ids in members for i in ids) != list(range(len(sub_groups))):
        raise CorruptError("param groups must list every sub-group once", path=inner.path, found=members)
    return in_sub_groups(groups, sub_groups)


# -- common ------------------------------------------------------------------------------------------------------------


def _check_step(reading: _ZeroReading) -> None:
    """Raise CorruptError if only the optimizer's count matches the folder's name.

    DeepSpeed derives the name from the model's step.
    """
    file = reading.models[0]
    recorded, skipped = (file.content.get(name) for name in ("global_steps", "skipped_steps"))
    taken = max(reading.states.scalars.get("step", {}).values(), default=None)
    if not (isinstance(recorded, int) and isinstance(skipped, int)) or taken in (None, recorded - skipped):
        return
    named = _DEFAULT_TAG.fullmatch(reading.folder.path.name)
    if named and int(named[1]) != recorded and taken in (int(named[1]), int(named[1]) - skipped):
        raise CorruptError(
            "the folder mixes files from different steps",
            path=file.path,
            expected=f"step {named[1]}, from the optimizer files and the folder's name",
            found=f"step {recorded}",
        )


def _checkpoint(reading: _ZeroReading, inners: list[RankFile], stage: int, world_size: int) -> Checkpoint:
    file, folder = reading.models[0], reading.folder.path
    check_same("step", [(model, model.content.get("global_steps")) for model in reading.models])
    check_same_options([(inner, base_groups(inner)) for inner in inners])
    _check_step(reading)
    found = {fqn for fqn, _ in reading.tensors}
    for alias, owner in reading.ties.items():
        if owner not in found:  # aliases are not read
            raise CorruptError("a parameter is tied to a missing parameter", path=file.path, fqn=alias, expected=owner)
    state = model_file.training_state(
        file,
        inners[0].content,
        engine_version=reading.version,
        zero_stage=stage,
        frozen_saved=model_file.frozen_saved(file, stage),
        **reading.states.recorded(),
    )
    left_out = (model_file.FROZEN_LEFT_OUT,) if state.frozen_saved is False else ()
    return Checkpoint(
        path=str(folder),
        format=f"zero{stage}",
        tensors=reading.tensors,
        files=reading.sources.files,
        framework=_framework(reading),
        tag=folder.name,
        world_size=world_size,
        ties=reading.ties,
        facts=DeepSpeedFacts(reading.own_order),
        state=state,
        folders=(str(folder.parent),),
        notes=(*left_out, *reading.notes, *reading.sources.notes),
        computed=reading.states.computed,
        quantized=QuantizedStates(reading.states.quantized),
        unread=reading.states.left_out(),
        lost_weights=reading.lost_weights,
    )
