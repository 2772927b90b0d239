"""Nemotron-H and Nemotron 3 Nano: layers with Mamba-2, attention without positions, MLPs or experts.

It is megatron-core's MambaModel, not a GPTModel. Each layer is one of these kinds.
"""

from __future__ import annotations

from math import inf
from typing import Any

from ckpt.base.errors import LossError
from converters.names.families.config import Config
from converters.names.families.rows import Sizes
from converters.names.families.tables import FAMILIES
from converters.names.megatron.architectures import deepseek_v3
from converters.names.megatron.args import common, experts
from converters.names.megatron.table import Table

TOP = """
    embedding.word_embeddings.weight                backbone.embeddings.weight                  padded
    output_layer.weight                             lm_head.weight                              padded
    decoder.final_norm.weight                       backbone.norm_f.weight                      same
"""
MAMBA = """
    mixer.in_proj.layer_norm_weight                 norm.weight                                 same
    mixer.[A_log|D|dt_bias]                         mixer.[A_log|D|dt_bias]                     same
    mixer.in_proj.weight                            mixer.in_proj.weight                        same
    mixer.conv1d.[weight|bias]                      mixer.conv1d.[weight|bias]                  same
    mixer.norm.weight                               mixer.norm.weight                           same
    mixer.out_proj.weight                           mixer.out_proj.weight                       same
"""
ATTENTION = """
    self_attention.linear_qkv.layer_norm_weight     norm.weight                                 same
    self_attention.linear_qkv.weight                mixer.[q|k|v]_proj.weight                   qkv
    self_attention.linear_proj.weight               mixer.o_proj.weight                         same
"""
MLP = """
    mlp.linear_fc1.layer_norm_weight                norm.weight                                 same
    mlp.linear_fc1.weight                           mixer.up_proj.weight                        same
    mlp.linear_fc2.weight                           mixer.down_proj.weight                      same
"""
EXPERTS = """
    pre_mlp_layernorm.weight                            norm.weight                             same
    mlp.router.weight                                   mixer.gate.weight                       same
    mlp.router.expert_bias                              mixer.gate.e_score_correction_bias      same
    mlp.experts.local_experts.{e}.linear_fc1.weight     mixer.experts.{e}.up_proj.weight        same
    mlp.experts.local_experts.{e}.linear_fc2.weight     mixer.experts.{e}.down_proj.weight      same
    mlp.shared_experts.linear_fc1.weight                mixer.shared_experts.up_proj.weight     same
    mlp.shared_experts.linear_fc2.weight                mixer.shared_experts.down_proj.weight   same
"""
#: Letters in Megatron's pattern, by a tensor in each kind of layer.
LETTERS = {"mixer.A_log": "M", "mixer.q_proj.weight": "*", "mixer.up_proj.weight": "-", "mixer.gate.weight": "E"}


def args(sizes: Sizes) -> dict[str, Any]:
    config = sizes.config
    _check(config)
    routed = {}
    if sizes.sparse:
        deepseek_v3.normalised(sizes)
        routed = experts(sizes) | deepseek_v3.routing(sizes, scaling=1.0)
    return (
        common(sizes)
        | routed
        | {
            "norm_epsilon": config.number("layer_norm_epsilon", 1e-5),
            "position_embedding_type": "none",
            "use_rotary_position_embeddings": False,
            "swiglu": False,
            "squared_relu": True,
            "is_hybrid_model": True,
            "hybrid_override_pattern": "".join(
                next(letter for name, letter in LETTERS.items() if name in layer) for layer in sizes.layers
            ),
            "mamba_state_dim": config.size("ssm_state_size"),
            "mamba_head_dim": config.size("mamba_head_dim"),
            "mamba_num_groups": config.size("n_groups"),
            "mamba_num_heads": config.size("mamba_num_heads"),
        }
    )


def _check(config: Config) -> None:
    """Raise LossError for other settings and activations, and for ties, which the Hub's class ignores."""
    fixed = {"conv_kernel": 4, "use_conv_bias": True, "layer_norm_epsilon": 1e-5, "mamba_hidden_act": "silu"}
    fixed |= {"mlp_hidden_act": "relu2"}
    found = {name: config.get(name) for name, value in fixed.items() if config.get(name) not in (None, value)}
    absent = ("use_bias", "mlp_bias", "mamba_proj_bias", "moe_latent_size", "sliding_window", "tie_word_embeddings")
    found |= {name: config.get(name) for name in absent if config.flag(name)}
    limit = config.get("time_step_limit")
    if isinstance(limit, list) and limit not in ([0.0, inf], [0.0, {"__float__": "Infinity"}]):
        found["time_step_limit"] = limit
    if found:
        raise LossError(
            "Megatron's Mamba layers or the Hub's class don't support these settings",
            expected=f"{fixed}, and the others off",
            found=found,
        )


TABLE = Table(
    FAMILIES["nemotron_h"],
    args,
    TOP,
    "",
    beside=dict(zip(LETTERS, (MAMBA, ATTENTION, MLP, EXPERTS), strict=True)),
)
