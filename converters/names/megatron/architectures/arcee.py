"""Arcee: Llama's names, and an ungated MLP with squared ReLU."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from ckpt.base.errors import LossError
from converters.names.families.rows import Sizes
from converters.names.families.tables import FAMILIES
from converters.names.megatron.architectures import llama
from converters.names.megatron.args import common, rotary

MLP = """
    mlp.linear_fc1.layer_norm_weight                post_attention_layernorm.weight         same
    mlp.linear_fc1.[weight|bias]                    mlp.up_proj.[weight|bias]               same
    mlp.linear_fc2.[weight|bias]                    mlp.down_proj.[weight|bias]             same
"""


def squared(sizes: Sizes, partial: float | None = None) -> dict[str, Any]:
    activation = sizes.config.get("hidden_act") or "relu2"
    if activation != "relu2":
        raise LossError("Megatron does not support this activation without a gate", expected="relu2", found=activation)
    return common(sizes) | rotary(sizes.config, partial=partial) | {"swiglu": False, "squared_relu": True}


def args(sizes: Sizes) -> dict[str, Any]:
    return squared(sizes) | {"norm_epsilon": sizes.config.number("rms_norm_eps", 1e-5)}


TABLE = replace(llama.TABLE, family=FAMILIES["arcee"], args=args, dense=MLP)
