"""K-EXAONE: Qwen3's attention, with rotary positions only under a sliding window, and DeepSeek's experts."""

from __future__ import annotations

from typing import Any

from converters.names.families.rows import Sizes
from converters.names.families.tables import FAMILIES
from converters.names.megatron.architectures import deepseek_v3, llama, qwen3_moe
from converters.names.megatron.args import gated, unrotated
from converters.names.megatron.table import Table

SHARED = deepseek_v3.SHARED.replace("mlp.gate.e_score", "mlp.e_score")


def args(sizes: Sizes) -> dict[str, Any]:
    deepseek_v3.normalised(sizes)
    positions = unrotated(sizes) if sizes.config.get("sliding_window") else {}
    return gated(sizes, epsilon=1e-5) | deepseek_v3.routing(sizes) | positions


TABLE = Table(
    FAMILIES["exaone_moe"], args, llama.TOP, llama.ATTENTION, dense=llama.MLP, sparse=qwen3_moe.EXPERTS + SHARED
)
