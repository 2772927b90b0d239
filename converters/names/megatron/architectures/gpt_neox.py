"""GPT-NeoX (Pythia and others): `query_key_value` is like Megatron's, with one group per head."""

from __future__ import annotations

from typing import Any

from ckpt.base.errors import LossError
from converters.names.families.config import Config
from converters.names.families.rows import Sizes
from converters.names.families.tables import FAMILIES
from converters.names.megatron.args import common, rotary
from converters.names.megatron.table import Table

TOP = """
    embedding.word_embeddings.weight                        gpt_neox.embed_in.weight                    padded
    output_layer.weight                                     embed_out.weight                            padded
    decoder.final_layernorm.[weight|bias]                   gpt_neox.final_layer_norm.[weight|bias]     same
"""
LAYER = """
    self_attention.linear_qkv.layer_norm_[weight|bias]      input_layernorm.[weight|bias]               same
    self_attention.linear_qkv.[weight|bias]                 attention.query_key_value.[weight|bias]     same
    self_attention.linear_proj.[weight|bias]                attention.dense.[weight|bias]               same
    mlp.linear_fc1.layer_norm_[weight|bias]                 post_attention_layernorm.[weight|bias]      same
    mlp.linear_fc1.[weight|bias]                            mlp.dense_h_to_4h.[weight|bias]             same
    mlp.linear_fc2.[weight|bias]                            mlp.dense_4h_to_h.[weight|bias]             same
"""


def args(sizes: Sizes) -> dict[str, Any]:
    config = sizes.config
    activation = config.get("hidden_act") or "gelu"
    if activation not in ("gelu", "gelu_new", "gelu_pytorch_tanh"):
        raise LossError("Megatron does not support this activation", expected="gelu", found=activation)
    positions = rotary(config, partial=config.number("rotary_pct", 0.25))
    if config.get("rotary_emb_base") is not None:
        positions["rotary_base"] = config.size("rotary_emb_base")
    return (
        common(sizes)
        | positions
        | {
            "normalization": "LayerNorm",
            "norm_epsilon": config.number("layer_norm_eps", 1e-5),
            "add_bias_linear": True,
            "swiglu": False,
            "openai_gelu": activation != "gelu",
            "hidden_dropout": config.number("hidden_dropout", 0.0),
        }
        | parallel_residual(config)
    )


def parallel_residual(config: Config) -> dict[str, Any]:
    """Return GPT-NeoX's argument for a parallel residual. Megatron has none, and its writers refuse this argument."""
    return {"gpt_j_residual": True} if config.flag("use_parallel_residual", True) else {}


TABLE = Table(FAMILIES["gpt_neox"], args, TOP, LAYER)
