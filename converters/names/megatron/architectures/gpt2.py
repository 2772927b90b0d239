"""GPT-2: matrices as [in, out] (transformers' Conv1D), learned positions, biases everywhere."""

from __future__ import annotations

from typing import Any

from ckpt.base.errors import LossError
from converters.names.megatron.args import common
from converters.names.megatron.rows import Row, both, fused_qkv, same, transposed
from converters.names.megatron.sizes import Config, Sizes, attention_sizes
from converters.names.megatron.table import Table

_M, _H = "decoder.layers.{n}", "transformer.h.{n}"
_A = f"{_M}.self_attention"

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
        *both("decoder.final_layernorm.", "transformer.ln_f", "h", "h", same),
        *both(f"{_A}.linear_qkv.layer_norm_", f"{_H}.ln_1", "h", "h", same),
        *both(f"{_A}.linear_qkv.", f"{_H}.attn.c_attn", "h 3h", "3h", fused_qkv),
        *both(f"{_A}.linear_proj.", f"{_H}.attn.c_proj", "h h", "h", transposed),
        *both(f"{_M}.mlp.linear_fc1.layer_norm_", f"{_H}.ln_2", "h", "h", same),
        *both(f"{_M}.mlp.linear_fc1.", f"{_H}.mlp.c_fc", "h f", "f", transposed),
        *both(f"{_M}.mlp.linear_fc2.", f"{_H}.mlp.c_proj", "f h", "h", transposed),
    ),
    sizes,
    args,
    derived=(r"transformer\.h\.\d+\.attn\.(bias|masked_bias)",),  # the causal mask
    prefix="transformer.",
    layer_modules=("ln_1.", "attn.", "ln_2.", "mlp."),
    saved_again=2,
)
