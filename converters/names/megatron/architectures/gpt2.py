"""GPT-2: matrices as [in, out] (transformers' Conv1D), learned positions, biases everywhere."""

from __future__ import annotations

from typing import Any

from ckpt.errors import LossError
from converters.names.megatron.args import common
from converters.names.megatron.rows import Row, fused_qkv, same, transposed
from converters.names.megatron.sizes import Config, Sizes, attention_sizes
from converters.names.megatron.table import Table

_M, _H = "decoder.layers.{n}", "transformer.h.{n}"
_FC1, _FC2 = f"{_M}.mlp.linear_fc1", f"{_M}.mlp.linear_fc2"
_QKV, _PROJ = f"{_M}.self_attention.linear_qkv", f"{_M}.self_attention.linear_proj"

#: transformers' names of the one function, which Megatron has as `--openai-gelu`.
_TANH = ("gelu_new", "gelu_pytorch_tanh")


def sizes(config: Config) -> Sizes:
    return attention_sizes(config, tied=True, dims={"p": config.size("n_positions", "n_ctx")})


def args(config: Config) -> dict[str, Any]:
    activation = config.get("activation_function") or "gelu_new"
    if activation not in (*_TANH, "gelu"):
        raise LossError("Megatron has no such activation", expected="gelu_new or gelu", found=activation)
    if config.flag("scale_attn_by_inverse_layer_idx"):
        raise LossError("Megatron does not scale attention by layer this way", found="scale_attn_by_inverse_layer_idx")
    return common(config, sizes(config)) | {
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


TABLE = Table(
    "transformer.wte.weight",
    "lm_head.weight",
    (
        Row("embedding.position_embeddings.weight", "transformer.wpe.weight", "p h", same),
        Row("decoder.final_layernorm.weight", "transformer.ln_f.weight", "h", same),
        Row("decoder.final_layernorm.bias", "transformer.ln_f.bias", "h", same),
        Row(f"{_QKV}.layer_norm_weight", f"{_H}.ln_1.weight", "h", same),
        Row(f"{_QKV}.layer_norm_bias", f"{_H}.ln_1.bias", "h", same),
        Row(f"{_QKV}.weight", f"{_H}.attn.c_attn.weight", "h 3h", fused_qkv),
        Row(f"{_QKV}.bias", f"{_H}.attn.c_attn.bias", "3h", fused_qkv),
        Row(f"{_PROJ}.weight", f"{_H}.attn.c_proj.weight", "h h", transposed),
        Row(f"{_PROJ}.bias", f"{_H}.attn.c_proj.bias", "h", same),
        Row(f"{_FC1}.layer_norm_weight", f"{_H}.ln_2.weight", "h", same),
        Row(f"{_FC1}.layer_norm_bias", f"{_H}.ln_2.bias", "h", same),
        Row(f"{_FC1}.weight", f"{_H}.mlp.c_fc.weight", "h f", transposed),
        Row(f"{_FC1}.bias", f"{_H}.mlp.c_fc.bias", "f", same),
        Row(f"{_FC2}.weight", f"{_H}.mlp.c_proj.weight", "f h", transposed),
        Row(f"{_FC2}.bias", f"{_H}.mlp.c_proj.bias", "h", same),
    ),
    sizes,
    args,
    derived=(r"transformer\.h\.\d+\.attn\.(bias|masked_bias)",),  # the causal mask
    prefix="transformer.",
    layer_modules=("ln_1.", "attn.", "ln_2.", "mlp."),
    saved_again=2,
)
