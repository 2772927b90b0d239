"""StarCoder2: Llama's attention, layer norms with biases, and an ungated MLP. It has biases everywhere."""

from __future__ import annotations

from typing import Any

from ckpt.base.errors import LossError
from converters.names.families.rows import Sizes
from converters.names.families.tables import FAMILIES
from converters.names.megatron.architectures import llama
from converters.names.megatron.args import common, rotary, window
from converters.names.megatron.table import Table

NORM_BIASES = """
    self_attention.linear_qkv.layer_norm_bias       input_layernorm.bias                    same
    mlp.linear_fc1.layer_norm_bias                  post_attention_layernorm.bias           same
"""
FINAL_BIAS = """
    decoder.final_layernorm.bias                    model.norm.bias                         same
"""
MLP = """
    mlp.linear_fc1.layer_norm_weight                post_attention_layernorm.weight         same
    mlp.linear_fc1.[weight|bias]                    mlp.c_fc.[weight|bias]                  same
    mlp.linear_fc2.[weight|bias]                    mlp.c_proj.[weight|bias]                same
"""


def args(sizes: Sizes) -> dict[str, Any]:
    config = sizes.config
    activation = config.get("hidden_act") or "gelu_pytorch_tanh"
    if activation not in ("gelu_pytorch_tanh", "gelu"):
        raise LossError("Megatron does not support this activation without a gate", expected="gelu", found=activation)
    return (
        common(sizes)
        | rotary(config)
        | window(config)
        | {
            "normalization": "LayerNorm",
            "norm_epsilon": config.number("norm_epsilon", 1e-5),
            "swiglu": False,
            "openai_gelu": activation == "gelu_pytorch_tanh",
            "hidden_dropout": config.number("residual_dropout", 0.0),
        }
    )


TABLE = Table(FAMILIES["starcoder2"], args, llama.TOP + FINAL_BIAS, llama.ATTENTION + NORM_BIASES, dense=MLP)
