"""DeepSpeed Universal Checkpoint: `zero/<fqn>/{fp32,exp_avg,...}.pt`, a folder per parameter, for any world size.

Format facts: deepspeed 0.19.8. checkpoint/ds_to_universal.py writes it, `load_universal` reads it
(runtime/base_optimizer.py and checkpoint/universal_checkpoint.py for stages 1 and 2, runtime/zero/stage3.py for 3).
There are two forms:

    stages 1, 2   a dict {param, cat_dim} with the whole tensor; step.pt; mp_rank_00_model_states.pt
    stage 3       the bare tensor, flat; the step in zero/optimizer_state.pt; zero_pp_rank_*_mp_rank_00_model_states.pt

Stage 3 accepts the dict form, too, so a source without a stage is written in it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import prod
from pathlib import Path
from typing import Any

from ckpt.base.errors import CorruptError, NotFoundError
from ckpt.base.text import pluralize
from ckpt.containers.sources import RankFile, Sources
from ckpt.containers.torchfile.scalars import read_scalar
from ckpt.containers.torchfile.values import StoredTensor
from ckpt.containers.torchfile.write import FromSource, NewTensor, Zeros, copy_of, torch_file
from ckpt.move.files import confined
from ckpt.move.listing import names_in
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
    ReadRequest,
    Target,
    TargetFile,
)
from ckpt.plan.dtypes import DType
from ckpt.plan.tensors import FlatRange, Shape, Tensor, Whole
from ckpt.runs.finding import Steps, find_step
from ckpt.runs.steps import LATEST_UNIVERSAL
from ckpt.runs.trainer_files import run_companions
from ckpt.state.skipped_states import listed
from converters.deepspeed import model as zero_model
from converters.deepspeed import model_file
from converters.deepspeed import write as zero_writer
from converters.deepspeed.folder import (
    ALIASES,
    check_has_model,
    experts_unsupported,
    is_data_parallel_file,
    list_step_folder,
)
from converters.deepspeed.layout import before_dealing
from converters.deepspeed.model import DeepSpeedModel
from converters.deepspeed.options import UniversalOptions
from converters.deepspeed.rank_files import in_sub_groups, known_structure
from converters.optimizers.state_dicts import groups_of

FP32 = "fp32"
STEP = "step"

_OPTIMIZER_STATE = "optimizer_state.pt"
#: States loaded by stage 3 (stage3.py, `load_hp_checkpoint_state_from_checkpoint_dir_stage3`).
_STAGE3_STATES = {"exp_avg", "exp_avg_sq"}


class Universal(Format):
    name = "universal"
    title = "DeepSpeed Universal Checkpoint"
    aliases = ALIASES
    namespace = TRANSFORMERS
    records_shapes = True
    loads_from = "run"

    def find(self, path: Path, tag: str | None) -> Path | None:
        return find_step(path, tag, _STEPS)

    def read(self, path: Path, request: ReadRequest) -> Checkpoint:
        with known_structure(path):
            return _read_folder(path)

    def lay_out(self, checkpoint: Checkpoint, layout: Layout) -> Target:
        """Lay out a folder for an engine with `"checkpoint": {"load_universal": true}` in its config."""
        return _lay_out(checkpoint, layout, is_step=layout.read(UniversalOptions).step_folder)


UNIVERSAL = Universal()


def _is_universal(path: Path) -> bool:
    return (path / "zero" / _OPTIMIZER_STATE).is_file()


_STEPS = Steps(_is_universal, record=LATEST_UNIVERSAL, owns_record=True)


# -- reading -----------------------------------------------------------------------------------------------------------


@dataclass
class _UniversalReading:
    path: Path
    sources: Sources = field(default_factory=Sources)
    tensors: dict[Key, Tensor] = field(default_factory=dict)
    scalars: dict[str, dict[str, Any]] = field(default_factory=dict)

    def load(self, path: str | Path, rank: int = 0) -> RankFile:
        return self.sources.of_rank(path, rank, "DeepSpeed file")


def _read_folder(path: Path) -> Checkpoint:
    reading = _UniversalReading(path)
    models = _model_files(reading)
    model = models[0]
    if model.content.get("ds_autoep_layers"):
        raise experts_unsupported(model.path, " (AutoEP) in a universal checkpoint")
    if model.content.get("num_experts"):
        raise NotFoundError(
            "universal checkpoints with experts spread over ranks by DeepSpeed-MoE are not supported",
            path=model.path,
            hint="give the checkpoint before its conversion to a universal checkpoint",
        )
    dicts, ties = [model_file.module_and_names(one) for one in models], model_file.ties(model)
    module, names = dicts[0]
    buffers = model_file.buffer_names(model)
    state = reading.load(path / "zero" / _OPTIMIZER_STATE)
    groups = model_file.param_shapes(model)
    trained = dict.fromkeys(fqn for group in groups for fqn in group)
    copies, natives = names.copies(trained), model_file.natives(model, module, buffers)
    frozen = {tensor.key: tensor for tensor in model_file.frozen(models, ties)}
    # `zero/` has fp32 copies of these weights.
    for fqn, stored in module.items():
        if fqn in ties or fqn in copies:
            continue
        has_placeholders = is_data_parallel_file(model.path)  # parameters under stage 3
        if fqn in buffers or stored.extent.numel or not (fqn in trained or has_placeholders):
            role = BUFFER if fqn in buffers else WEIGHT
            reading.tensors[fqn, role] = model_file.whole(fqn, role, stored)
        elif fqn not in trained and (fqn, WEIGHT) not in frozen:
            model_file.check_left_out(model, fqn)
    reading.tensors |= frozen
    for group in groups:
        for fqn, shape in group.items():
            _add_parameter(reading, fqn, shape, natives.get(fqn))
    for one, (held, _) in zip(models, dicts, strict=True):
        model_file.check_shapes(one, held, buffers)
    _add_stage3_steps(reading, state.content, groups)
    _check_complete(reading, groups)
    world_size, version = (model.content.get(key) for key in ("dp_world_size", "ds_version"))
    saved = model_file.frozen_saved(model, _stage_of(models))
    return Checkpoint(
        path=str(path),
        format="universal",
        tensors=reading.tensors,
        files=reading.sources.files,
        framework=f"deepspeed {version}" if version else "deepspeed",
        tag=path.name.removesuffix("_universal"),
        world_size=world_size if isinstance(world_size, int) else None,
        ties=ties,
        state=model_file.training_state(
            model,
            state.content,
            param_groups=_param_groups(model, state, groups),
            scalars=reading.scalars,
            engine_version=version,
            frozen_saved=saved,
        ),
        folders=(str(path.parent),),
        notes=(*((model_file.FROZEN_LEFT_OUT,) if saved is False else ()), *names.notes()),
        lost_weights=next((one.lost for _, one in dicts if one.lost), ""),
    )


def _stage_of(models: Sequence[RankFile]) -> int:
    if is_data_parallel_file(models[0].path):
        return 3
    config = models[0].content.get("ds_config")
    zero = config.get("zero_optimization") if isinstance(config, Mapping) else None
    stage = zero.get("stage") if isinstance(zero, Mapping) else None
    return stage if type(stage) is int else 0


def _model_files(reading: _UniversalReading) -> list[RankFile]:
    check_has_model(reading.path)
    folder = list_step_folder(reading.path)
    single = [reading.load(folder.model)] if folder.model is not None else []
    models = [reading.load(path, rank) for rank, path in sorted(folder.model_per_rank.items())]
    if single and not models:
        return single
    world_size = next((model.content.get("dp_world_size") for model in models), None)
    count = world_size if isinstance(world_size, int) else max(len(models), 1)
    if [model.rank for model in models] != list(range(count)):
        raise CorruptError(
            "model files are missing, or come from a run with another number of ranks",
            path=reading.path,
            rank=", ".join(map(str, sorted(folder.model_per_rank.keys() ^ set(range(count)))[:16])),
            expected="mp_rank_00_model_states.pt, or one zero_pp_rank_*_mp_rank_00_model_states.pt for each rank"
            + (f": {pluralize(count, 'file')}" if models else ""),
            found=f"files of ranks {', '.join(str(model.rank) for model in models)}" if models else "none",
        )
    return single or models


def _add_parameter(reading: _UniversalReading, fqn: str, shape: Shape, native: DType | None) -> None:
    folder = confined(reading.path / "zero", fqn)
    names = names_in(folder) if folder.is_dir() else []
    if f"{FP32}.pt" not in names:
        raise CorruptError("a parameter's master is missing", path=folder, fqn=fqn, expected=f"a file {FP32}.pt")
    for name in (name for name in names if name.endswith(".pt")):
        role = name.removesuffix(".pt")
        value = reading.sources.root(confined(folder, name), is_named=True)
        if role == STEP or not isinstance(value, Mapping | StoredTensor):
            reading.scalars.setdefault(role, {})[fqn] = _plain_number(value, folder / name)
            continue
        extent = _param(value, folder / name).extent
        if extent.numel != prod(shape) or not extent.is_contiguous:
            raise CorruptError(
                "a tensor's size differs from the model files",
                path=folder / name,
                fqn=fqn,
                expected=f"{pluralize(prod(shape), 'element')}, for shape {list(shape)}",
                found=f"shape {list(extent.shape)}",
            )
        role = MASTER if role == FP32 else role
        reading.tensors[fqn, role] = Tensor(fqn, role, extent.dtype, shape, Whole(extent.reshape(shape)), native)


def _param(value: Any, path: Path) -> StoredTensor:
    stored = value.get("param") if isinstance(value, Mapping) else value
    if not isinstance(stored, StoredTensor):
        raise CorruptError("the file has no tensor", path=path, expected="a tensor, or a dict with `param`")
    return stored


def _plain_number(value: Any, path: Path) -> Any:
    if isinstance(value, StoredTensor):
        return read_scalar(value.extent)
    if isinstance(value, int | float):
        return value
    raise CorruptError("a single number was expected", path=path, found=type(value).__name__)


def _stage3_optimizer(state: Mapping[str, Any]) -> Mapping[str, Any]:
    optimizer = state.get("optimizer_state_dict")
    return optimizer if isinstance(optimizer, Mapping) else {}


def _add_stage3_steps(
    reading: _UniversalReading, state: Mapping[str, Any], groups: Sequence[Mapping[str, Shape]]
) -> None:
    """Add stage 3's steps: per sub-group, in rank 0's optimizer state."""
    states = _stage3_optimizer(state).get("state") or {}
    for number, shapes in enumerate(groups):
        step = (states.get(number) or {}).get(STEP)
        if step is not None:
            value = _plain_number(step, reading.path / "zero" / _OPTIMIZER_STATE)
            for fqn in shapes:
                reading.scalars.setdefault(STEP, {}).setdefault(fqn, value)


def _check_complete(reading: _UniversalReading, groups: Sequence[Mapping[str, Shape]]) -> None:
    """Raise CorruptError if only some parameters in a group have a state: DeepSpeed keeps them in one buffer."""
    for group in groups:
        roles = {role for fqn, role in reading.tensors if fqn in group and role != WEIGHT}
        for fqn in group:
            for role in sorted(roles):
                if (fqn, role) not in reading.tensors:
                    raise _missing_error(reading, fqn, f"a file {role}.pt")
        for name, values in reading.scalars.items():
            without = [fqn for fqn in group if fqn not in values]
            if 0 < len(without) < len(group):
                raise _missing_error(reading, without[0], f"a file {name}.pt, like others in its group")


def _missing_error(reading: _UniversalReading, fqn: str, expected: str) -> CorruptError:
    what = "a parameter's optimizer state is missing"
    return CorruptError(what, path=reading.path / "zero" / fqn, fqn=fqn, expected=expected)


def _param_groups(model: RankFile, state: RankFile, shapes: Sequence[Mapping[str, Shape]]) -> tuple[ParamGroup, ...]:
    """Return the groups by fqn. Stage 3 lists sub-groups."""
    if optimizer := _stage3_optimizer(state.content):
        return in_sub_groups(groups_of(optimizer, state.path), shapes)
    groups = groups_of(state.content, state.path)
    is_dealt = model_file.is_dealt(model, state)
    orders = [before_dealing(list(group), model.need("dp_world_size")) if is_dealt else list(group) for group in shapes]
    return tuple(replace(group, fqns=tuple(order)) for group, order in zip(groups, orders, strict=True))


# -- writing -----------------------------------------------------------------------------------------------------------


def _lay_out(checkpoint: Checkpoint, layout: Layout, *, is_step: bool) -> Target:
    model = zero_model.describe(checkpoint, layout.dtype)
    stage = _written_stage(checkpoint)
    num_ranks = checkpoint.world_size or 1
    config, notes = zero_model.ds_config(model, stage or 3, layout.dtype)
    folder = f"{zero_writer.step_folder(checkpoint)}_universal"
    prefix = "" if is_step else f"{folder}/"
    beside = run_companions(checkpoint, num_ranks, layout.dtype, names=checkpoint.shapes)
    _, dropped = zero_model.client_state(model)
    return Target(
        files=(
            *(torch_file(f"{prefix}{name}", root) for name, root in _files(model, config, num_ranks, stage)),
            *beside.files,
            *([] if is_step else [TargetFile.of_bytes(LATEST_UNIVERSAL, folder.encode())]),
        ),
        left_out=model.left_out,
        dropped=(*dropped, *_dropped_numbers(model), *beside.dropped),
        notes=(*notes, *_universal_notes(model, stage), *beside.notes),
    )


def _written_stage(checkpoint: Checkpoint) -> int | None:
    """Return the source's stage. None means the form for all stages."""
    if checkpoint.state.zero_stage is not None:
        return checkpoint.state.zero_stage
    recorded = zero_model.zero_options(checkpoint).get("stage")
    return int(recorded) if recorded in (1, 2, 3) else None


def _files(
    model: DeepSpeedModel, config: Mapping[str, Any], num_ranks: int, stage: int | None
) -> Iterator[tuple[str, Mapping[str, Any] | NewTensor | Any]]:
    roles = model.roles(model.masters)
    for fqn in model.masters:
        yield from _parameter_files(model, fqn, roles, bare=stage == 3)
    yield f"zero/{_OPTIMIZER_STATE}", _optimizer_state(model, config, num_ranks, stage)
    if stage != 3:
        shapes = [group.shapes(model) for group in zero_writer.flat_groups(model, config, num_ranks)]
        # Without a known stage, record frozen parameters like stage 2.
        yield "mp_rank_00_model_states.pt", zero_writer.model_root(model, config, num_ranks, shapes, 0, stage or 2)
    if stage not in (1, 2):
        yield from zero_writer.slot_model_files(model, config, num_ranks)


def _parameter_files(model: DeepSpeedModel, fqn: str, roles: Sequence[str], *, bare: bool) -> Iterator[tuple[str, Any]]:
    """Write zeros for states without a gradient."""
    master, states = model.masters[fqn], model.states.get(fqn, {})
    for role in roles:
        if role not in states:
            shape = (master.numel,) if bare else master.shape or (1,)
            zeros = NewTensor(model.state_dtype(model.masters, role), shape, (Zeros(master.numel),))
            yield f"zero/{fqn}/{role}.pt", zeros if bare else {"cat_dim": 0, "param": zeros}
    for name, tensor in {FP32: master, **states}.items():
        dtype = model.master_dtype([fqn]) if name == FP32 else tensor.dtype
        path = f"zero/{fqn}/{name}.pt"
        if bare:
            fill = (FromSource(tensor.key, FlatRange(0, tensor.numel)),)
            yield path, NewTensor(dtype, (tensor.numel,), fill)
        else:
            # DeepSpeed cuts every tensor along a dim, so 0-dim tensors get one.
            yield path, {"cat_dim": 0, "param": replace(copy_of(tensor, dtype), shape=tensor.shape or (1,))}
    step = model.checkpoint.state.scalars.get(STEP, {}).get(fqn)
    if not bare and step is not None:
        yield f"zero/{fqn}/{STEP}.pt", zero_writer.scalar(step)


def _optimizer_state(
    model: DeepSpeedModel, config: Mapping[str, Any], num_ranks: int, stage: int | None
) -> dict[str, Any]:
    """Put groups at the top, or inside for stage 3."""
    if stage in (1, 2):
        groups = zero_writer.flat_groups(model, config, num_ranks)
        paddings = {
            "group_paddings": [group.layout.padding(0) for group in groups],
            "param_alignment_paddings": [list(group.layout.paddings) for group in groups],
        }
        items = zero_writer.stage12_items(model, config, [num_ranks] * len(groups), stage) | paddings
        return items | {"param_groups": zero_writer.param_groups(model, [[i] for i in range(len(groups))])}
    slots = zero_writer.slot_groups(model, num_ranks)
    groups_within = zero_writer.param_groups(model, slots.members)
    numbers = [model.numbers(fqns) for fqns in slots.fqns]
    states = {i: {STEP: zero_writer.scalar(found[STEP])} for i, found in enumerate(numbers) if STEP in found}
    inner = {"state": states, "param_groups": groups_within}
    items = zero_writer.stage3_items(model, config, num_ranks)
    if stage is None:
        items |= {"ds_version": model.version}
    return items | {"optimizer_state_dict": inner, "param_groups": groups_within}


def _dropped_numbers(model: DeepSpeedModel) -> Iterator[str]:
    for name in model.checkpoint.state.scalars:
        if name != STEP:
            yield f"optimizer state {name}: a universal checkpoint stores no number except the step"


def _universal_notes(model: DeepSpeedModel, stage: int | None) -> Iterator[str]:
    form = f"ZeRO-{stage} loads it" if stage else "any stage loads it, stage 3 from deepspeed 0.19.6 on"
    yield f'universal checkpoint: {form}, on any number of ranks, with "checkpoint": {{"load_universal": true}}'
    if model.frozen or model.buffers:
        yield (
            f"{pluralize(len(model.frozen), 'frozen parameter')} and {pluralize(len(model.buffers), 'buffer')} are in "
            "the model files, but DeepSpeed takes only trained parameters from a universal checkpoint"
        )
    if stage != 3 and zero_model.zero_options(model.checkpoint).get("round_robin_gradients"):
        yield (
            "load this without round_robin_gradients: with it, DeepSpeed mixes up parameters' elements in universal "
            "checkpoints"
        )
    if stage not in (1, 2):
        states = set(model.roles(model.masters))
        if states != _STAGE3_STATES or not model.checkpoint.state.scalars.get(STEP):
            yield "ZeRO-3 loads an optimizer from a universal checkpoint only if it is Adam and has taken a step"
        if any(group.options != model.groups[0].options for group in model.groups):
            yield "ZeRO-3 applies the first group's hyperparameters to all parameter groups on load"
    for role in model.roles(model.masters):
        if without := [fqn for fqn in model.masters if role not in model.states.get(fqn, ())]:
            yield (f"optimizer state {role} of {listed(without)} is missing from the source: wrote zeros")
    if not model.resumable:
        yield "the source records no hyperparameters: the optimizer keeps its own config's"
