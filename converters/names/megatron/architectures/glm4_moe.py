"""GLM-4.5 and 4.6: Llama's attention, dense first layers, DeepSeek's experts and multi-token prediction."""

from __future__ import annotations

from typing import Any

from converters.names.families.rows import Sizes
from converters.names.families.tables import FAMILIES
from converters.names.megatron.architectures import deepseek_v3, llama, qwen3_moe
from converters.names.megatron.args import gated
from converters.names.megatron.table import Table


def args(sizes: Sizes) -> dict[str, Any]:
    deepseek_v3.normalised(sizes)
    return gated(sizes, partial=0.5, slides=False, epsilon=1e-5) | deepseek_v3.routing(sizes, scaling=1.0)


TABLE = Table(
    FAMILIES["glm4_moe"],
    args,
    llama.TOP,
    llama.ATTENTION,
    dense=llama.MLP,
    sparse=qwen3_moe.EXPERTS + deepseek_v3.SHARED,
    prediction=deepseek_v3.PREDICTION,
)
