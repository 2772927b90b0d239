"""GPT-2: matrices as [in, out] (transformers' Conv1D), learned positions, biases everywhere."""

from __future__ import annotations

from typing import Any

from ckpt.base.errors import LossError
from converters.names.families.rows import Sizes
from converters.names.families.tables import FAMILIES
from converters.names.megatron.args import common
from converters.names.megatron.table import Table

TOP = """
    embedding.word_embeddings.weight                        transformer.wte.weight              padded
    output_layer.weight                                     lm_head.weight                      padded
    embedding.position_embeddings.weight                    transformer.wpe.weight              same
    decoder.final_layernorm.[weight|bias]                   transformer.ln_f.[weight|bias]      same
"""
LAYER = """
    self_attention.linear_qkv.layer_norm_[weight|bias]      ln_1.[weight|bias]                  same
    self_attention.linear_qkv.[weight|bias]                 attn.c_attn.[weight|bias]           fused_qkv
    self_attention.linear_proj.[weight|bias]                attn.c_proj.[weight|bias]           transposed
    mlp.linear_fc1.layer_norm_[weight|bias]                 ln_2.[weight|bias]                  same
    mlp.linear_fc1.[weight|bias]                            mlp.c_fc.[weight|bias]              transposed
    mlp.linear_fc2.[weight|bias]                            mlp.c_proj.[weight|bias]            transposed
"""

#: transformers' names for one function, Megatron's `--openai-gelu`.
_TANH = ("gelu_new", "gelu_pytorch_tanh")


def args(sizes: Sizes) -> dict[str, Any]:
    config = sizes.config
    activation = config.get("activation_function") or "gelu_new"
    if activation not in (*_TANH, "gelu"):
        raise LossError("Megatron does not support this activation", expected="gelu_new or gelu", found=activation)
    if config.flag("scale_attn_by_inverse_layer_idx"):
        raise LossError("Megatron does not scale attention by layer this way", found="scale_attn_by_inverse_layer_idx")
    if not config.flag("scale_attn_weights", True):
        raise LossError(
            "Megatron always scales attention by the square root of a head's width", found="scale_attn_weights false"
        )
    return common(sizes) | {
        "position_embedding_type": "learned_absolute",
        "use_rotary_position_embeddings": False,
        "normalization": "LayerNorm",
        "norm_epsilon": config.number("layer_norm_epsilon", 1e-5),
        "add_bias_linear": True,
        "swiglu": False,
        "openai_gelu": activation in _TANH,
        "attention_dropout": config.number("attn_pdrop", 0.1),
        "hidden_dropout": config.number("resid_pdrop", 0.1),
    }


TABLE = Table(FAMILIES["gpt2"], args, TOP, LAYER, prefix="transformer.")
