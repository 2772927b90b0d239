"""Phi-3 and Phi-4: one tensor of queries, keys and values, and one of gate and up."""

from __future__ import annotations

from functools import partial

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

TABLE = Table(FAMILIES["phi3"], partial(gated, epsilon=1e-5), llama.TOP, ATTENTION, dense=MLP)
