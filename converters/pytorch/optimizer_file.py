"""Optimizer state dict in a torch file: by fqn, like FSDP gathers it, or by number, like an optimizer saves it.

Follows torch 2.13 (optim/optimizer.py, `state_dict`; distributed/checkpoint/state_dict.py).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ckpt.containers.torchfile.write import copy_of, state_number, torch_file
from ckpt.plan.checkpoint import MODEL_ROLES, Checkpoint, ParamGroup, TargetFile
from ckpt.plan.tensors import whole
from converters.optimizers.states import check_can_be_read
from converters.quantized.states import NESTED
from converters.quantized.stored_states import Blocks, carried


def optimizer_file(
    name: str,
    checkpoint: Checkpoint,
    groups: Sequence[ParamGroup] | None = None,
    numbers: Mapping[str, int] | None = None,
) -> TargetFile:
    """Replace fqns by `numbers` as keys. Raise LossError for states that readers could not tell from damage."""
    check_can_be_read(checkpoint)
    groups = checkpoint.state.param_groups if groups is None else groups
    states = _states(checkpoint)
    keys: Mapping[str, Any] = numbers or dict(zip(states, states, strict=True))
    listed = [{**group.options, "params": [keys[fqn] for fqn in group.fqns]} for group in groups]
    stepped = {keys[fqn]: values for fqn, values in states.items() if values}
    return torch_file(name, {"state": stepped, "param_groups": listed})


def _states(checkpoint: Checkpoint) -> dict[str, dict[str, Any]]:
    states: dict[str, dict[str, Any]] = {fqn: {} for group in checkpoint.state.param_groups for fqn in group.fqns}
    for name, values in checkpoint.state.scalars.items():
        for fqn, value in values.items():
            states.setdefault(fqn, {})[name] = state_number(name, value)
    for (fqn, role), tensor in checkpoint.tensors.items():
        if role in MODEL_ROLES:
            continue
        own, stored = states.setdefault(fqn, {}), checkpoint.quantized.blocks.get((fqn, role))
        if stored is None:
            own[role] = copy_of(tensor)
        elif isinstance(one := carried((fqn, role), stored, whole(tensor.shape)), Blocks):
            number_ = role.removeprefix("state")  # bitsandbytes' names
            nested = {role: one.codes, f"absmax{number_}": one.factors, f"qmap{number_}": one.values}
            own.setdefault(NESTED, {}).update(nested)
        else:
            own[role] = one
    return states
