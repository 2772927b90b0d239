"""A relative of Qwen3 MoE: other names for experts and router, which register before the norms of each layer."""

from __future__ import annotations

from dataclasses import replace

from converters.names.families.tables import BIASES, FAMILIES, HEAD_NORMS, NORMS, OUT_BIAS, QKVO
from converters.names.megatron.architectures import llama, qwen3_moe

HUB = (
    QKVO
    + BIASES
    + OUT_BIAS
    + HEAD_NORMS
    + """
    moe.experts.{e}.w[1|3].weight m h
    moe.experts.{e}.w2.weight h m
    moe.router.weight e h
    """
    + NORMS
)
MEMORY = """
    mlp         moe
    mlp.gate    mlp.router
"""
EXPERTS = """
    pre_mlp_layernorm.weight                           post_attention_layernorm.weight     same
    mlp.router.weight                                  moe.router.weight                   same
    mlp.experts.local_experts.{e}.linear_fc1.weight    moe.experts.{e}.w[1|3].weight       joined
    mlp.experts.local_experts.{e}.linear_fc2.weight    moe.experts.{e}.w2.weight           same
"""

FAMILIES["example_moe"] = replace(FAMILIES["qwen3_moe"], stem="ExampleMoe", layer=HUB, memory=MEMORY)
TABLE = replace(llama.TABLE, family=FAMILIES["example_moe"], args=qwen3_moe.args, sparse=EXPERTS)
