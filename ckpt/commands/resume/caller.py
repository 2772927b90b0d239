"""Processes and engine in the running training script."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ckpt.move.json_files import read_json
from ckpt.processes.group import LAUNCHERS

#: torch's StateDictType in Accelerate's FSDP plugin.
_KINDS = {"SHARDED_STATE_DICT": "dcp", "FULL_STATE_DICT": "full"}


@dataclass(frozen=True, slots=True)
class Caller:
    """Facts about the running script, or None if unknown.

    `format` is the engine's. `dtype` is DeepSpeed's model dtype, a part of its file names. `skips_optimizer` marks
    FSDP1 with SHARDED_STATE_DICT: Accelerate 1.15 loads only states that the optimizer already holds
    (utils/fsdp_utils.py), and a new optimizer holds none.
    """

    format: str | None = None
    world_size: int | None = None
    dtype: str | None = None
    skips_optimizer: bool = False


def caller(environment: Mapping[str, str] = os.environ) -> Caller:
    config = _deepspeed_config(environment)
    if config is not None:
        return Caller(_zero(config), _world_size(environment), _precision(config))
    version, format = _fsdp(environment)
    skips_optimizer = version == 1 and format == "dcp"
    return Caller(format or _launched_zero(environment), _world_size(environment), skips_optimizer=skips_optimizer)


def _world_size(environment: Mapping[str, str]) -> int | None:
    distributed = sys.modules.get("torch.distributed")
    if distributed is not None and distributed.is_available() and distributed.is_initialized():
        return int(distributed.get_world_size())
    sizes = (environment.get(name, "") for _, _, name, _ in LAUNCHERS)
    return next((int(size) for size in sizes if size.isdecimal() and int(size)), None)


def _deepspeed_config(environment: Mapping[str, str]) -> Any:
    """Ask Trainer, an Accelerator, then Accelerate's launcher."""
    trainers = sys.modules.get("transformers.integrations.deepspeed")
    config = trainers.deepspeed_config() if trainers is not None else None
    plugins = _live_accelerator().get("deepspeed_plugins")
    for plugin in plugins.values() if isinstance(plugins, dict) else [plugins]:
        if config is None and plugin is not None and plugin.selected:
            config = plugin.deepspeed_config
    path = environment.get("ACCELERATE_DEEPSPEED_CONFIG_FILE", "none")
    if config is None and path != "none" and _uses_deepspeed(environment):
        config = read_json(Path(path))
    return config


def _launched_zero(environment: Mapping[str, str]) -> str | None:
    """Read Accelerate's launcher (accelerate/utils/launch.py, 1.15)."""
    stage = environment.get("ACCELERATE_DEEPSPEED_ZERO_STAGE", "2")
    return f"zero{stage}" if stage in ("0", "1", "2", "3") and _uses_deepspeed(environment) else None


def _uses_deepspeed(environment: Mapping[str, str]) -> bool:
    return _is_true(environment.get("ACCELERATE_USE_DEEPSPEED"))


def _fsdp(environment: Mapping[str, str]) -> tuple[int | None, str | None]:
    """Return FSDP's version and format in Accelerate's plugin or launcher (accelerate/utils/launch.py, 1.15)."""
    if _uses_deepspeed(environment):
        return None, None
    plugin = _live_accelerator().get("fsdp_plugin")
    if plugin is not None:  # from arguments (Trainer's) or the environment
        return plugin.fsdp_version, _KINDS.get(getattr(plugin.state_dict_type, "name", plugin.state_dict_type))
    if _is_true(environment.get("ACCELERATE_USE_FSDP")):
        version = 2 if environment.get("FSDP_VERSION") == "2" else 1
        default = "SHARDED_STATE_DICT" if version == 2 else "FULL_STATE_DICT"
        return version, _KINDS.get(environment.get("FSDP_STATE_DICT_TYPE", default))
    return None, None


def _live_accelerator() -> Mapping[str, Any]:
    accelerate = sys.modules.get("accelerate.state")
    found: Mapping[str, Any] = accelerate.AcceleratorState._shared_state if accelerate is not None else {}
    return found


def _is_true(value: str | None) -> bool:
    return (value or "").lower() in ("1", "true", "yes", "y", "t", "on")


def _zero(config: Any) -> str | None:
    """Return None if the stage is "auto"."""
    zero = config.get("zero_optimization") if isinstance(config, Mapping) else None
    stage = zero.get("stage", 0) if isinstance(zero, Mapping) else 0
    return f"zero{stage}" if stage in (0, 1, 2, 3) else None


def _precision(config: Any) -> str | None:
    """Return None if the dtype is still "auto"."""
    sections = {name: config.get(name) for name in ("bf16", "fp16")} if isinstance(config, Mapping) else {"": "auto"}
    enabled = {name: one.get("enabled", False) if isinstance(one, Mapping) else one for name, one in sections.items()}
    if "auto" in enabled.values():
        return None
    return next((name for name, is_on in enabled.items() if is_on), "fp32")
