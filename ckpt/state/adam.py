"""Adam in torch and DeepSpeed: each class needs options that the other does not record.

torch's Adam and AdamW add missing options only in `load_state_dict`. Before that, `torch.distributed.checkpoint.load`
fails on every option of the live optimizer missing in the checkpoint. DeepSpeed's FusedAdam and CPUAdam read
`bias_correction` at each step, and need an int step. The recording class implies each value.

Facts from torch 2.13 (optim/adam.py and adamw.py, `__setstate__`) and deepspeed 0.19.8 (ops/adam/fused_adam.py,
cpu_adam.py; runtime/engine.py, `_configure_basic_optimizer`).
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
    return options.keys() >= _OPTIONS and (not roles or has_states(roles))


def has_states(roles: Collection[str]) -> bool:
    return set(roles) >= _STATES


def missing_states(options: Mapping[str, Any], roles: Collection[str]) -> list[str]:
    """Return the states missing from a parameter's, if the options and all its states are torch's Adam's."""
    is_torchs = options.keys() >= _OPTIONS | _OF_TORCH.keys() and _STATES | {"step", "max_exp_avg_sq"} >= set(roles)
    return sorted(_STATES.difference(roles)) if is_torchs else []


def missing_for_torch(options: Mapping[str, Any], ds_config: Any) -> dict[str, Any]:
    """Return the options of torch's Adam that are missing in `options`.

    If DeepSpeed's config does not say if weight decay is decoupled, False leaves the choice to the live class: AdamW
    always decouples, Adam only if True is recorded.
    """
    known = _OF_TORCH | {_DECAY: _is_decoupled(ds_config)}
    return {name: value for name, value in known.items() if name not in options}


def missing_for_deepspeed(options: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in _OF_DEEPSPEED.items() if name not in options}


def whole_steps(value: Any) -> Any:
    """Return a step count as an int for DeepSpeed's Adam."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _is_decoupled(ds_config: Any) -> bool:
    optimizer = ds_config.get("optimizer") if isinstance(ds_config, Mapping) else None
    if not isinstance(optimizer, Mapping):
        return False
    kind, params = str(optimizer.get("type")).lower(), optimizer.get("params")
    mode = params.get("adam_w_mode", True) if isinstance(params, Mapping) else True
    return kind == "adamw" or (kind == "adam" and bool(mode))
