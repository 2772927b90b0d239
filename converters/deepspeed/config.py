"""Facts about an engine that its DeepSpeed config tells."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def section(config: Mapping[str, Any], name: str) -> dict[str, Any]:
    """The options under a name; none where there are none."""
    options = config.get(name)
    return dict(options) if isinstance(options, Mapping) else {}


def is_enabled(config: Mapping[str, Any], name: str) -> bool:
    """Whether `bf16` or `fp16` is enabled in a DeepSpeed config."""
    names = (name, "bfloat16") if name == "bf16" else (name,)
    return any(section(config, one).get("enabled") for one in names)


def is_bf16_optimizer(config: Mapping[str, Any]) -> bool:
    """Whether the engine of a DeepSpeed config has BF16_Optimizer, which deals no parameters and aligns none.

    engine.py, `_do_optimizer_sanity_check`: bf16 with gradients in float32 under stage 1 without offload, or no ZeRO.
    """
    types, options = section(config, "data_types"), section(config, "zero_optimization")
    stage = options.get("stage", 0)
    is_offloaded = section(options, "offload_optimizer").get("device") not in (None, "none")
    in_fp32 = str(types.get("grad_accum_dtype")) in ("torch.float32", "fp32", "float32", "float")
    return is_enabled(config, "bf16") and (stage == 0 or (stage == 1 and in_fp32 and not is_offloaded))
