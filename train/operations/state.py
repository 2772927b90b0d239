"""Run settings and each rank's live state, recorded for `ckpt verify --run`."""

import hashlib
from typing import Any

import torch

from train import randomness
from train.config import Config, read_ds_config

SETTINGS = (
    *("model", "dtype", "precision", "dropout", "batch", "length", "seed", "optimizer", "scheduler", "schedule_steps"),
    *("lr", "weight_decay", "freeze", "lora", "vocab", "layers", "mtp_layers"),
)
_DS_CONFIG = ("gradient_clipping", "optimizer", "scheduler", "fp16", "bf16", "data_types", "train_batch_size")


def settings(config: Config) -> dict[str, Any]:
    found = {name: getattr(config, name) for name in SETTINGS}
    requested = read_ds_config(config.ds_config)
    return _plain(found | {"ds_config": {key: requested[key] for key in _DS_CONFIG if key in requested}})


def live(engine: Any) -> dict[str, Any]:
    """Read the state from the engine's objects and not from the options."""
    inner = getattr(engine, "engine", None)  # DeepSpeed's
    modules = getattr(engine, "chunks", None) or [engine.model if inner is None else inner.module]
    optimizers = getattr(engine, "optimizers", [engine.optimizer])
    plain = [inner.basic_optimizer] if inner is not None else [getattr(one, "optimizer", one) for one in optimizers]
    scheduler = engine.scheduler if inner is None else inner.lr_scheduler
    scalers = [getattr(one, "loss_scaler", None) or getattr(one, "grad_scaler", None) for one in optimizers]
    return _plain(
        {
            "param_groups": [
                {k: v for k, v in group.items() if k not in ("params", "step")}
                for group in engine.optimizer.param_groups
            ],
            "scheduler": scheduler.state_dict() if scheduler is not None else None,
            "scaler": [_state(scaler) for scaler in scalers if scaler is not None],
            "dropout": dropout(modules),
            "dtype": {
                "parameters": sorted({str(p.dtype) for module in modules for p in module.parameters()}),
                "optimizer": sorted({str(state.dtype) for one in plain for state in states_of(one)}),
            },
            # No step draws from Python's or numpy's states, and some engines don't save them.
            "rng": {name: digest(state) for name, state in randomness.torch_states().items()},
        }
    )


def states_of(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    return [
        value
        for state in optimizer.state.values()
        for name, value in state.items()
        if torch.is_tensor(value) and name != "step"
    ]


def dropout(modules: list[Any]) -> dict[str, list[float]]:
    """Return probabilities by attribute name: modules' `p`, `attention_dropout`, ..."""
    found: dict[str, set[float]] = {}
    for module in (inner for outer in modules for inner in outer.modules()):
        for name, value in vars(module).items():
            named = "dropout" in name or "pdrop" in name or (name == "p" and "Dropout" in type(module).__name__)
            if named and isinstance(value, (int, float)):
                found.setdefault("Dropout" if name == "p" else name, set()).add(float(value))
    return {name: sorted(values) for name, values in sorted(found.items())}


def digest(tensor: torch.Tensor) -> str:
    return hashlib.blake2b(tensor.contiguous().cpu().numpy().tobytes(), digest_size=8).hexdigest()


def _state(scaler: Any) -> dict[str, Any]:
    return dict(scaler.state_dict()) if hasattr(scaler, "state_dict") else dict(vars(scaler))


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {str(key): _plain(entry) for key, entry in value.items() if _is_plain(entry)}
    if isinstance(value, (list, tuple)):
        return [_plain(entry) for entry in value if _is_plain(entry)]
    return value.item() if torch.is_tensor(value) else value


def _is_plain(value: Any) -> bool:
    if torch.is_tensor(value):
        return value.numel() == 1
    return value is None or isinstance(value, (bool, int, float, str, dict, list, tuple))
