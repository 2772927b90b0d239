"""Phi-3 and Phi-4: one tensor for queries, keys and values, and one for gate and up."""

from __future__ import annotations

from typing import Any

from converters.names.families.rows import Sizes
from converters.names.families.tables import FAMILIES
from converters.names.megatron.architectures import llama
from converters.names.megatron.args import gated
from converters.names.megatron.table import Table

ATTENTION = """
    self_attention.linear_qkv.layer_norm_weight     input_layernorm.weight                  same
    self_attention.linear_qkv.weight                self_attn.qkv_proj.weight               one_qkv
    self_attention.linear_proj.weight               self_attn.o_proj.weight                 same
"""
MLP = """
    mlp.linear_fc1.layer_norm_weight                post_attention_layernorm.weight         same
    mlp.linear_fc1.weight                           mlp.gate_up_proj.weight                 same
    mlp.linear_fc2.weight                           mlp.down_proj.weight                    same
"""


def args(sizes: Sizes) -> dict[str, Any]:
    return gated(sizes, partial=1.0, epsilon=1e-5) | {"hidden_dropout": sizes.config.number("resid_pdrop", 0.0)}


TABLE = Table(FAMILIES["phi3"], args, llama.TOP, ATTENTION, dense=MLP)
