"""Empty parts of a checkpoint: parameters without elements, an optimizer without states.

Both may be right, so they are reported, not refused: torch's optimizers create states at the first gradient.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ckpt.base.text import pluralize
from ckpt.plan import registry
from ckpt.plan.checkpoint import MODEL_ROLES, Checkpoint

_PARAMETERS = ("weight", "bias")
_MAX_SHOWN = 3


def empty_parameters(checkpoint: Checkpoint) -> str:
    """Return a sentence on parameters without elements, or "".

    They come from scripts that save one rank's part of FSDP2 parameters, and from ZeRO-3's rank 0 (shape [0]).
    """
    if registry.get(checkpoint.format).records_shapes:
        return ""
    shapes = {
        fqn: tensor.shape
        for (fqn, role), tensor in checkpoint.tensors.items()
        if role in MODEL_ROLES and tensor.numel == 0 and (fqn.endswith(_PARAMETERS) or tensor.shape == (0,))
    }
    if not shapes:
        return ""
    named = [f"{fqn} {list(shape)}" for fqn, shape in [*shapes.items()][:_MAX_SHOWN]]
    have = "has" if len(shapes) == 1 else "have"
    why = "correct only if the model declares empty tensors"
    return f"{pluralize(len(shapes), 'parameter')} {have} no elements ({_shortened(named, len(shapes))}): {why}"


def missing_states(checkpoint: Checkpoint) -> tuple[str, bool]:
    """Return a sentence on trained parameters without optimizer states (or ""), and True if no parameter has any."""
    trained, without = _trained(checkpoint)
    step = checkpoint.state.step
    if not without:
        return "", False
    if len(without) == len(trained):
        why = "all were skipped, or the states are lost"
        if step is None:
            return f"the optimizer has no states: no step was taken, {why}", False
        return (f"the optimizer has no states after {pluralize(step, 'step')}: {why}" if step else ""), True
    have = "has" if len(without) == 1 else "have"
    what = f"{len(without)} of {pluralize(len(trained), 'parameter')} {have} no optimizer state"
    why = "no gradient arrived, or states are lost"
    return f"{what} ({_shortened(without[:_MAX_SHOWN], len(without))}): {why}", False


def _trained(checkpoint: Checkpoint) -> tuple[list[str], list[str]]:
    if checkpoint.unread or checkpoint.missing_optimizer is not None:
        return [], []
    held = {fqn for fqn, role in checkpoint.tensors if role not in MODEL_ROLES}
    held |= {fqn for values in checkpoint.state.scalars.values() for fqn in values}
    held |= {alias for alias, owner in checkpoint.ties.items() if owner in held}
    held |= {owner for alias, owner in checkpoint.ties.items() if alias in held}
    groups = [
        group
        for group in checkpoint.state.param_groups
        if _keeps_states(group.options) or not held.isdisjoint(group.fqns)
    ]
    trained = list(dict.fromkeys(fqn for group in groups for fqn in group.fqns))
    return trained, [fqn for fqn in trained if fqn not in held]


def _keeps_states(options: Mapping[str, Any]) -> bool:
    """Plain SGD has no states."""
    momentum = options.get("momentum")
    return "betas" in options or (isinstance(momentum, int | float) and momentum > 0)


def _shortened(names: list[str], count: int) -> str:
    return ", ".join([*names, *(["..."] if count > len(names) else [])])
