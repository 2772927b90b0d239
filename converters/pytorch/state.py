"""Nested state dict for `dcp`, built from a checkpoint: model, optimizer, training state.

    model.<fqn>                     parameters (the fp32 masters if the source has them), buffers, aliases
    optimizer.state.<fqn>.<name>    the optimizer's states; numbers (`step`) as 0-dim tensors
    optimizer.param_groups.<n>.*    options, and `params`, the names
    lr_scheduler, train_state, ...  training state

like torch's `get_model_state_dict` and `get_optimizer_state_dict` (2.13, `distributed/checkpoint/state_dict.py`).
torchtitan has the model at the top and the optimizer flattened (0.2.2, `components/checkpoint.py`,
`_flattened_model_states_sd`; `components/optimizer.py`): `optimizer.param_groups.<fqn>.*`, like with
`flatten_optimizer_state_dict=True`.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from ckpt.base.errors import LossError
from ckpt.base.text import Brief, pluralize
from ckpt.base.words import Message, Note
from ckpt.containers.dcp.metadata import Path_
from ckpt.containers.dcp.write import Alias, SourceTensor, flatten
from ckpt.containers.torchfile.values import StoredTensor
from ckpt.containers.torchfile.write import number, one_element
from ckpt.plan.checkpoint import BUFFER, MASTER, MODEL_ROLES, Checkpoint, OneElement
from ckpt.plan.dtypes import FLOAT32, FLOAT64, INT64, DType
from ckpt.plan.namespace import TORCHTITAN
from ckpt.plan.precision import Choice, describe, kept_in_training
from ckpt.state import adam
from ckpt.state.plain import is_plain
from converters.pytorch.facts import TorchFacts
from converters.pytorch.keys import MODEL_NAMES
from converters.quantized.stored_states import carried_tensor

#: Only these entries of other formats are flattened.
_KNOWN = ("lr_scheduler", "train_state")


@dataclass(frozen=True, slots=True)
class StateDict:
    model: tuple[tuple[Path_, Any], ...]
    optimizer: tuple[tuple[Path_, Any], ...]
    entries: Mapping[str, Any]
    rest: tuple[tuple[Path_, Any], ...]
    dropped: tuple[str, ...]
    notes: tuple[str, ...]


def state_dict(checkpoint: Checkpoint, dtype: DType | None, *, flat_optimizer: bool = False) -> StateDict:
    """Return the output. `dtype` None keeps the training dtype.

    `flat_optimizer` repeats a param group's options under each of its parameters, like torchtitan. A source in this
    form keeps it.
    """
    chosen = kept_in_training(checkpoint, dtype)
    written = {choice.key for choice in chosen.values()}
    entries, rest, dropped = _rest(checkpoint)
    is_flat = flat_optimizer or checkpoint.facts_of(TorchFacts).is_flat or checkpoint.namespace == TORCHTITAN
    if masters := sum(role == MASTER and (fqn, role) not in written for fqn, role in checkpoint.tensors):
        what = pluralize(masters, "parameter")
        dropped.append(Note("fp32 masters of {}: {dtype} requests weights in {}", what, dtype))
    return StateDict(
        tuple(_model_entries(checkpoint, chosen)),
        tuple(_optimizer_entries(checkpoint, is_flat)),
        entries,
        tuple(rest),
        tuple(dropped),
        tuple(_dcp_notes(checkpoint, chosen, dtype)),
    )


def _dcp_notes(checkpoint: Checkpoint, chosen: Mapping[str, Choice], dtype: DType | None) -> Iterator[str]:
    exact = [choice for choice in chosen.values() if choice.tensor.role == MASTER and not choice.is_cast]
    if exact and dtype is None:
        what = f"{pluralize(len(exact), 'parameter')} written from the fp32 masters, bit for bit"
        yield Brief(Message("{}, like FSDP keeps them; use {dtype=bf16} to write bfloat16 weights", what))
    else:
        yield from describe(chosen, checkpoint, dtype)
    if added := [name for group in checkpoint.state.param_groups for name in _missing(checkpoint, group.options)]:
        yield f"added defaults for Adam options missing from the source: {', '.join(dict.fromkeys(added))}"


def _model_entries(checkpoint: Checkpoint, chosen: Mapping[str, Choice]) -> Iterator[tuple[Path_, Any]]:
    root: Path_ = () if checkpoint.namespace == TORCHTITAN else ("model",)
    for fqn, choice in chosen.items():
        cut = choice.tensor.role != BUFFER
        yield (*root, fqn), SourceTensor(choice.key, choice.dtype, choice.tensor.shape, cut)
    for alias, owner in checkpoint.ties.items():  # a state dict has both names
        if owner in chosen and alias not in chosen:
            yield (*root, alias), Alias((*root, owner))
    for fqn, value in (checkpoint.state.extra_state or {}).items():
        yield (*root, str(fqn)), value


def _optimizer_entries(checkpoint: Checkpoint, is_flat: bool) -> Iterator[tuple[Path_, Any]]:
    for name, values in checkpoint.state.scalars.items():
        for fqn, value in values.items():
            yield ("optimizer", "state", fqn, name), _state_number(value)
    for (fqn, role), tensor in checkpoint.tensors.items():
        if role not in MODEL_ROLES:
            stored = checkpoint.quantized.blocks.get((fqn, role))
            part = None if stored is None else partial(carried_tensor, (fqn, role), stored)
            yield ("optimizer", "state", fqn, role), SourceTensor((fqn, role), tensor.dtype, tensor.shape, part=part)
    for index, group in enumerate(checkpoint.state.param_groups):
        options = {name: value for name, value in group.options.items() if name != "params"}
        options |= _missing(checkpoint, options)
        if is_flat:
            yield from (
                (("optimizer", f"param_groups.{fqn}.{name}"), value)
                for fqn in group.fqns
                for name, value in options.items()
            )
            continue
        yield from flatten(options, ("optimizer", "param_groups", index))
        yield ("optimizer", "param_groups", index, "params"), list(group.fqns)


def _missing(checkpoint: Checkpoint, options: Mapping[str, Any]) -> dict[str, Any]:
    """Return options that only torch's Adam requires."""
    if checkpoint.facts_of(TorchFacts).is_state_dict or not adam.is_adam(options, checkpoint.optimizer_states):
        return {}
    return adam.missing_for_torch(options, checkpoint.state.ds_config)


def _state_number(value: Any) -> Any:
    """Return a 0-dim fp32 tensor, or a wider type that holds the number exactly."""
    if isinstance(value, OneElement):
        return one_element(value)
    if isinstance(value, bool) or not isinstance(value, int | float):
        return value
    if isinstance(value, int) and int(float(value)) != value:
        return number(value, INT64) if -(1 << 63) <= value < 1 << 63 else value
    try:
        exact = struct.unpack("<f", struct.pack("<f", value))[0] == value or value != value
    except OverflowError:
        exact = False
    return number(value, FLOAT32 if exact else FLOAT64)


def _rest(checkpoint: Checkpoint) -> tuple[dict[str, Any], list[tuple[Path_, Any]], list[str]]:
    """Return training state, its leaves, and notes on unwritable framework objects."""
    own, state = checkpoint.facts_of(TorchFacts).is_state_dict, checkpoint.state
    entries = replace(state, extra_state=None).entries()
    if not own and state.step is not None and "train_state" not in entries:
        samples = state.global_samples
        entries["train_state"] = {"step": state.step} | ({} if samples is None else {"sequences": samples})
    leaves: list[tuple[Path_, Any]] = []
    objects: list[str] = []
    for name, value in entries.items():
        if not is_plain(value):
            objects.append(name)
        elif own or name in _KNOWN:
            leaves += flatten(value, (name,))
        else:
            leaves.append(((name,), value))
    for path, value in leaves:
        is_model = path[0] == "model" or (path[0] in MODEL_NAMES and isinstance(value, StoredTensor))
        if is_model or (path[0] == "optimizer" and not own):
            raise LossError("a training state entry uses the name of the model or optimizer", found=path[0])
    entries = {name: value for name, value in entries.items() if name not in objects}
    return (
        entries,
        leaves,
        [f"training state {', '.join(sorted(objects))}: objects of the framework's"] if objects else [],
    )
