"""gpt-oss: attention sinks, and experts with biases, stacked on the Hub with interleaved gate and up columns."""

from __future__ import annotations

from typing import Any

from ckpt.base.errors import LossError
from converters.names.families.rows import Sizes
from converters.names.families.tables import FAMILIES
from converters.names.megatron.architectures import llama
from converters.names.megatron.args import common, experts, window, yarn
from converters.names.megatron.table import Table

SINKS = """
    self_attention.core_attention.softmax_offset        self_attn.sinks                     same
"""
EXPERTS = """
    pre_mlp_layernorm.weight                            post_attention_layernorm.weight     same
    mlp.router.[weight|bias]                            mlp.router.[weight|bias]            same
    mlp.experts.local_experts.{e}.linear_fc1.weight     mlp.experts.gate_up_proj            interleaved
    mlp.experts.local_experts.{e}.linear_fc1.bias       mlp.experts.gate_up_proj_bias       interleaved
    mlp.experts.local_experts.{e}.linear_fc2.weight     mlp.experts.down_proj               transposed
    mlp.experts.local_experts.{e}.linear_fc2.bias       mlp.experts.down_proj_bias          same
"""


def args(sizes: Sizes) -> dict[str, Any]:
    config = sizes.config
    if config.number("swiglu_alpha", 1.702) != 1.702:
        raise LossError(
            "Megatron's quick GELU is fixed", expected="swiglu_alpha 1.702", found=config.get("swiglu_alpha")
        )
    return (
        common(sizes)
        | yarn(config, 150000.0)
        | window(config, listed=True)
        | experts(sizes)
        | {
            "norm_epsilon": config.number("rms_norm_eps", 1e-5),
            "swiglu": False,
            "quick_geglu": True,
            "glu_linear_offset": 1.0,
            "activation_func_clamp_value": config.number("swiglu_limit", 7.0),
            "softmax_type": "learnable",
        }
    )


TABLE = Table(FAMILIES["gpt_oss"], args, llama.TOP, llama.ATTENTION + SINKS, sparse=EXPERTS)
