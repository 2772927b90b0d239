"""Ling 2 and Ring 2: GLM-4.5's layers, with queries, keys and values in one tensor, and other names."""

from __future__ import annotations

from typing import Any

from ckpt.base.errors import LossError
from converters.names.families.rows import Sizes
from converters.names.families.tables import FAMILIES
from converters.names.megatron.architectures import deepseek_v3, hy_v3, llama, qwen3_moe
from converters.names.megatron.args import gated
from converters.names.megatron.table import Table

TOP = llama.TOP.replace("model.embed_tokens", "model.word_embeddings")
ATTENTION = """
    self_attention.linear_qkv.layer_norm_weight     input_layernorm.weight                  same
    self_attention.linear_qkv.weight                attention.query_key_value.weight        one_qkv
    self_attention.linear_proj.weight               attention.dense.weight                  same
    self_attention.q_layernorm.weight               attention.query_layernorm.weight        same
    self_attention.k_layernorm.weight               attention.key_layernorm.weight          same
"""
SHARED = deepseek_v3.SHARED.replace("e_score_correction_bias", "expert_bias")


def args(sizes: Sizes) -> dict[str, Any]:
    config = sizes.config
    stated = {name: config.get(name) for name in ("score_function", "moe_router_enable_expert_bias")}
    if stated["score_function"] not in (None, "sigmoid") or not stated["moe_router_enable_expert_bias"]:
        raise LossError("ckpt knows Ling from its second version on", expected="sigmoids and a bias", found=stated)
    deepseek_v3.normalised(sizes)
    norms = {"qk_layernorm": config.flag("use_qk_norm")}
    return gated(sizes, base=600000.0, partial=1.0, slides=False) | deepseek_v3.routing(sizes) | norms


TABLE = Table(
    FAMILIES["bailing_moe"],
    args,
    TOP,
    ATTENTION,
    dense=llama.MLP,
    sparse=qwen3_moe.EXPERTS + SHARED,
    prediction=hy_v3.PREDICTION,
)
