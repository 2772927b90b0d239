"""dots.llm1: GLM-4.5's names with norms of queries and keys, and fully rotated heads."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from converters.names.families.config import Config
from converters.names.families.rows import Sizes
from converters.names.families.tables import FAMILIES
from converters.names.megatron.architectures import deepseek_v3, glm4_moe
from converters.names.megatron.args import gated


def args(sizes: Sizes) -> dict[str, Any]:
    deepseek_v3.normalised(sizes, default=False)
    return gated(_with_layer_types(sizes)) | deepseek_v3.routing(sizes, scaling=1.0)


def _with_layer_types(sizes: Sizes) -> Sizes:
    """List the layer kinds. By default a window slides from layer `max_window_layers` on."""
    if sizes.config.get("layer_types") is not None:
        return sizes
    first = sizes.config.number("max_window_layers", 62)
    kinds = ["sliding_attention" if number >= first else "full_attention" for number in range(sizes.num_layers)]
    return replace(sizes, config=Config({**sizes.config.values, "layer_types": kinds}))


TABLE = replace(glm4_moe.TABLE, family=FAMILIES["dots1"], args=args, prediction="")
