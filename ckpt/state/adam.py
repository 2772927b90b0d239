"""One Adam, as torch and as DeepSpeed record it: what each one's own class asks for and the other's does not write.

torch's Adam and AdamW fill in the options that an older version did not record, but only in `load_state_dict`; before
that `torch.distributed.checkpoint.load` has failed on every option of the live optimizer that a checkpoint lacks.
DeepSpeed's FusedAdam and CPUAdam look `bias_correction` up at each step, and hand the number of steps to code that
takes an int.  None of this is a choice that the recording class had, so what it does without saying is written.

torch 2.13 (optim/adam.py and adamw.py, `__setstate__`), deepspeed 0.19.8 (ops/adam/fused_adam.py, cpu_adam.py;
runtime/engine.py, `_configure_basic_optimizer`).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

_STATES = frozenset({"exp_avg", "exp_avg_sq"})
_OPTIONS = frozenset({"betas", "eps"})
_OF_TORCH = {
    "amsgrad": False,
    "maximize": False,
    "foreach": None,
    "capturable": False,
    "differentiable": False,
    "fused": None,
}
_DECAY = "decoupled_weight_decay"
_OF_DEEPSPEED = {"bias_correction": True}


def is_adam(options: Mapping[str, Any], roles: Collection[str]) -> bool:
    """Whether a param group is one of Adam's: by its options, and by the states of its parameters, if there are any."""
    return options.keys() >= _OPTIONS and (not roles or has_states(roles))


def has_states(roles: Collection[str]) -> bool:
    """Whether these are the states of Adam, or of an optimizer that is made from it."""
    return set(roles) >= _STATES


def missing_for_torch(options: Mapping[str, Any], ds_config: Any) -> dict[str, Any]:
    """Options that torch's Adam has and `options` do not.

    Whether weight decay is decoupled, DeepSpeed's config tells where it has the optimizer.  Where it does not, False is
    what leaves this to the live class: AdamW decouples whatever is recorded, Adam only what is recorded as True.
    """
    known = _OF_TORCH | {_DECAY: _is_decoupled(ds_config)}
    return {name: value for name, value in known.items() if name not in options}


def missing_for_deepspeed(options: Mapping[str, Any]) -> dict[str, Any]:
    """Options that DeepSpeed's Adam has and `options` do not."""
    return {name: value for name, value in _OF_DEEPSPEED.items() if name not in options}


def whole_steps(value: Any) -> Any:
    """A number of steps as DeepSpeed's Adam counts; torch's makes a tensor of it when it loads."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _is_decoupled(ds_config: Any) -> bool:
    optimizer = ds_config.get("optimizer") if isinstance(ds_config, Mapping) else None
    if not isinstance(optimizer, Mapping):
        return False
    kind, params = str(optimizer.get("type")).lower(), optimizer.get("params")
    mode = params.get("adam_w_mode", True) if isinstance(params, Mapping) else True
    return kind == "adamw" or (kind == "adam" and bool(mode))
