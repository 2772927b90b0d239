"""Llama 2, 3 and 3.1: the names used by most decoders."""

from __future__ import annotations

from functools import partial

from converters.names.families.tables import FAMILIES
from converters.names.megatron.args import gated
from converters.names.megatron.table import Table

TOP = """
    embedding.word_embeddings.weight                model.embed_tokens.weight               padded
    output_layer.weight                             lm_head.weight                          padded
    decoder.final_layernorm.weight                  model.norm.weight                       same
"""
ATTENTION = """
    self_attention.linear_qkv.layer_norm_weight     input_layernorm.weight                  same
    self_attention.linear_qkv.[weight|bias]         self_attn.[q|k|v]_proj.[weight|bias]    qkv
    self_attention.linear_proj.[weight|bias]        self_attn.o_proj.[weight|bias]          same
    self_attention.[q|k]_layernorm.weight           self_attn.[q|k]_norm.weight             same
"""
MLP = """
    mlp.linear_fc1.layer_norm_weight                post_attention_layernorm.weight         same
    mlp.linear_fc1.[weight|bias]                    mlp.[gate|up]_proj.[weight|bias]        joined
    mlp.linear_fc2.[weight|bias]                    mlp.down_proj.[weight|bias]             same
"""

TABLE = Table(FAMILIES["llama"], partial(gated, slides=False), TOP, ATTENTION, dense=MLP)
