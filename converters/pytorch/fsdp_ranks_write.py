"""Writer of rank files for verl's `load_checkpoint`.

    latest_checkpointed_iteration.txt                                  if the step is known
    global_step_N/actor/model_world_size_W_rank_R.pt                   the state dict, a DTensor per parameter
    global_step_N/actor/optim_world_size_W_rank_R.pt                   optimizer.state_dict()
    global_step_N/actor/extra_state_world_size_W_rank_R.pt             lr_scheduler, rng
    global_step_N/actor/fsdp_config.json, huggingface/                 FSDP_version, world_size; config and tokenizer

All parameters are sharded on dim 0 over all ranks (verl's `fsdp_size=-1`). FSDP2's optimizer has DTensors sharded in
the same way, numbered in param group order. Their names are recorded, too (`param_names`, since torch 2.6). FSDP1's
optimizer has slices of flat parameters.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ckpt.base.errors import LossError, UsageError
from ckpt.base.text import Brief, pluralize
from ckpt.base.words import Message, Note
from ckpt.containers.torchfile.values import Record, StoredDict
from ckpt.containers.torchfile.write import FromSource, NewTensor, copy_of, state_number, torch_file, with_gaps
from ckpt.move.files import confined
from ckpt.move.source import read_file
from ckpt.plan.checkpoint import BUFFER, MASTER, MODEL_ROLES, Checkpoint, Key, Layout, ParamGroup, Target, TargetFile
from ckpt.plan.dtypes import DType
from ckpt.plan.precision import Choice, kept_in_training
from ckpt.plan.tensors import FlatRange, Shape, Tensor
from ckpt.runs.steps import TRACKER
from ckpt.runs.trainer_files import model_files
from ckpt.state import adam
from ckpt.state.plain import is_plain
from converters.optimizers.states import check_can_be_read
from converters.pytorch.dtensors import DTensors, form_note, shard
from converters.pytorch.facts import TorchFacts
from converters.pytorch.flat_parameters import slice_length, slice_pieces
from converters.pytorch.ranks_options import MeshOptions, RanksOptions
from converters.quantized.states import Stored
from converters.quantized.stored_states import carried_tensor

_ROLES = ("actor", "critic")
_RNG = "rng_state"
_DATA = "data.pt"


def lay_out(checkpoint: Checkpoint, layout: Layout) -> Target:
    """Return the files of one step.

    Raise UsageError if the number of ranks is unknown, or FSDP1 is requested without known flat parameters.
    """
    check_can_be_read(checkpoint)
    options = layout.read(RanksOptions)
    num_ranks = layout.num_ranks(checkpoint)
    facts = checkpoint.facts_of(TorchFacts)
    version = options.fsdp_version or (1 if facts.flat_parameters else 2)
    if version == 1 and not facts.flat_parameters:
        raise UsageError(
            "the source does not record FSDP1's flat parameters",
            path=checkpoint.path,
            hint=Message("use {fsdp_version=2} to write files for FSDP2 (verl: strategy fsdp2)"),
        )
    chosen = kept_in_training(checkpoint, layout.dtype)
    states = _States.of(checkpoint, chosen)
    folder = _step_folder(checkpoint)
    files: list[TargetFile] = []
    schedule, rng, dropped = _rest(checkpoint, num_ranks)
    for rank in range(num_ranks):
        dtensors = DTensors(facts.dtensor, layout.read(MeshOptions).mesh_device, num_ranks, rank)
        suffix = f"world_size_{num_ranks}_rank_{rank}.pt"
        model = _rank_model(checkpoint, chosen, dtensors)
        files.append(torch_file(f"{folder}model_{suffix}", model))
        if states.groups:
            optimizer = states.flat(num_ranks, rank) if version == 1 else states.sharded(dtensors, num_ranks, rank)
            files.append(torch_file(f"{folder}optim_{suffix}", optimizer))
        extra = {"lr_scheduler": schedule, **({"rng": rng[rank]} if rng else {})}
        files.append(torch_file(f"{folder}extra_state_{suffix}", extra))
    config = json.dumps({"FSDP_version": version, "world_size": num_ranks}, indent=4)
    files.append(TargetFile.of_bytes(f"{folder}fsdp_config.json", config.encode()))
    beside, notes = model_files(checkpoint, layout.dtype)
    files += [replace(file, name=f"{folder}huggingface/{file.name}") for file in beside]
    if checkpoint.state.step is not None:
        files.append(TargetFile.of_bytes(TRACKER, str(checkpoint.state.step).encode()))
        files += _position(checkpoint)
    written = {choice.key for choice in chosen.values()}
    if masters := sum(role == MASTER and (fqn, role) not in written for fqn, role in checkpoint.tensors):
        what = pluralize(masters, "parameter")
        dropped.append(Note("fp32 masters of {}: {dtype} requests weights in {}", what, layout.dtype))
    return Target(
        files=tuple(files),
        left_out=states.left_out,
        dropped=tuple(dropped),
        notes=(*_rank_notes(checkpoint, states, version, num_ranks), *notes),
    )


def _step_folder(checkpoint: Checkpoint) -> str:
    """Return verl's folder with a trailing slash, or "" if the step is unknown."""
    if checkpoint.state.step is None:
        return ""
    own = Path(checkpoint.path).name
    return f"global_step_{checkpoint.state.step}/{own if own in _ROLES else _ROLES[0]}/"


def _position(checkpoint: Checkpoint) -> Iterator[TargetFile]:
    """Yield the data position, unchanged. verl stores it once for all roles, beside their folders."""
    path = Path(checkpoint.path)
    if path.name in _ROLES and (path.parent / _DATA).is_file():
        content = read_file(confined(path.parent, _DATA))
        yield TargetFile.of_bytes(f"global_step_{checkpoint.state.step}/{_DATA}", content)


def _rank_notes(checkpoint: Checkpoint, states: _States, version: int, num_ranks: int) -> Iterator[str]:
    before = checkpoint.world_size
    changed = f", from {before}" if before not in (None, num_ranks) else ""
    yield Brief(f"FSDP{version} on {pluralize(num_ranks, 'rank')}{changed}")
    path = Path(checkpoint.path)
    for role in _ROLES:
        if path.name in _ROLES and role != path.name and (path.parent / role).is_dir():
            yield f"{role}/ next to it is a separate checkpoint: convert {path.parent / role}, too, and put it here"
    if not states.groups:
        yield "wrote no optimizer files: the source records no param groups (verl: load_contents without optimizer)"
    if len(states.groups) > 1:
        yield f"{pluralize(len(states.groups), 'param group')}, like the source; verl's own optimizer has one"
    if (note := form_note(checkpoint.facts_of(TorchFacts).dtensor)) is not None:
        yield note


def _rest(checkpoint: Checkpoint, num_ranks: int) -> tuple[Any, list[Any], list[str]]:
    """Return the LR scheduler, the random states by rank, and notes."""
    state = checkpoint.state
    dropped = []
    schedule = state.lr_scheduler
    if schedule is not None and not (isinstance(schedule, Mapping) and "last_epoch" in schedule and is_plain(schedule)):
        dropped.append("training state lr_scheduler: it is not of torch's")
        schedule = None
    known = state.per_rank.get(_RNG, {})
    ranks = [str(rank) for rank in range(num_ranks)]
    rng = [known[rank] for rank in ranks] if list(known) == ranks else []
    if known and not rng:
        dropped.append(f"random states of {pluralize(len(known), 'rank')}: the number of ranks changed")
    others = replace(state, lr_scheduler=None, extra_state=None).entries().keys() - {_RNG}
    dropped += [f"training state {name}: verl's files cannot hold it" for name in sorted(others)]
    return schedule, rng, dropped


def _rank_model(checkpoint: Checkpoint, chosen: Mapping[str, Choice], dtensors: DTensors) -> StoredDict:
    """Share one tensor between tied names. Buffers are whole on every rank."""
    state = StoredDict("OrderedDict")
    for fqn, choice in chosen.items():
        state[fqn] = _part(choice.tensor, choice.dtype, dtensors)
    for alias, owner in checkpoint.ties.items():
        if owner in chosen and alias not in chosen:
            state[alias] = state[owner]
    state.update(checkpoint.state.extra_state or {})
    return state


def _part(tensor: Tensor, dtype: DType, dtensors: DTensors) -> Record | NewTensor:
    if not tensor.shape or tensor.role == BUFFER:
        return copy_of(tensor, dtype)
    return dtensors.part_of(tensor.key, dtype, tensor.shape)


@dataclass(frozen=True, slots=True)
class _States:
    groups: tuple[ParamGroup, ...]
    units: tuple[tuple[str, ...], ...]
    shapes: Mapping[str, Shape]
    tensors: Mapping[str, Mapping[str, Tensor]]
    scalars: Mapping[str, Mapping[str, Any]]
    blocks: Mapping[Key, Stored]
    left_out: Mapping[Key, str]

    @classmethod
    def of(cls, checkpoint: Checkpoint, chosen: Mapping[str, Choice]) -> _States:
        shapes = {fqn: choice.tensor.shape for fqn, choice in chosen.items()}
        groups = tuple(
            ParamGroup(tuple(dict.fromkeys(checkpoint.ties.get(fqn, fqn) for fqn in group.fqns)), group.options)
            for group in checkpoint.state.param_groups
        )
        owned = {fqn for group in groups for fqn in group.fqns}
        tensors: dict[str, dict[str, Tensor]] = {}
        left_out: dict[Key, str] = {}
        for (fqn, role), tensor in checkpoint.tensors.items():
            if role in MODEL_ROLES:
                continue
            if not groups:
                left_out[fqn, role] = (
                    "the optimizer states: these files number them by param group, and the source records no groups"
                )
            elif fqn not in owned or tensor.shape != shapes.get(fqn):
                left_out[fqn, role] = f"optimizer state {role} of {fqn}: its shape differs from its parameter"
            else:
                tensors.setdefault(fqn, {})[role] = tensor
        scalars: dict[str, dict[str, Any]] = {}
        for name, values in checkpoint.state.scalars.items():
            for fqn, value in values.items():
                scalars.setdefault(fqn, {})[name] = value
        units, blocks = checkpoint.facts_of(TorchFacts).flat_parameters, checkpoint.quantized.blocks
        return cls(groups, units, shapes, tensors, scalars, blocks, left_out)

    def _options(self, group: ParamGroup) -> dict[str, Any]:
        options = {name: value for name, value in group.options.items() if name not in ("params", "param_names")}
        roles = {role for fqn in group.fqns for role in self.tensors.get(fqn, ())}
        return options | (adam.missing_for_torch(options, None) if adam.is_adam(options, roles) else {})

    def sharded(self, dtensors: DTensors, num_ranks: int, rank: int) -> dict[str, Any]:
        """Return states by number, with a DTensor per tensor."""
        states: dict[int, dict[str, Any]] = {}
        groups, count = [], 0
        for group in self.groups:
            numbers = list(range(count, count := count + len(group.fqns)))
            for index, fqn in zip(numbers, group.fqns, strict=True):
                held = {name: state_number(name, value) for name, value in self.scalars.get(fqn, {}).items()}
                for name, tensor in self.tensors.get(fqn, {}).items():
                    if (stored := self.blocks.get((fqn, name))) is None:
                        held[name] = _part(tensor, tensor.dtype, dtensors)
                        continue
                    box = shard(tensor.shape, num_ranks, rank)
                    held[name] = dtensors.make(tensor.dtype, tensor.shape, carried_tensor((fqn, name), stored, box))
                if held:
                    states[index] = held
            groups.append({**self._options(group), "params": numbers, "param_names": list(group.fqns)})
        return {"state": states, "param_groups": groups}

    def flat(self, num_ranks: int, rank: int) -> dict[str, Any]:
        """Return slices of flat parameters by number."""
        if len(self.groups) != 1:
            raise LossError("flat parameters support only one param group", found=str(len(self.groups)))
        states: dict[int, dict[str, Any]] = {}
        for index, unit in enumerate(self.units):
            held = self._numbers(unit)
            length = slice_length(unit, self.shapes, num_ranks)
            pieces = list(slice_pieces(unit, self.shapes, num_ranks, rank))
            for name in dict.fromkeys(name for fqn in unit for name in self.tensors.get(fqn, ())):
                held[name] = self._slice(unit, name, length, pieces)
            if held:
                states[index] = held
        (group,) = self.groups
        return {
            "state": states,
            "param_groups": [{**self._options(group), "params": list(range(len(self.units)))}],
        }

    def _slice(self, unit: Sequence[str], name: str, length: int, pieces: Sequence[Any]) -> NewTensor:
        found = {fqn: self.tensors.get(fqn, {}).get(name) for fqn in unit if self.shapes[fqn]}
        dtypes = {tensor.dtype for tensor in found.values() if tensor is not None}
        if None in found.values() or len(dtypes) != 1:
            raise LossError(
                f"parameters in one flat parameter have different optimizer states ({name})",
                fqn=next(fqn for fqn, tensor in found.items() if tensor is None or len(dtypes) != 1),
            )
        fill = (FromSource((p.fqn, name), FlatRange(p.start, p.stop), p.at) for p in pieces)
        return NewTensor(dtypes.pop(), (length,), tuple(with_gaps(fill, length)))

    def _numbers(self, unit: Sequence[str]) -> dict[str, Any]:
        first = self.scalars.get(unit[0], {})
        for fqn in unit:
            if self.scalars.get(fqn, {}) != first:
                raise LossError(
                    "parameters in one flat parameter have taken different numbers of steps",
                    fqn=fqn,
                    expected=f"{first}, as of {unit[0]}",
                    found=str(self.scalars.get(fqn, {})),
                )
        return {name: state_number(name, value) for name, value in first.items()}
