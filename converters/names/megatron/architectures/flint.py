"""Flint: Qwen3's attention with sinks, rotary positions only under a sliding window, and an ungated shared expert."""

from __future__ import annotations

from typing import Any

from converters.names.families.rows import Sizes
from converters.names.families.tables import FAMILIES
from converters.names.megatron.architectures import deepseek_v3, gpt_oss, llama, qwen2_moe, qwen3_moe
from converters.names.megatron.args import gated, unrotated
from converters.names.megatron.table import Table

SINKS = gpt_oss.SINKS.replace("self_attn.sinks", "self_attn.softmax_offset")


def args(sizes: Sizes) -> dict[str, Any]:
    deepseek_v3.normalised(sizes)
    sizes.config.size("sliding_window")  # else these layers have no rotary positions
    return (
        gated(sizes)
        | unrotated(sizes)
        | {
            "softmax_type": "learnable",
            "moe_router_score_function": "sigmoid",
            "moe_router_dtype": "fp32",
            "moe_shared_expert_intermediate_size": sizes.dims["s"],
        }
    )


TABLE = Table(
    FAMILIES["flint"],
    args,
    llama.TOP,
    llama.ATTENTION + SINKS,
    dense=llama.MLP,
    sparse=qwen3_moe.EXPERTS + qwen2_moe.SHARED,
)
