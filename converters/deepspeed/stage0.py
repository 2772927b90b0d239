"""DeepSpeed without ZeRO (stage 0): reader.

`mp_rank_00_model_states.pt` has the module and the optimizer: torch's own in fp32, and under bf16 and fp16 a wrapper
with float32 masters. Under AutoTP each tensor-parallel rank has such a file (`converters.deepspeed.autotp`). With MoE
layers there is a file per expert, and one per expert-parallel rank's optimizer,
`expp_rank_E_mp_rank_00_optim_states.pt`. Format facts: deepspeed 0.19.8, runtime/engine.py (`_save_checkpoint`,
`_save_moe_checkpoint`), runtime/fp16/unfused_optimizer.py (`state_dict`).
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ckpt.base.errors import CorruptError, UsageError
from ckpt.containers.sources import RankFile, Sources, check_all_there
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
    QuantizedStates,
    ReadRequest,
    Target,
)
from ckpt.plan.tensors import Shape, Tensor, Whole
from ckpt.runs.finding import Steps, candidate_folders, find_step
from ckpt.runs.steps import LATEST
from converters.deepspeed import model_file
from converters.deepspeed.autoep import experts_of, routers
from converters.deepspeed.autotp import RankSlice, sharing_of, together
from converters.deepspeed.folder import (
    ALIASES,
    is_model_file,
    is_of_experts,
    is_universal,
    list_step_folder,
    refuse_unsupported,
    tensor_parallel_ranks,
)
from converters.deepspeed.rank_files import known_structure
from converters.deepspeed.sharing import Sharing
from converters.optimizers.state_dicts import GROUPS, STATE, Optimizer, take_apart
from converters.optimizers.states import OptimizerStates

#: Name of an expert group.
_EP_SIZE = re.compile(r"ep_size_(\d+)")
#: Optimizer entries for tensors. All others are training state.
_TENSORS = ("optimizer_state_dict", "fp32_groups", "fp32_groups_flat", STATE, GROUPS)


class Stage0(Format):
    name = "zero0"
    title = "DeepSpeed without ZeRO"
    aliases = ALIASES
    namespace = TRANSFORMERS
    writes = False
    always_has_optimizer = True
    loads_from = "run"

    def find(self, path: Path, tag: str | None) -> Path | None:
        found = find_step(path, tag, _STEPS)
        folders = [path, *candidate_folders(path, tag, _STEPS)] if found is None and path.is_dir() else []
        for folder in folders:
            if not _is_step(folder):
                refuse_unsupported(folder)
        return found

    def read(self, path: Path, request: ReadRequest) -> Checkpoint:
        """Name states by their shapes, or leave them out with a note."""
        with known_structure(path):
            return _read(path, [one for one in (request.config, path, path.parent) if one])

    def lay_out(self, checkpoint: Checkpoint, layout: Layout) -> Target:
        raise UsageError("ckpt cannot write the format 'zero0'")


ZERO0 = Stage0()


def _is_step(folder: Path) -> bool:
    names = [name for name in names_in(folder) if name.endswith("_states.pt")] if folder.is_dir() else []
    names = [name for name in names if not is_of_experts(name)]
    return bool(names) and all(map(is_model_file, names)) and not is_universal(folder)


_STEPS = Steps(_is_step, record=LATEST)


def _read(path: Path, folders: Sequence[Path]) -> Checkpoint:
    ranks, sources = tensor_parallel_ranks(path), Sources()
    if not any(ranks):
        only = _read_rank_tensors(path, sources, 0, 1)
        return _checkpoint(only, only.named)
    sharing = sharing_of(_model_file(path, ranks[0], Sources()), ranks, folders)
    held = [_read_rank_tensors(path, Sources(storages=sources.storages), rank, len(ranks)) for rank in ranks]
    is_proved = all(one.named is not None for one in held)
    slices = [RankSlice(_checkpoint(one, one.named if is_proved else None), one.file) for one in held]
    return together(slices, sharing, sources)


def _model_file(path: Path, tp_rank: int, sources: Sources) -> RankFile:
    name = list_step_folder(path, tp_rank).model
    assert name is not None
    return sources.of_rank(name, 0, "DeepSpeed file")


@dataclass(frozen=True)
class _RankContent:
    """One tensor-parallel rank's module tensors and optimizer.

    `optimizers` belong to expert-parallel ranks. `named` is None without proof.
    """

    path: Path
    sources: Sources
    file: RankFile
    num_ranks: int
    sharing: Sharing
    tensors: Mapping[Key, Tensor]
    ties: Mapping[str, str]
    optimizers: Sequence[Optimizer]
    named: Sequence[Optimizer] | None
    lost: str


def _read_rank_tensors(path: Path, sources: Sources, tp_rank: int, num_ranks: int) -> _RankContent:
    folder, file = list_step_folder(path, tp_rank), _model_file(path, tp_rank, sources)
    sharing, experts = experts_of(folder.experts, file, sources)
    (module, names), buffers = model_file.module_and_names(file, num_ranks), model_file.buffer_names(file)
    tensors: dict[Key, Tensor] = {}
    again = routers(file, module)
    ties = dict(again)
    owners: dict[Any, str] = {}
    for fqn, stored in module.items():
        if fqn in again:
            continue
        if stored.extent.numel and owners.setdefault(stored.extent, fqn) != fqn:
            ties[fqn] = owners[stored.extent]
        else:
            role = BUFFER if fqn in buffers else WEIGHT
            tensors[fqn, role] = model_file.whole(fqn, role, stored, 0)
    tensors.update(model_file.with_replicas(tensors, again, module))
    tensors.update(experts)
    optimizers = [_optimizer(file)]
    if sizes := _expert_parallel_sizes(optimizers[0]):
        name, files = "expp_rank_{}_mp_rank_00_optim_states.pt", folder.experts_optimizer
        example = name.format(next((rank for rank in range(max(sizes)) if rank not in files), 0))
        check_all_there("optimizers of expert parallel ranks are missing", files, max(sizes), path, example)
        ranks = [sources.of_rank(files[rank], rank, "DeepSpeed file") for rank in sorted(files)]
        sources.check_distinct((each.rank, each.path) for each in ranks)  # each has its own experts
        optimizers = [_optimizer(each) for each in ranks if each.need("optimizer") is not None]
    shapes = {fqn: tensor.shape for (fqn, role), tensor in tensors.items() if role == WEIGHT}
    sharing = replace(sharing, num_ranks=len(optimizers))
    named = _named(shapes, optimizers, sharing) if optimizers[0].groups else []
    return _RankContent(path, sources, file, num_ranks, sharing, tensors, ties, optimizers, named, names.lost)


def _checkpoint(held: _RankContent, named: Sequence[Optimizer] | None) -> Checkpoint:
    file, tensors = held.file, dict(held.tensors)
    notes: list[str] = []
    unmapped = ""
    if "optimizer" not in file.content:
        name = Path(file.path).name
        notes.append(f"{name} lacks the entry 'optimizer' from DeepSpeed: it has no optimizer states")
    if named is None:
        unmapped = (
            "left out the optimizer states and masters: DeepSpeed numbers them, and their shapes don't map the "
            "numbers to parameters"
            + (", or layers are of several ep_size" if len(_expert_parallel_sizes(held.optimizers[0])) > 1 else "")
        )
        notes.append(unmapped)
    missing = _missing_optimizer(file)
    states, ranks = OptimizerStates(groups=_groups(named or (), held.sharing)), range(len(held.optimizers))
    parts = [_read_states(optimizer, rank, held, states) for rank, optimizer in enumerate(named or ())]
    tensors |= {tensor.key: tensor for tensor in held.sharing.together(parts, [ranks] * len(parts))}
    version, dp = (file.content.get(name) for name in ("ds_version", "dp_world_size"))
    others = {name: value for name, value in (file.content.get("optimizer") or {}).items() if name not in _TENSORS}
    return Checkpoint(
        path=str(held.path),
        format="zero0",
        tensors=tensors,
        files=held.sources.files,
        framework=f"deepspeed {version}" if version else "deepspeed",
        tag=held.path.name,
        world_size=dp if held.num_ranks > 1 and isinstance(dp, int) else None,
        ties=held.ties,
        state=model_file.training_state(file, others, engine_version=version, **states.recorded()),
        folders=(str(held.path.parent),),
        notes=(*notes, *([missing] if missing else []), *held.sources.notes),
        missing_optimizer=missing,
        lost_weights=held.lost,
        unmapped_optimizer=unmapped,
        computed=states.computed,
        quantized=QuantizedStates(states.quantized),
        unread=states.left_out(),
    )


def _missing_optimizer(file: RankFile) -> str | None:
    """Return why a ZeRO run's optimizer is missing. From stage 1 on it has its own files."""
    options = (file.content.get("ds_config") or {}).get("zero_optimization")
    stage = options.get("stage") if isinstance(options, dict) else None
    if not stage or file.content.get("optimizer"):
        return None
    return f"the optimizer's files (*_optim_states.pt) are missing: the run used ZeRO stage {stage}"


def _read_states(optimizer: Optimizer, rank: int, held: _RankContent, states: OptimizerStates) -> dict[Key, Tensor]:
    own = replace(states, tensors={})
    shapes = held.sharing.rank_shapes(rank, {fqn: t.shape for (fqn, role), t in held.tensors.items() if role == WEIGHT})
    for fqn, values in optimizer.states.items():
        own.add(fqn, shapes[fqn], values, held.file.path)
    own.check_shapes(shapes, held.file.path)
    own.check_all_there({fqn: shapes[fqn] for fqn in optimizer.states}, held.file.path)
    for (fqn, role), tensor in list(own.tensors.items()):
        source = tensor.source._replace(rank=rank) if isinstance(tensor.source, Whole) else tensor.source
        own.tensors[fqn, role] = tensor._replace(source=source, native=held.tensors[fqn, WEIGHT].dtype)
        if tensor.shape != shapes[fqn]:
            states.unread.add(role, "it is not of the parameter's shape", [fqn])
            del own.tensors[fqn, role]
    return own.tensors


def _optimizer(file: RankFile) -> Optimizer:
    optimizer = file.content.get("optimizer") or {}
    if not isinstance(optimizer, Mapping):
        raise CorruptError("this is not an optimizer state", path=file.path, found=type(optimizer).__name__)
    if "optimizer_state_dict" in optimizer and not {"fp32_groups", "fp32_groups_flat"} & set(optimizer):
        raise CorruptError("the optimizer's masters are missing", path=file.path, expected="fp32_groups")
    found = take_apart(optimizer.get("optimizer_state_dict", optimizer), file.path)
    found.check_members(file.path)
    found = replace(found, groups=found.without_names())
    if (masters := optimizer.get("fp32_groups")) is None:
        return found
    every = dict(found.states)
    for group, held in zip(found.groups, masters, strict=True):
        every |= {key: {MASTER: one, **every.get(key, {})} for key, one in zip(group.fqns, held, strict=True)}
    return replace(found, states=every)


def _expert_parallel_sizes(optimizer: Optimizer) -> set[int]:
    names = [_EP_SIZE.fullmatch(str(group.options.get("name"))) for group in optimizer.groups if _is_of_experts(group)]
    return {int(match[1]) for match in names if match}


def _is_of_experts(group: ParamGroup) -> bool:
    return bool(group.options.get("moe"))


def _named(shapes: Mapping[str, Shape], optimizers: Sequence[Optimizer], sharing: Sharing) -> list[Optimizer] | None:
    """Return None without proof, or if ranks share experts in several ways."""
    if _expert_parallel_sizes(optimizers[0]) - {len(optimizers)}:
        return None
    found = []
    for rank, optimizer in enumerate(optimizers):
        names: dict[Any, str] = {}
        for of_experts in (True, False) if rank == 0 else (True,):
            some = {fqn: shape for fqn, shape in shapes.items() if sharing.is_shared(fqn) == of_experts}
            groups = tuple(group for group in optimizer.groups if _is_of_experts(group) == of_experts)
            proved = replace(optimizer, groups=groups).names(proof=sharing.rank_shapes(rank, some)) if groups else {}
            if proved is None:
                return None
            names |= proved
        found.append(optimizer.named(names))
    return found


def _groups(named: Sequence[Optimizer], sharing: Sharing) -> tuple[ParamGroup, ...]:
    every = zip(*(optimizer.groups for optimizer in named), strict=True)
    return tuple(
        replace(groups[0], fqns=sharing.in_order(fqn for group in groups for fqn in group.fqns)) for groups in every
    )
