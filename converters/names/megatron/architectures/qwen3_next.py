"""Qwen3-Next: gated delta nets in most layers, gated attention in the others, experts, zero-centered norms."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from converters.names.families.rows import Sizes
from converters.names.families.tables import FAMILIES
from converters.names.megatron.architectures import llama, qwen2_moe, qwen3_moe
from converters.names.megatron.args import gated

ATTENTION = """
    self_attention.linear_qkv.layer_norm_weight     input_layernorm.weight                  same
    self_attention.linear_qkv.[weight|bias]         self_attn.[q|k|v]_proj.[weight|bias]    gated_qkv
    self_attention.linear_proj.[weight|bias]        self_attn.o_proj.[weight|bias]          same
    self_attention.[q|k]_layernorm.weight           self_attn.[q|k]_norm.weight             same
"""
DELTA = """
    self_attention.in_proj.layer_norm_weight        input_layernorm.weight                  same
    self_attention.[A_log|dt_bias]                  linear_attn.[A_log|dt_bias]             same
    self_attention.conv1d.weight                    linear_attn.conv1d.weight               same
    self_attention.out_norm.weight                  linear_attn.norm.weight                 centred
    self_attention.out_proj.weight                  linear_attn.out_proj.weight             same
"""
BY_HEAD = """
    self_attention.in_proj.weight                   linear_attn.in_proj_[qkvz|ba].weight    delta_by_head
"""
PREDICTION = """
    mtp.layers.{n}.enorm.weight                     pre_fc_norm_embedding.weight            same
    mtp.layers.{n}.hnorm.weight                     pre_fc_norm_hidden.weight               same
    mtp.layers.{n}.eh_proj.weight                   fc.weight                               same
    mtp.layers.{n}.final_layernorm.weight           norm.weight                             same
"""


def args(sizes: Sizes) -> dict[str, Any]:
    return hybrid(sizes) | qwen3_moe.softmax(sizes) | qwen2_moe.shared(sizes)


def hybrid(sizes: Sizes) -> dict[str, Any]:
    """Return the arguments for attention with output gates, mixed with gated delta nets."""
    linear = [int("linear_attn.A_log" in layer) for layer in sizes.layers]
    return gated(sizes, partial=0.25, slides=False) | {
        "apply_layernorm_1p": True,
        "qk_layernorm": True,
        "attention_output_gate": True,
        "experimental_attention_variant": "gated_delta_net",
        "linear_attention_freq": linear,
        "linear_conv_kernel_dim": sizes.dims["lk"],
        "linear_key_head_dim": sizes.dims["le"],
        "linear_value_head_dim": sizes.dims["ld"],
        "linear_num_key_heads": sizes.dims["lg"],
        "linear_num_value_heads": sizes.dims["lh"],
    }


TABLE = replace(
    llama.TABLE,
    family=FAMILIES["qwen3_next"],
    args=args,
    layer="",
    sparse=qwen3_moe.EXPERTS + qwen2_moe.SHARED,
    beside={"self_attn.q_proj.weight": ATTENTION, "linear_attn.A_log": DELTA + BY_HEAD},
    prediction=PREDICTION,
)
