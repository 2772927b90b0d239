"""DeepSpeed ZeRO stages 1, 2 and 3: writer for any number of ranks.

Format facts: deepspeed 0.19.8, runtime/engine.py (`_common_checkpoint_state`, `_save_zero_checkpoint`,
`_load_checkpoint`, `load_module_state_dict`), runtime/zero/stage_1_and_2.py and stage3.py (`state_dict`,
`load_state_dict`), runtime/bf16_optimizer.py (its engine also loads ZeRO-1's schema).

An elastic engine also loads the schema without `elastic_checkpoint`. The elastic schema can't hold hyperparameters, so
it is only written for sources that use it. The output then has a step count: the elastic loader needs it, but its saver
omits it with torch's optimizers. An engine without `elastic_checkpoint` would pad a 0-dim step like a partition
(`_restore_base_optimizer_state`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Any

from ckpt.adapters.names import is_adapter
from ckpt.base.errors import LossError
from ckpt.base.text import Brief, pluralize
from ckpt.containers.torchfile.pickler import Size
from ckpt.containers.torchfile.values import Record, StoredDict
from ckpt.containers.torchfile.write import (
    FromSource,
    NewTensor,
    Part,
    copy_of,
    number,
    one_element,
    pickled,
    torch_file,
    with_gaps,
)
from ckpt.plan.checkpoint import MASTER, WEIGHT, Checkpoint, Layout, OneElement, ParamGroup, Target, TargetFile
from ckpt.plan.dtypes import DType
from ckpt.plan.tensors import Box, FlatRange, Shape, Tensor, flat_regions, whole
from ckpt.runs.trainer_files import run_companions
from ckpt.state import adam
from ckpt.state.skipped_states import listed
from converters.deepspeed import dealt_experts
from converters.deepspeed import model as zero_model
from converters.deepspeed.config import is_bf16_optimizer, is_enabled
from converters.deepspeed.layout import (
    SUB_GROUP_SIZE,
    FlatLayout,
    FlatPart,
    SlotLayout,
    dealt,
    flat_layout,
    parameter_alignment,
    slot_layout,
    sub_groups,
)
from converters.deepspeed.model import DeepSpeedModel
from converters.deepspeed.options import ExpertOptions
from converters.deepspeed.sharing import Sharing


def lay_out(checkpoint: Checkpoint, layout: Layout, stage: int) -> Target:
    """Lay out a run folder.

    Raise UsageError for an unknown number of ranks, LossError for content that ZeRO can't hold.
    """
    num_ranks = layout.num_ranks(checkpoint)
    model = zero_model.describe(checkpoint, layout.dtype, may_be_elastic=stage < 3, may_have_experts=stage < 3)
    config, notes = zero_model.ds_config(model, stage, layout.dtype)
    tag = step_folder(checkpoint)
    if stage == 3:
        _check_has_elements(model)
        files = _stage3_files(model, config, num_ranks)
    else:
        experts = dealt_experts.sharing_of(model, config, num_ranks, layout.read(ExpertOptions).ep_size)
        files = _stage12_files(model, config, num_ranks, stage, experts)
        notes = [*notes, *dealt_experts.notes(experts)]
    beside = run_companions(checkpoint, num_ranks, layout.dtype, names=checkpoint.shapes)
    _, dropped = zero_model.client_state(model)
    return Target(
        files=(
            *(torch_file(f"{tag}/{name}", root) for name, root in files),
            *beside.files,
            TargetFile.of_bytes("latest", tag.encode()),
        ),
        left_out=model.left_out,
        dropped=(*dropped, *model.dropped, *beside.dropped),
        notes=(*notes, *model.notes, *_zero_notes(model, config, num_ranks, stage), *beside.notes),
    )


def _check_has_elements(model: DeepSpeedModel) -> None:
    if empty := next((fqn for fqn, choice in model.weights.items() if not choice.tensor.numel), None):
        raise LossError(
            "empty parameters cannot be written to ZeRO-3",
            fqn=empty,
            hint="use the formats zero1 or zero2",
        )


def step_folder(checkpoint: Checkpoint) -> str:
    """Return the source's step name, or DeepSpeed's default. HF Trainer looks for `global_step*`."""
    return checkpoint.tag or f"global_step{checkpoint.state.step or 0}"


def _zero_notes(model: DeepSpeedModel, config: Mapping[str, Any], num_ranks: int, stage: int) -> Iterator[str]:
    checkpoint = model.checkpoint
    before = checkpoint.world_size
    yield Brief(
        f"ZeRO-{stage} for {pluralize(num_ranks, 'rank')}"
        + (f", from {before}" if before not in (None, num_ranks) else "")
    )
    yield from master_notes(model)
    left = [fqn for fqn, master in model.masters.items() if master.role == MASTER and checkpoint.get(fqn, WEIGHT)]
    if stage == 3 and left:
        yield Brief(f"weights of {pluralize(len(left), 'parameter')} are not stored: ZeRO-3 rounds the masters")
    if stage == 3 and model.frozen and not model.is_deepspeed and not checkpoint.has_all_buffers:
        yield (
            f"{listed(model.frozen)} outside the optimizer, written as frozen: if this includes a buffer, ZeRO-3 fails "
            "to load these files, but zero1 and zero2 work"
        )
    if not model.resumable and not model.is_deepspeed and not checkpoint.has_all_buffers:
        yield "buffers are unknown for this architecture: every floating-point tensor became a trained parameter"
    yield from batch_notes(config, num_ranks)


def master_notes(model: DeepSpeedModel) -> Iterator[str]:
    upcast = [fqn for fqn, master in model.masters.items() if master.role != MASTER]
    if upcast:
        what = "have no master in the source: their weights became masters"
        yield Brief(f"{pluralize(len(upcast), 'parameter')} {what}")


def batch_notes(config: Mapping[str, Any], num_ranks: int) -> Iterator[str]:
    batch = config.get("train_batch_size")
    if isinstance(batch, int) and batch % num_ranks:
        ranks = pluralize(num_ranks, "rank")
        yield f"ds_config: train_batch_size {batch} is not a multiple of {ranks}; resume with a multiple"


# -- files -----------------------------------------------------------------------------------------------------------

#: Name in the step folder, and the object for torch.load.
File = tuple[str, Any]


def optimizer_file(model: DeepSpeedModel, config: Mapping[str, Any], inner: Any, rank: int, mp_rank: int = 0) -> File:
    """Return a rank's optimizer file."""
    root = {"optimizer_state_dict": inner, "ds_config": config, "ds_version": model.version}
    return optimizer_name(config, rank, mp_rank), root


def optimizer_name(config: Mapping[str, Any], rank: int, mp_rank: int = 0) -> str:
    """Return the file's name. Its prefix only shows that bf16 is enabled (engine.py, `_get_zero_ckpt_prefix`)."""
    prefix = "bf16_" if is_enabled(config, "bf16") else ""
    return f"{prefix}zero_pp_rank_{rank}_mp_rank_{mp_rank:02d}_optim_states.pt"


def model_root(
    model: DeepSpeedModel, config: Mapping[str, Any], num_ranks: int, param_shapes: list[Any], rank: int, stage: int
) -> dict[str, Any]:
    whole = stage < 3
    module = _module(model, whole)
    shapes, fragments = (None, None) if stage == 1 else _frozen(model, module, None if whole else (rank, num_ranks))
    own = {
        "module": module,
        "buffer_names": list(model.buffers),
        "frozen_param_shapes": shapes,
        "shared_params": dict(model.ties) if whole or rank == 0 else {},
        "frozen_param_fragments": fragments,
    }
    client, _ = zero_model.client_state(model)
    root = common_root(model, config, num_ranks, param_shapes, own=own) | client
    if not (model.resumable or any(model.states.values())):  # only weights: frozen parameters are unknown
        del root["frozen_param_shapes"], root["frozen_param_fragments"]
    return root


def common_root(
    model: DeepSpeedModel,
    config: Mapping[str, Any],
    num_ranks: int,
    param_shapes: list[Any],
    *,
    own: Mapping[str, Any] | None = None,
    tp: int = 1,
    pp: int = 1,
) -> dict[str, Any]:
    """Return a model file without client state: engine.py, `_common_checkpoint_state`.

    `num_ranks` are the data-parallel ranks for each of the `tp` x `pp` model parts. `own` holds module entries.
    """
    state = model.state
    root: dict[str, Any] = {
        "module": None,
        "buffer_names": [],
        "optimizer": None,
        "param_shapes": param_shapes,
        "frozen_param_shapes": None,
        "shared_params": {},
        "frozen_param_fragments": None,
        **(own or {}),
        "lr_scheduler": model.schedule,
        "data_sampler": state.data_sampler,
        "random_ltd": state.random_ltd,
        "skipped_steps": 0 if state.skipped_steps is None else state.skipped_steps,
        "global_steps": model.checkpoint.state.step or 0,
    }
    if model.samples is not None:  # else DeepSpeed multiplies steps by the batch size
        root["global_samples"] = model.samples
    return root | {
        "dp_world_size": num_ranks,
        "mp_world_size": tp * pp,
        "checkpoint_parallel_dimensions": {"pp_degree": pp, "tp_degree": tp},
        "ds_config": config,
        "ds_version": model.version,
    }


def _module(model: DeepSpeedModel, is_whole: bool) -> StoredDict:
    """Return the module's state dict. In stage 3 (not whole), parameters are empty and buffers present."""
    module = StoredDict("OrderedDict")
    for fqn, choice in model.weights.items():
        module[fqn] = copy_of(choice.tensor, choice.dtype) if is_whole else NewTensor(choice.dtype, (0,))
    for fqn, buffer in model.buffers.items():
        module[fqn] = copy_of(buffer)
    for alias, owner in model.ties.items():
        module[alias] = module[owner]
    module.update(model.state.extra_state or {})
    return module


def _frozen(model: DeepSpeedModel, module: StoredDict, part: tuple[int, int] | None) -> tuple[StoredDict | None, ...]:
    """Return shapes and elements of frozen parameters, whole or as this rank's slots.

    The loader accepts None, None if the source leaves them out, like PEFT, but no incomplete dict.
    """
    if not model.frozen and (model.state.frozen_saved is False or is_adapter(model.weights)):
        return None, None
    shapes, fragments = StoredDict("OrderedDict"), StoredDict("OrderedDict")
    for fqn in model.frozen:
        tensor, dtype = model.weights[fqn].tensor, model.weights[fqn].dtype
        shapes[fqn], fragments[fqn] = Size(tensor.shape), module[fqn]
        if part is not None:
            rank, num_ranks = part
            layout = slot_layout([tensor.numel], num_ranks)
            fragments[fqn] = _flat(dtype, layout.length, [tensor], layout.parts, rank)
    return shapes, fragments


@dataclass(frozen=True, slots=True)
class LocalParameter:
    """Part of a parameter on a tensor-parallel rank.

    `boxes` of the whole tensor lie end to end in `shape`.
    """

    name: str
    shape: Shape
    boxes: tuple[Box, ...]

    @property
    def numel(self) -> int:
        return prod(self.shape)

    def parts(self, tensor: Tensor, start: int, stop: int, at: int) -> Iterator[FromSource]:
        for region, offset in flat_regions(self.boxes, tensor.shape, start, stop):
            yield FromSource(tensor.key, region, at + offset - start)


def _flat(
    dtype: DType,
    length: int,
    tensors: Sequence[Tensor | None],
    parts: Callable[[int], Iterator[FlatPart]],
    rank: int | None,
    local: Sequence[LocalParameter | None] = (),
    **options: Any,
) -> NewTensor:
    """Return a rank's buffer, or every rank's if `rank` is None. Fill gaps and missing tensors with zeros."""

    def fill_of(rank: int) -> tuple[Part, ...]:
        fill: list[FromSource] = []
        for place in parts(rank):
            tensor = tensors[place.index]
            if tensor is None:
                continue
            own = local[place.index] if local else None
            if own is not None:
                fill.extend(own.parts(tensor, place.start, place.stop, place.at))
            else:
                fill.append(FromSource(tensor.key, FlatRange(place.start, place.stop), place.at))
        return tuple(with_gaps(fill, length))

    if rank is None:
        return NewTensor(dtype, (length,), fill_of=fill_of, **options)
    return NewTensor(dtype, (length,), fill_of(rank), **options)


def _state(
    model: DeepSpeedModel,
    fqns: Sequence[str],
    length: int,
    layout: FlatLayout | SlotLayout,
    rank: int | None,
    local: Sequence[LocalParameter | None] = (),
) -> dict[str, Any]:
    """Return a flat buffer's states; empty before the first step."""
    numbers, roles = model.numbers(fqns), model.roles(fqns)
    if "step" in numbers and not model.is_deepspeed and adam.has_states(roles):
        numbers["step"] = adam.whole_steps(numbers["step"])
    state: dict[str, Any] = {name: scalar(value) for name, value in numbers.items()}
    for role in roles:
        tensors = [model.states.get(fqn, {}).get(role) for fqn in fqns]
        state[role] = _flat(model.state_dtype(fqns, role), length, tensors, layout.parts, rank, local)
    return state


def scalar(value: Any) -> Any:
    """Return a 0-dim float32 tensor for torch's optimizers, a Python int for DeepSpeed's."""
    if isinstance(value, OneElement):
        return one_element(value)
    return number(value) if isinstance(value, float) else value


def param_groups(model: DeepSpeedModel, members: Sequence[Sequence[int]]) -> list[dict[str, Any]]:
    return [{**group.options, "params": list(ids)} for group, ids in zip(model.groups, members, strict=True)]


def stage_record(stage: int) -> Record:
    return Record("deepspeed.runtime.zero.config", "ZeroStageEnum", (stage,))


# -- stages 1 and 2 ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class FlattenedGroup:
    """Flat group, with parameters in flattening order.

    `local` is empty for whole parameters.
    """

    fqns: tuple[str, ...]
    optimizer_order: tuple[str, ...]
    options: Mapping[str, Any]
    layout: FlatLayout
    local: Mapping[str, LocalParameter] = field(default_factory=dict)

    @property
    def in_order(self) -> list[LocalParameter | None]:
        return [self.local.get(fqn) for fqn in self.fqns]

    def name(self, fqn: str) -> str:
        return self.local[fqn].name if fqn in self.local else fqn

    def shapes(self, model: DeepSpeedModel) -> StoredDict:
        shapes = (self.local.get(fqn, model.masters[fqn]).shape for fqn in self.fqns)
        return StoredDict("OrderedDict", zip(map(self.name, self.fqns), map(Size, shapes), strict=True))


def flat_group(
    model: DeepSpeedModel,
    config: Mapping[str, Any],
    group: ParamGroup,
    num_ranks: int,
    local: Mapping[str, LocalParameter] | None = None,
) -> FlattenedGroup:
    options = {} if is_bf16_optimizer(config) else config.get("zero_optimization", {})
    own = local or {}
    fqns = dealt(group.fqns, num_ranks) if options.get("round_robin_gradients") else list(group.fqns)
    alignment = 1
    if options.get("parameter_alignment"):
        alignment = parameter_alignment(model.weights[fqns[0]].dtype.itemsize)
    numels = [own[fqn].numel if fqn in own else model.masters[fqn].numel for fqn in fqns]
    return FlattenedGroup(tuple(fqns), group.fqns, group.options, flat_layout(numels, num_ranks, alignment), own)


def flat_groups(model: DeepSpeedModel, config: Mapping[str, Any], num_ranks: int) -> list[FlattenedGroup]:
    return [flat_group(model, config, group, num_ranks) for group in model.groups]


def _stage12_files(
    model: DeepSpeedModel, config: Mapping[str, Any], num_ranks: int, stage: int, experts: Sharing
) -> Iterator[File]:
    of_ranks = [_rank_groups(model, config, num_ranks, experts, rank) for rank in range(experts.num_ranks)]
    root = model_root(model, config, num_ranks, [group.shapes(model) for group in of_ranks[0]], 0, stage)
    yield from dealt_experts.files(experts, root["module"])
    yield "mp_rank_00_model_states.pt", dealt_experts.without(experts, root)
    counts = [num_ranks // experts.num_ranks if group.local else num_ranks for group in of_ranks[0]]
    items = stage12_items(model, config, counts, stage)
    for rank in range(num_ranks):
        expert_rank, place = experts.place(rank, num_ranks)
        groups = of_ranks[expert_rank]
        inner = items | partitions(model, groups, [place if group.local else rank for group in groups])
        yield optimizer_file(model, config, inner, rank)


def _rank_groups(
    model: DeepSpeedModel, config: Mapping[str, Any], num_ranks: int, experts: Sharing, expert_rank: int
) -> list[FlattenedGroup]:
    """Use the rank's own names for expert groups."""
    groups = []
    for group in dealt_experts.groups(model, experts, expert_rank):
        shapes = {fqn: model.masters[fqn].shape for fqn in group.fqns if experts.is_shared(fqn)}
        local = {
            fqn: LocalParameter(experts.name_on_rank(fqn), shape, (whole(shape),)) for fqn, shape in shapes.items()
        }
        count = num_ranks // experts.num_ranks if local else num_ranks
        groups.append(flat_group(model, config, group, count, local))
    return groups


def stage12_items(
    model: DeepSpeedModel, config: Mapping[str, Any], counts: Sequence[int], stage: int
) -> dict[str, Any]:
    """Return an optimizer file's entries without partitions. `counts` are partitions per group.

    Unrecorded entries are left to the engine's config (`_load_global_state`).
    """
    items = zero_model.optimizer_items(model)
    if "loss_scaler" not in items and not is_enabled(config, "fp16"):
        items = _scaler_items(model, config) | items
    return {
        **items,
        "zero_stage": stage_record(stage),
        "partition_count": list(counts),
        "ds_version": model.version,
    }


def _scaler_items(model: DeepSpeedModel, config: Mapping[str, Any]) -> dict[str, Any]:
    scaler = zero_model.loss_scaler(model, config)
    return {"loss_scaler": scaler, "dynamic_loss_scale": bool(scaler.get("dynamic")), "overflow": False}


def partitions(model: DeepSpeedModel, groups: Sequence[FlattenedGroup], ranks: Sequence[int]) -> dict[str, Any]:
    """Return a rank's flat buffers: unpadded masters, padded states (unpadded if elastic).

    `ranks` are its indices within each group.
    """
    masters, states, mappings = [], {}, []
    for index, (group, rank) in enumerate(zip(groups, ranks, strict=True)):
        layout = group.layout
        kept = layout.partition - layout.padding(rank)
        tensors = [model.masters[fqn] for fqn in group.fqns]
        dtype = model.master_dtype(group.fqns)
        masters.append(_flat(dtype, kept, tensors, layout.parts, rank, group.in_order, requires_grad=True))
        length = kept if model.is_elastic else layout.partition
        state = _state(model, group.fqns, length, layout, rank, group.in_order)
        if state:
            states[index] = state
        mappings.append(_slice_mapping(group, rank))
    options = [{**group.options, "params": [index]} for index, group in enumerate(groups)]
    rigid = {"state": states, "param_groups": options}
    return {
        **(_elastic(model, states) if model.is_elastic else {"base_optimizer_state": rigid}),
        "single_partition_of_fp32_groups": masters,
        "group_paddings": [group.layout.padding(rank) for group, rank in zip(groups, ranks, strict=True)],
        "param_alignment_paddings": [list(group.layout.paddings) for group in groups],
        "param_slice_mappings": mappings,
    }


def _elastic(model: DeepSpeedModel, states: Mapping[int, Any]) -> dict[str, Any]:
    """Follow stage_1_and_2.py, `_get_base_optimizer_state`. Its loader sets every group's step."""
    step = next((model.numbers(group.fqns).get("step") for group in model.groups), None)
    taken = step.value if isinstance(step, OneElement) else step
    return {
        "base_optimizer_state": list(states.values()),
        "base_optimizer_state_step": int(taken if taken is not None else model.state.step or 0),
    }


def _slice_mapping(group: FlattenedGroup, rank: int) -> StoredDict:
    """Return the place of each parameter's elements in the rank's partition.

    With `round_robin_gradients`, DeepSpeed itself records places from before the reordering.
    """
    places = {group.fqns[place.index]: place for place in group.layout.parts(rank)}
    mapping = StoredDict("OrderedDict")
    for fqn in group.optimizer_order:
        if fqn in places:
            address = {"numel": places[fqn].numel, "start": places[fqn].at}
            mapping[group.name(fqn)] = Record("deepspeed.utils.tensor_fragment", "fragment_address", state=address)
    return mapping


# -- stage 3 -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _SubGroups:
    fqns: list[tuple[str, ...]]
    layouts: list[SlotLayout]
    members: list[list[int]]


def slot_groups(model: DeepSpeedModel, num_ranks: int) -> _SubGroups:
    recorded = zero_model.zero_options(model.checkpoint).get("sub_group_size", SUB_GROUP_SIZE)
    size = int(recorded) if isinstance(recorded, int | float) and recorded else SUB_GROUP_SIZE
    found = _SubGroups([], [], [])
    for group in model.groups:
        numels = [model.masters[fqn].numel for fqn in group.fqns]
        ranges = sub_groups(numels, num_ranks, size)
        first = len(found.fqns)
        found.members.append(list(range(first, first + len(ranges))))
        for span in ranges:
            found.fqns.append(group.fqns[span.start : span.stop])
            found.layouts.append(slot_layout(numels[span.start : span.stop], num_ranks))
    return found


def _stage3_files(model: DeepSpeedModel, config: Mapping[str, Any], num_ranks: int) -> Iterator[File]:
    groups = slot_groups(model, num_ranks)
    inner = stage3_items(model, config, num_ranks) | _slots(model, groups)
    root = pickled(optimizer_file(model, config, inner, 0)[1])
    for rank, model_file in enumerate(slot_model_files(model, config, num_ranks)):
        yield model_file
        yield optimizer_name(config, rank), root.of_rank(rank)


def slot_model_files(model: DeepSpeedModel, config: Mapping[str, Any], num_ranks: int) -> Iterator[File]:
    """Yield the ranks' model files. Without frozen parameters only rank 0's file differs."""
    groups = slot_groups(model, num_ranks).fqns
    shapes = [StoredDict("OrderedDict", ((fqn, Size(model.masters[fqn].shape)) for fqn in fqns)) for fqns in groups]
    root = None
    for rank in range(num_ranks):
        if rank < 2 or model.frozen:
            root = pickled(model_root(model, config, num_ranks, shapes, rank, 3))
        yield f"zero_pp_rank_{rank}_mp_rank_00_model_states.pt", root


def stage3_items(model: DeepSpeedModel, config: Mapping[str, Any], num_ranks: int) -> dict[str, Any]:
    """Return an optimizer file's entries without slots. The loader requires all of them."""
    items = zero_model.optimizer_items(model)
    items = _scaler_items(model, config) | {name: value for name, value in items.items() if name != "clip_grad"}
    return {"zero_stage": stage_record(3), **items, "partition_count": num_ranks}


def _slots(model: DeepSpeedModel, groups: _SubGroups) -> dict[str, Any]:
    """Return every rank's slots: only their elements differ."""
    masters, states = [], {}
    for index, (fqns, layout) in enumerate(zip(groups.fqns, groups.layouts, strict=True)):
        tensors = [model.masters[fqn] for fqn in fqns]
        dtype = model.master_dtype(fqns)
        masters.append(_flat(dtype, layout.length, tensors, layout.parts, None, requires_grad=True))
        state = _state(model, fqns, layout.length, layout, None)
        if state:
            states[index] = state
    optimizer = {"state": states, "param_groups": param_groups(model, groups.members)}
    return {"optimizer_state_dict": optimizer, "fp32_flat_groups": masters}
