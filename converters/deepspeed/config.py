"""Engine facts from its DeepSpeed config."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def section(config: Mapping[str, Any], name: str) -> dict[str, Any]:
    options = config.get(name)
    return dict(options) if isinstance(options, Mapping) else {}


def is_enabled(config: Mapping[str, Any], name: str) -> bool:
    names = (name, "bfloat16") if name == "bf16" else (name,)
    return any(section(config, one).get("enabled") for one in names)


def is_bf16_optimizer(config: Mapping[str, Any]) -> bool:
    """Return True for BF16_Optimizer, which neither deals nor aligns parameters.

    engine.py, `_do_optimizer_sanity_check`: bf16 with float32 gradients under stage 1 without offload, or without ZeRO.
    """
    types, options = section(config, "data_types"), section(config, "zero_optimization")
    stage = options.get("stage", 0)
    is_offloaded = section(options, "offload_optimizer").get("device") not in (None, "none")
    in_fp32 = str(types.get("grad_accum_dtype")) in ("torch.float32", "fp32", "float32", "float")
    return is_enabled(config, "bf16") and (stage == 0 or (stage == 1 and in_fp32 and not is_offloaded))
