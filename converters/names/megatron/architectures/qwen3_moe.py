"""Qwen3 MoE: Qwen3's names, with experts in some or all layers."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from converters.names.families.rows import Sizes
from converters.names.families.tables import FAMILIES
from converters.names.megatron.architectures import llama
from converters.names.megatron.args import gated

EXPERTS = """
    pre_mlp_layernorm.weight                           post_attention_layernorm.weight          same
    mlp.router.weight                                  mlp.gate.weight                          same
    mlp.experts.local_experts.{e}.linear_fc1.weight    mlp.experts.{e}.[gate|up]_proj.weight    joined
    mlp.experts.local_experts.{e}.linear_fc2.weight    mlp.experts.{e}.down_proj.weight         same
"""


def args(sizes: Sizes) -> dict[str, Any]:
    return gated(sizes, slides=sizes.config.flag("use_sliding_window")) | softmax(sizes)


def softmax(sizes: Sizes) -> dict[str, Any]:
    """Return the softmax's argument. Without normalization, probabilities cover all experts, not only chosen ones."""
    return {"moe_router_pre_softmax": not sizes.config.flag("norm_topk_prob")}


TABLE = replace(llama.TABLE, family=FAMILIES["qwen3_moe"], args=args, sparse=EXPERTS)
