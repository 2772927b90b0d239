"""Qwen3.5's text model: Qwen3-Next's layers, with separate queries, keys and values, gates, betas and alphas."""

from __future__ import annotations

from dataclasses import replace

from converters.names.families.tables import FAMILIES
from converters.names.megatron.architectures import llama, qwen3_next

APART = """
    self_attention.in_proj.weight                   linear_attn.in_proj_[qkv|z|b|a].weight      delta
"""

TABLE = replace(
    llama.TABLE,
    family=FAMILIES["qwen3_5_text"],
    args=qwen3_next.hybrid,
    layer="",
    beside={"self_attn.q_proj.weight": qwen3_next.ATTENTION, "linear_attn.A_log": qwen3_next.DELTA + APART},
    prediction=qwen3_next.PREDICTION,
)
