"""DeepSpeed's model files (`mp_rank_00_model_states.pt`, or one per rank in stage 3).

Facts: see `converters.deepspeed.zero`.

State dict names may differ from the names of parameters and buffers. A wrapper may override `state_dict()` and drop,
add or change parts of the names, like TRL's models with a value head. DeepSpeed writes such a dict unchanged. It
records parameters in `param_shapes`, `frozen_param_shapes` and `shared_params`, and buffers in `buffer_names`, by
module tree names (deepspeed 0.19.8, runtime/engine.py).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import prod
from pathlib import Path
from typing import Any

from ckpt.base.errors import CorruptError, NotFoundError
from ckpt.base.text import pluralize
from ckpt.containers.sources import RankFile
from ckpt.containers.torchfile.values import StoredTensor
from ckpt.plan.checkpoint import WEIGHT, Key, TrainingState
from ckpt.plan.dtypes import DType
from ckpt.plan.tensors import Shape, Tensor, Whole
from converters.deepspeed.config import is_bf16_optimizer
from converters.deepspeed.flat_groups import InSlots, slot_size
from converters.deepspeed.folder import is_data_parallel_file
from converters.deepspeed.keys import AUTOEP_EXPERTS, EXPERT, MODEL_FILE, MODEL_STATE, OPTIMIZER_FILE
from converters.deepspeed.rank_files import check_lengths, flat_extent


def module(model: RankFile, num_tensor_parallel: int = 1) -> dict[str, StoredTensor]:
    return module_and_names(model, num_tensor_parallel)[0]


def module_and_names(model: RankFile, num_tensor_parallel: int = 1) -> tuple[dict[str, StoredTensor], StateDictNames]:
    tensors = _state_dict(model, num_tensor_parallel)
    names = match(tensors, _recorded_shapes(model))
    names = replace(names, lost=_lost(model, names.lacking, len(tensors)))
    return {names.renamed.get(fqn, fqn): stored for fqn, stored in tensors.items()}, names


def _lost(model: RankFile, lacking: Collection[str], num_entries: int) -> str:
    """Return a sentence if the state dict has most recorded names, and lacks others, or "".

    A model's own `state_dict()` may leave out most of them: TRL's has only the value head if PEFT trains the rest.
    """
    if not lacking:
        return ""
    shapes = param_shapes(model) if model.content.get("param_shapes") is not None else []
    trained = dict.fromkeys(fqn for group in shapes for fqn in group)
    kinds: dict[tuple[str, str], Collection[str]] = {
        ("trained parameter", "a conversion takes the masters' values"): trained,
        ("frozen parameter", "a conversion takes the values of frozen_param_fragments"): frozen_shapes(model),
        ("tied parameter", "a conversion takes the values under the other name"): ties(model),
        ("buffer", "the buffers' values are nowhere"): sorted(buffer_names(model)),
    }
    lost = {kind: found for kind, names in kinds.items() if (found := [fqn for fqn in names if fqn in lacking])}
    num_recorded = len({fqn for names in kinds.values() for fqn in names}) if shapes else num_entries
    if not lost or 2 * sum(map(len, lost.values())) >= num_recorded:
        return ""
    lists = (f"{pluralize(len(found), what)} ({', '.join(found[:4])})" for (what, _), found in lost.items())
    ends = "; ".join(end for _, end in lost)
    what = f"the model's state dict lacks {' and '.join(lists)} in {Path(model.path).name}"
    return f"{what}: DeepSpeed's strict load refuses the file; {ends}"


def check_shapes(model: RankFile, module: Mapping[str, StoredTensor], buffers: Container[str]) -> None:
    """Raise CorruptError if a tensor has another shape than its file records. Stage 3 may leave a placeholder."""
    may_be_empty = is_data_parallel_file(model.path)
    held = {fqn: stored.shape for fqn, stored in module.items() if fqn not in buffers}
    held = {fqn: shape for fqn, shape in held.items() if shape != (0,) or not may_be_empty}
    recorded = _recorded_shapes(model) if held else {}
    for fqn, shape in held.items():
        if (expected := recorded.get(fqn)) not in (None, shape):
            what = "the model's tensor has another shape than its file records"
            raise CorruptError(what, **model.where, fqn=fqn, expected=list(expected), found=list(shape))


def natives(model: RankFile, module: Mapping[str, StoredTensor], buffers: Container[str]) -> dict[str, DType]:
    """Return dtypes. Trained parameters without an entry get the engine's."""
    found = {fqn: stored.dtype for fqn, stored in module.items()}
    lacking = [fqn for shapes in param_shapes(model) for fqn in shapes if fqn not in found]
    dtypes = {dtype for fqn, dtype in found.items() if fqn not in buffers}
    return found | dict.fromkeys(lacking, *dtypes) if len(dtypes) == 1 else found


def _recorded_shapes(model: RankFile) -> dict[str, Shape | None]:
    """Return the recorded names with their shapes, None if a shape is unknown."""
    shapes: dict[str, Shape | None] = {}
    if model.content.get("param_shapes") is not None:  # without ZeRO nothing is recorded
        shapes |= {fqn: shape for group in param_shapes(model) for fqn, shape in group.items()}
        shapes |= frozen_shapes(model)
        shapes |= {alias: shapes.get(owner) for alias, owner in ties(model).items()}
    return shapes | dict.fromkeys(buffer_names(model))


def _state_dict(model: RankFile, num_tensor_parallel: int) -> dict[str, StoredTensor]:
    module, num_model_parallel = model.need("module"), model.content.get("mp_world_size")
    if isinstance(num_model_parallel, int) and num_model_parallel not in (0, 1, num_tensor_parallel):
        raise NotFoundError(
            "model parallel runs are not supported", path=model.path, found=f"mp_world_size {num_model_parallel}"
        )
    if not isinstance(module, Mapping):
        raise NotFoundError(
            "DeepSpeed pipelines and model parallel runs are not supported", path=model.path, found="no module"
        )
    if any(_is_component(fqn, value) for fqn, value in module.items()):
        raise NotFoundError("a Megatron-DeepSpeed state dict (nested by component) is not supported", path=model.path)
    return {fqn: value for fqn, value in module.items() if isinstance(value, StoredTensor)}


def _is_component(name: str, value: Any) -> bool:
    """Return True for an entry with parameters. `_extra_state` may be any dict, but has none."""
    if not isinstance(value, Mapping) or name.endswith("_extra_state"):
        return False
    return any(isinstance(inner, StoredTensor | Mapping) for inner in value.values())


def ties(model: RankFile) -> dict[str, str]:
    """Return aliases with their owners. Only global rank 0's file records them."""
    shared = model.content.get("shared_params") or {}
    pairs = shared.items() if isinstance(shared, Mapping) else shared
    return {str(alias): str(owner) for alias, owner in pairs}


def whole(fqn: str, role: str, stored: StoredTensor, rank: int | None = None) -> Tensor:
    extent = stored.extent
    return Tensor(fqn, role, extent.dtype, extent.shape, Whole(extent, rank), extent.dtype)


def with_replicas(
    tensors: Mapping[Key, Tensor], ties: Mapping[str, str], module: Mapping[str, StoredTensor]
) -> dict[Key, Tensor]:
    found: dict[Key, Tensor] = {}
    for alias, owner in ties.items():
        tensor = tensors[owner, WEIGHT]
        found[owner, WEIGHT] = tensor._replace(replicas=(*tensor.replicas, Whole(module[alias].extent)))
    return found


def buffer_names(model: RankFile) -> set[str]:
    return {str(name) for name in model.content.get("buffer_names") or ()}


def shape_dict(value: Any, file: RankFile, what: str) -> dict[str, Shape]:
    """Return shapes, stored as torch.Size, tuple or list."""
    if not isinstance(value, Mapping):
        raise CorruptError(f"{what} is not a dict of shapes", **file.where)
    shapes = {}
    for fqn, shape in value.items():
        sizes = tuple(shape) if isinstance(shape, Sequence) else None
        if not isinstance(fqn, str) or sizes is None or not all(type(n) is int and n >= 0 for n in sizes):
            raise CorruptError(f"{what} is not a dict of shapes", **file.where, fqn=str(fqn))
        shapes[fqn] = sizes
    return shapes


def frozen_shapes(model: RankFile) -> dict[str, Shape]:
    return shape_dict(model.content.get("frozen_param_shapes") or {}, model, "frozen_param_shapes")


def param_shapes(model: RankFile) -> list[dict[str, Shape]]:
    """Return a dict per group, or per sub-group in stage 3, in flattening order."""
    recorded = model.need("param_shapes")
    groups = recorded if isinstance(recorded, Sequence) else [recorded]  # one dict, in very old files
    return [shape_dict(group, model, "param_shapes") for group in groups]


def is_dealt(model: RankFile, inner: RankFile) -> bool:
    """Return True if `round_robin_gradients` reordered the parameters. BF16_Optimizer never does."""
    config = model.content.get("ds_config")
    if not isinstance(config, Mapping) or "zero_stage" not in inner.content or is_bf16_optimizer(config):
        return False
    options = config.get("zero_optimization")
    return bool(isinstance(options, Mapping) and options.get("round_robin_gradients"))


#: From `save_checkpoint(exclude_frozen_parameters=True)`.
FROZEN_LEFT_OUT = (
    "the run was saved without its frozen parameters (DeepSpeed's exclude_frozen_parameters, used by HF Trainer with "
    "PEFT)"
)


def frozen_saved(model: RankFile, stage: int) -> bool | None:
    """Return True if frozen parameters were saved, None if it is unknown.

    Stages 2 and 3 then record a dict (deepspeed 0.19.8, runtime/engine.py, `_common_checkpoint_state`).
    """
    if stage < 2 or "frozen_param_shapes" not in model.content:
        return None
    return model.content["frozen_param_shapes"] is not None


def check_left_out(model: RankFile, fqn: str) -> None:
    """Raise CorruptError for an unrecorded stage 3 placeholder, unless frozen parameters were left out."""
    if frozen_saved(model, 3) is not False:
        raise CorruptError(
            "a parameter's elements are stored nowhere",
            path=model.path,
            fqn=fqn,
            expected="its shape in param_shapes or frozen_param_shapes",
            found="a placeholder",
            hint="DeepSpeed before 0.9.2 saved no frozen parameters under ZeRO-3",
        )


def frozen(models: Sequence[RankFile], ties: Mapping[str, str]) -> Iterator[Tensor]:
    """Yield frozen parameters: whole in a shared file, or one slot per rank file."""
    for fqn, shape in frozen_shapes(models[0]).items():
        if fqn in ties:
            continue
        parts = [_fragment(model, fqn) for model in models]
        if len(models) == 1 and parts[0].shape == shape:
            yield whole(fqn, WEIGHT, parts[0], models[0].rank)
            continue
        extents = [flat_extent(stored, model) for stored, model in zip(parts, models, strict=True)]
        check_lengths(models, extents, slot_size(prod(shape), len(models)), fqn)
        yield Tensor(fqn, WEIGHT, extents[0].dtype, shape, InSlots(extents, 0), extents[0].dtype)


def _fragment(model: RankFile, fqn: str) -> StoredTensor:
    stored = (model.content.get("frozen_param_fragments") or {}).get(fqn)
    if not isinstance(stored, StoredTensor):
        raise CorruptError("a rank's part is missing for a frozen parameter", **model.where, fqn=fqn)
    return stored


def training_state(model: RankFile, optimizer: Mapping[str, Any], **fields: Any) -> TrainingState:
    content = model.content
    found = {name: content[name] for name in (*MODEL_STATE, "ds_config") if content.get(name) is not None}
    found |= {name: value for name, value in optimizer.items() if name not in OPTIMIZER_FILE and value is not None}
    extra = {fqn: v for fqn, v in model.need("module").items() if not isinstance(v, StoredTensor) and v is not None}
    client = {name: value for name, value in content.items() if name not in MODEL_FILE}
    found |= ({"extra_state": extra} if extra else {}) | ({"client_state": client} if client else {})
    step = content.get("global_steps")
    return TrainingState.of_entries("deepspeed", found, step=step if isinstance(step, int) else None, **fields)


_Parts = tuple[str, ...]


@dataclass(frozen=True, slots=True)
class StateDictNames:
    """State dict names matched with recorded names.

    `renamed` maps a dict name to the recorded name. `lacking` has the recorded names without an entry. `lost` is a
    sentence on them if the strict load needs them.
    """

    renamed: Mapping[str, str] = field(default_factory=dict)
    unmatched: frozenset[str] = frozenset()
    lacking: frozenset[str] = frozenset()
    lost: str = ""

    def copies(self, trained: Container[str]) -> frozenset[str]:
        """Return second copies' names."""
        return self.unmatched.union(fqn for fqn in self.renamed.values() if fqn in trained)

    def notes(self) -> Iterator[str]:
        if self.renamed:
            name, recorded = next(iter(self.renamed.items()))
            yield (
                f"the model's state_dict() renames {pluralize(len(self.renamed), 'tensor')} ({recorded} to {name}); "
                "here parameters and buffers have the module tree's names, and trained parameters take the masters' "
                "values"
            )
        if self.unmatched:
            shown = ", ".join(sorted(self.unmatched)[:4])
            yield (
                f"{pluralize(len(self.unmatched), 'entry')} in the model's state_dict() have unknown names ({shown}"
                "): left out, and the masters are used"
            )


def match(module: Mapping[str, StoredTensor], recorded: Mapping[str, Shape | None]) -> StateDictNames:
    """Match entries of `module` with `recorded` names without an entry. Shape None fits every shape.

    Two names match if one has extra parts in one place and the same last part. The most common place wins.
    """
    lacking = {fqn for fqn in recorded if fqn not in module and not _is_expert(fqn)}
    unknown = {tuple(fqn.split(".")): fqn for fqn in module if fqn not in recorded}
    if not lacking or not unknown:
        return StateDictNames(lacking=frozenset(lacking))
    by_parts = {tuple(fqn.split(".")): fqn for fqn in recorded if fqn in lacking}
    found = [
        (block, name, fqn)
        for longer, shorter in ((by_parts, unknown), (unknown, by_parts))
        for parts, one in longer.items()
        for block, rest in _without_a_block(parts)
        if (other := shorter.get(rest)) is not None
        for name, fqn in ([(other, one)] if longer is by_parts else [(one, other)])
        if _fits(module[name].shape, recorded[fqn])
    ]
    votes = Counter(block for block, _, _ in found)
    renamed: dict[str, str] = {}
    for _, name, fqn in sorted(found, key=lambda one: (-votes[one[0]], len(one[0]))):
        if name not in renamed and fqn in lacking:
            renamed[name] = fqn
            lacking.discard(fqn)
    shapes = Counter(recorded[fqn] for fqn in lacking)
    unmatched = (fqn for fqn in unknown.values() if fqn not in renamed)
    return StateDictNames(renamed, frozenset(_as_large(unmatched, module, shapes)), frozenset(lacking))


def _as_large(fqns: Iterable[str], module: Mapping[str, StoredTensor], shapes: Counter[Shape | None]) -> Iterator[str]:
    """Yield each of `fqns` with a shape left in `shapes`; an empty placeholder takes any."""
    left = shapes - Counter({None: shapes[None]})
    for fqn in fqns:
        shape: Shape | None = module[fqn].shape
        if shape == (0,):
            shape = next(iter(left), None)
        if shape in left:
            left = left - Counter([shape])
            yield fqn


def _without_a_block(parts: _Parts) -> Iterator[tuple[_Parts, _Parts]]:
    """Yield runs of parts before the last, and the parts without them."""
    for start in range(len(parts) - 1):
        for stop in range(start + 1, len(parts)):
            yield parts[start:stop], parts[:start] + parts[stop:]


def _fits(shape: Shape, recorded: Shape | None) -> bool:
    return recorded is None or shape in (recorded, (0,))


def _is_expert(fqn: str) -> bool:
    return bool(EXPERT.fullmatch(fqn) or AUTOEP_EXPERTS.fullmatch(fqn))
