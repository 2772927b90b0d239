"""DeepSpeed without ZeRO (stage 0): read.

One file, `mp_rank_00_model_states.pt`, has the module and the optimizer: torch's own in fp32, and under bf16 and fp16
one around it with float32 masters.  Under AutoTP each tensor parallel rank has such a file of its parts
(`converters.deepspeed.autotp`).  With MoE layers there is a file for each expert, and one with the optimizer of each
expert parallel rank, `expp_rank_E_mp_rank_00_optim_states.pt`.  Format facts are from deepspeed 0.19.8:
runtime/engine.py (`_save_checkpoint`, `_save_moe_checkpoint`), runtime/fp16/unfused_optimizer.py (`state_dict`).
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ckpt.base.errors import CorruptError, UsageError
from ckpt.containers.sources import RankFile, Sources, check_all_there
from ckpt.containers.torchfile.scalars import read_scalar
from ckpt.containers.torchfile.values import StoredTensor
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
)
from ckpt.plan.tensors import Shape, Tensor, Whole
from ckpt.run_folder.finding import Steps, find_step, meant
from ckpt.run_folder.steps import LATEST
from ckpt.state.numbered import names_by_shapes
from converters.deepspeed import model_file
from converters.deepspeed.autoep import experts_of, routers
from converters.deepspeed.autotp import Slice, sharing_of, together
from converters.deepspeed.folder import (
    is_model_file,
    is_of_experts,
    is_universal,
    list_step_folder,
    refuse_unsupported,
    tensor_parallel_ranks,
)
from converters.deepspeed.rank_files import hyperparameters, known_structure
from converters.deepspeed.sharing import Sharing

#: What DeepSpeed calls the param groups of experts by.
_EP_SIZE = re.compile(r"ep_size_(\d+)")
#: The entries of an optimizer that describe tensors; the others are training state.
_TENSORS = ("optimizer_state_dict", "fp32_groups", "fp32_groups_flat", "state", "param_groups")


class Stage0(Format):
    name = "zero0"
    title = "DeepSpeed without ZeRO"
    namespace = TRANSFORMERS
    writes = False
    always_has_optimizer = True
    loads_from = "run"

    def find(self, path: Path, tag: str | None) -> Path | None:
        """The step folder that `path` is, that `tag` names in it, or that its `latest` records.

        NotFoundError for what DeepSpeed writes and no format here is of.
        """
        found = find_step(path, tag, _STEPS)
        folders = [path, *meant(path, tag, _STEPS)] if found is None and path.is_dir() else []
        for folder in folders:
            if not _is_step(folder):
                refuse_unsupported(folder)
        return found

    def read(self, path: Path, request: ReadRequest) -> Checkpoint:
        """Describe a step; an optimizer's states get the names that the shapes prove, or are left out with a note."""
        with known_structure(path):
            return _read(path, [one for one in (request.config, path, path.parent) if one])

    def lay_out(self, checkpoint: Checkpoint, layout: Layout) -> Target:
        raise UsageError("the format 'zero0' cannot be written", hint="`zero1` resumes with any stage's config")


ZERO0 = Stage0()


def _is_step(folder: Path) -> bool:
    """Whether the folder has model files of tensor parallel ranks, one mostly, and neither partitions nor layers.

    A universal checkpoint made of stage 1 or 2 has the same ones.
    """
    names = [name for name in names_in(folder) if name.endswith("_states.pt")] if folder.is_dir() else []
    names = [name for name in names if not is_of_experts(name)]
    return bool(names) and all(map(is_model_file, names)) and not is_universal(folder)


_STEPS = Steps(_is_step, record=LATEST)


def _read(path: Path, folders: Sequence[Path]) -> Checkpoint:
    ranks, sources = tensor_parallel_ranks(path), Sources()
    if not any(ranks):
        only = _held(path, sources, 0, 1)
        return _checkpoint(only, only.groups)
    sharing = sharing_of(_model_file(path, ranks[0], Sources()), ranks, folders)
    held = [_held(path, Sources(storages=sources.storages), rank, len(ranks)) for rank in ranks]
    is_proved = all(one.groups is not None for one in held)
    slices = [Slice(_checkpoint(one, one.groups if is_proved else None), one.file) for one in held]
    return together(slices, sharing, sources)


def _model_file(path: Path, tp_rank: int, sources: Sources) -> RankFile:
    name = list_step_folder(path, tp_rank).model
    assert name is not None
    return sources.of_rank(name, 0, "DeepSpeed file")


@dataclass(frozen=True)
class _Held:
    """What a tensor parallel rank has, the only one mostly: tensors of its module, and the optimizer's param groups.

    `groups` is None where nothing proves which parameters they have.
    """

    path: Path
    sources: Sources
    file: RankFile
    num_ranks: int
    sharing: Sharing
    tensors: Mapping[Key, Tensor]
    ties: Mapping[str, str]
    optimizers: Sequence[_Numbered]
    groups: Sequence[_Group] | None


def _held(path: Path, sources: Sources, tp_rank: int, num_ranks: int) -> _Held:
    folder, file = list_step_folder(path, tp_rank), _model_file(path, tp_rank, sources)
    sharing, experts = experts_of(folder.experts, file, sources)
    module, buffers = model_file.module(file, num_ranks), model_file.buffer_names(file)
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
    optimizers = [_Numbered(file, file.content.get("optimizer"))]
    if sizes := optimizers[0].expert_parallel_sizes:
        name, files = "expp_rank_{}_mp_rank_00_optim_states.pt", folder.experts_optimizer
        example = name.format(next((rank for rank in range(max(sizes)) if rank not in files), 0))
        check_all_there("optimizers of expert parallel ranks are missing", files, max(sizes), path, example)
        ranks = [sources.of_rank(files[rank], rank, "DeepSpeed file") for rank in sorted(files)]
        sources.check_distinct((each.rank, each.path) for each in ranks)  # each has experts of its own
        optimizers = [_Numbered(each, each.need("optimizer")) for each in ranks]
    shapes = {fqn: tensor.shape for (fqn, role), tensor in tensors.items() if role == WEIGHT}
    groups = _groups(shapes, optimizers, sharing) if optimizers[0].groups else []
    return _Held(path, sources, file, num_ranks, sharing, tensors, ties, optimizers, groups)


def _checkpoint(held: _Held, groups: Sequence[_Group] | None) -> Checkpoint:
    """What a tensor parallel rank has as if it were a model, with the states of `groups`."""
    file, tensors = held.file, dict(held.tensors)
    notes: list[str] = []
    scalars: dict[str, dict[str, Any]] = {}
    if "optimizer" not in file.content:
        name = Path(file.path).name
        notes.append(f"{name} lacks the entry 'optimizer', which DeepSpeed always writes: there are no states of one")
    if groups is None:
        notes.append(
            "the optimizer's states and masters are left out: DeepSpeed numbers them without names, and their shapes "
            "do not prove which parameter has which number"
            + (", or layers are of several ep_size" if len(held.optimizers[0].expert_parallel_sizes) > 1 else "")
        )
    ranks = range(len(held.optimizers))
    for number in sorted({group.number for group in groups or ()}):
        parts = [_values(group, tensors, scalars, notes) for group in groups or () if group.number == number]
        tensors |= {tensor.key: tensor for tensor in held.sharing.together(parts, [ranks] * len(parts))}
    version, dp = (file.content.get(name) for name in ("ds_version", "dp_world_size"))
    others = {name: value for name, value in (file.content.get("optimizer") or {}).items() if name not in _TENSORS}
    state = model_file.training_state(
        file,
        others,
        param_groups=_param_groups(groups or (), held.sharing),
        scalars=scalars,
        engine_version=version,
    )
    return Checkpoint(
        path=str(held.path),
        format="zero0",
        tensors=tensors,
        files=held.sources.files,
        framework=f"deepspeed {version}" if version else "deepspeed",
        tag=held.path.name,
        world_size=dp if held.num_ranks > 1 and isinstance(dp, int) else None,
        ties=held.ties,
        state=state,
        folders=(str(held.path.parent),),
        notes=(*notes, *held.sources.notes),
    )


def _values(
    group: _Group, tensors: Mapping[Key, Tensor], scalars: dict[str, dict[str, Any]], notes: list[str]
) -> dict[Key, Tensor]:
    """Masters and states of a group's parameters; states of one number are noted, others that are no tensors told."""
    found: dict[Key, Tensor] = {}
    for fqn, role, value in group.values():
        shape, native = group.shapes[fqn], tensors[fqn, WEIGHT].dtype
        if isinstance(value, StoredTensor) and value.extent.shape == shape and role != "step":
            source = Whole(value.extent, group.optimizer.file.rank)
            found[fqn, role] = Tensor(fqn, role, value.extent.dtype, shape, source, native)
        elif isinstance(value, StoredTensor) and value.extent.numel == 1:
            scalars.setdefault(role, {})[fqn] = read_scalar(value.extent)
        elif isinstance(value, int | float):
            scalars.setdefault(role, {})[fqn] = value
        else:
            notes.append(f"the optimizer state {role} of {fqn} is left out: it is not of the parameter's shape")
    return found


class _Numbered:
    """An optimizer's `groups` of numbers, its `states` by number, and its `masters` beside the numbers of a group.

    Raises CorruptError for what is no optimizer's state, or has states of no parameter.
    """

    def __init__(self, file: RankFile, optimizer: Any) -> None:
        self.file, optimizer = file, optimizer or {}
        if not isinstance(optimizer, Mapping):
            raise CorruptError("this is no optimizer's state", path=file.path, found=type(optimizer).__name__)
        self.base: Mapping[str, Any] = optimizer.get("optimizer_state_dict", optimizer)
        self.groups: list[Sequence[Any]] = [group["params"] for group in self.base.get("param_groups") or ()]
        self.states: Mapping[Any, Mapping[str, Any]] = self.base.get("state") or {}
        held = optimizer.get("fp32_groups")
        self.masters = held if held is not None else [[None] * len(numbers) for numbers in self.groups]
        self.options = hyperparameters(self.base)
        if "optimizer_state_dict" in optimizer and not {"fp32_groups", "fp32_groups_flat"} & set(optimizer):
            raise CorruptError("the optimizer's masters are missing", path=file.path, expected="fp32_groups")
        strangers = set(self.states) - {number for numbers in self.groups for number in numbers}
        if strangers:
            raise CorruptError(
                "the optimizer has states of a parameter that is in no param group",
                path=file.path,
                found=", ".join(map(str, list(strangers)[:4])),
            )

    @property
    def expert_parallel_sizes(self) -> set[int]:
        """The sizes by which groups of experts are called."""
        names = [_EP_SIZE.fullmatch(str(options.get("name"))) for options in self.options if options.get("moe")]
        return {int(match[1]) for match in names if match}

    def shapes(self, group: int) -> list[tuple[int, ...] | None]:
        """The shape of each parameter of a group: its master's, or else that of its first state with dims."""
        found: list[tuple[int, ...] | None] = []
        for number, master in zip(self.groups[group], self.masters[group], strict=True):
            states = [value for name, value in self.states.get(number, {}).items() if name != "step"]
            stored = [value.extent.shape for value in (master, *states) if isinstance(value, StoredTensor)]
            found.append(stored[0] if stored else None)
        return found


@dataclass(frozen=True)
class _Group:
    """Param group `number` of an optimizer, its parameters by name, and their shapes on the rank that has it."""

    optimizer: _Numbered
    number: int
    fqns: tuple[str, ...]
    shapes: Mapping[str, Shape]

    def values(self) -> Iterator[tuple[str, str, Any]]:
        """Masters and states: whose, which, and what is stored."""
        held = zip(self.optimizer.groups[self.number], self.optimizer.masters[self.number], strict=True)
        for fqn, (number, master) in zip(self.fqns, held, strict=True):
            if master is not None:
                yield fqn, MASTER, master
            for role, value in self.optimizer.states.get(number, {}).items():
                yield fqn, role, value


def _groups(shapes: Mapping[str, Shape], optimizers: Sequence[_Numbered], sharing: Sharing) -> list[_Group] | None:
    """The param groups of `optimizers`, by expert parallel rank: those of experts of each, the others once.

    None where the shapes do not prove which parameters they have, or where ranks share experts in several ways.
    """
    first = optimizers[0]
    if first.expert_parallel_sizes - {len(optimizers)}:
        return None
    known, found = replace(sharing, num_ranks=len(optimizers)), []
    for rank, optimizer in enumerate(optimizers):
        for of_experts in (True, False) if rank == 0 else (True,):
            some = {fqn: shape for fqn, shape in shapes.items() if known.is_shared(fqn) == of_experts}
            own = known.held_by(rank, some)
            numbers = [n for n, options in enumerate(first.options) if bool(options.get("moe")) == of_experts]
            held = [optimizer.shapes(number) for number in numbers]
            names = names_by_shapes(own, held) if numbers else []
            if names is None:
                return None
            found += [_Group(optimizer, number, fqns, own) for number, fqns in zip(numbers, names, strict=True)]
    return found


def _param_groups(groups: Sequence[_Group], sharing: Sharing) -> tuple[ParamGroup, ...]:
    """The param groups of the whole model: the ranks' parts of a group are joined."""
    found: dict[int, list[str]] = {}
    for group in groups:
        found.setdefault(group.number, []).extend(group.fqns)
    options = groups[0].optimizer.options if groups else []
    return tuple(ParamGroup(sharing.in_order(fqns), options[number]) for number, fqns in sorted(found.items()))
