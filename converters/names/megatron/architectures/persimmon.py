"""Persimmon: GPT-NeoX's layers with norms of each head's queries and keys, and squared ReLU."""

from __future__ import annotations

from typing import Any

from converters.names.families.rows import Sizes
from converters.names.families.tables import FAMILIES
from converters.names.megatron.architectures import arcee
from converters.names.megatron.table import Table

TOP = """
    embedding.word_embeddings.weight                        model.embed_tokens.weight                   padded
    output_layer.weight                                     lm_head.weight                              padded
    decoder.final_layernorm.[weight|bias]                   model.final_layernorm.[weight|bias]         same
"""
LAYER = """
    self_attention.linear_qkv.layer_norm_[weight|bias]      input_layernorm.[weight|bias]               same
    self_attention.linear_qkv.[weight|bias]                 self_attn.query_key_value.[weight|bias]     same
    self_attention.linear_proj.[weight|bias]                self_attn.dense.[weight|bias]               same
    self_attention.[q|k]_layernorm.weight                   self_attn.[q|k]_layernorm.weight            same
    self_attention.[q|k]_layernorm.bias                     self_attn.[q|k]_layernorm.bias              same
    mlp.linear_fc1.layer_norm_[weight|bias]                 post_attention_layernorm.[weight|bias]      same
    mlp.linear_fc1.[weight|bias]                            mlp.dense_h_to_4h.[weight|bias]             same
    mlp.linear_fc2.[weight|bias]                            mlp.dense_4h_to_h.[weight|bias]             same
"""


def args(sizes: Sizes) -> dict[str, Any]:
    config = sizes.config
    return arcee.squared(sizes, partial=0.5) | {
        "normalization": "LayerNorm",
        "norm_epsilon": config.number("layer_norm_eps", 1e-5),
        "qk_layernorm": config.flag("qk_layernorm", True),
        "add_bias_linear": True,
        "hidden_dropout": config.number("hidden_dropout", 0.0),
    }


TABLE = Table(FAMILIES["persimmon"], args, TOP, LAYER)
