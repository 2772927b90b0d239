"""Qwen3-VL with experts, stacked in the Hub's files."""

from __future__ import annotations

from converters.names.megatron.architectures import qwen3_moe, qwen3_vl
from converters.names.megatron.vision import multimodal_table

EXPERTS = """
    pre_mlp_layernorm.weight                           post_attention_layernorm.weight          same
    mlp.router.weight                                  mlp.gate.weight                          same
    mlp.experts.local_experts.{e}.linear_fc1.weight    mlp.experts.gate_up_proj                 same
    mlp.experts.local_experts.{e}.linear_fc2.weight    mlp.experts.down_proj                    same
"""

TABLE = multimodal_table(
    "qwen3_vl_moe", {"qwen3_vl_moe_text": qwen3_moe.TABLE}, qwen3_vl.VISION, qwen3_vl.POSITIONS, sparse=EXPERTS
)
