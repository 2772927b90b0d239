"""GPT-NeoX (Pythia and others): `query_key_value` is Megatron's own, one group per head."""

from __future__ import annotations

from typing import Any

from ckpt.errors import LossError
from converters.names.megatron.args import common, rotary
from converters.names.megatron.rows import Row, same
from converters.names.megatron.sizes import Config, Sizes, attention_sizes
from converters.names.megatron.table import Table

_M, _H = "decoder.layers.{n}", "gpt_neox.layers.{n}"
_FC1, _FC2 = f"{_M}.mlp.linear_fc1", f"{_M}.mlp.linear_fc2"
_QKV, _PROJ = f"{_M}.self_attention.linear_qkv", f"{_M}.self_attention.linear_proj"


def sizes(config: Config) -> Sizes:
    values = {k: v for k, v in config.values.items() if k not in ("head_dim", "num_key_value_heads")}
    return attention_sizes(Config(values))


def args(config: Config) -> dict[str, Any]:
    if not config.flag("attention_bias", True):
        raise LossError("Megatron has biases in all linear layers or in none", found="attention_bias false")
    activation = config.get("hidden_act") or "gelu"
    if activation not in ("gelu", "gelu_new", "gelu_pytorch_tanh"):
        raise LossError("Megatron has no such activation", expected="gelu", found=activation)
    positions = rotary(config)
    if "partial_rotary_factor" not in config.rope:
        positions["rotary_percent"] = config.number("rotary_pct", 0.25)
    if config.get("rotary_emb_base") is not None:
        positions["rotary_base"] = config.size("rotary_emb_base")
    return (
        common(config, sizes(config))
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
    """GPT-NeoX's argument for it.  Megatron has none, and its writers refuse this one."""
    return {"gpt_j_residual": True} if config.flag("use_parallel_residual", True) else {}


TABLE = Table(
    "gpt_neox.embed_in.weight",
    "embed_out.weight",
    (
        Row("decoder.final_layernorm.weight", "gpt_neox.final_layer_norm.weight", "h", same),
        Row("decoder.final_layernorm.bias", "gpt_neox.final_layer_norm.bias", "h", same),
        Row(f"{_QKV}.layer_norm_weight", f"{_H}.input_layernorm.weight", "h", same),
        Row(f"{_QKV}.layer_norm_bias", f"{_H}.input_layernorm.bias", "h", same),
        Row(f"{_QKV}.weight", f"{_H}.attention.query_key_value.weight", "3h h", same),
        Row(f"{_QKV}.bias", f"{_H}.attention.query_key_value.bias", "3h", same),
        Row(f"{_PROJ}.weight", f"{_H}.attention.dense.weight", "h h", same),
        Row(f"{_PROJ}.bias", f"{_H}.attention.dense.bias", "h", same),
        Row(f"{_FC1}.layer_norm_weight", f"{_H}.post_attention_layernorm.weight", "h", same),
        Row(f"{_FC1}.layer_norm_bias", f"{_H}.post_attention_layernorm.bias", "h", same),
        Row(f"{_FC1}.weight", f"{_H}.mlp.dense_h_to_4h.weight", "f h", same),
        Row(f"{_FC1}.bias", f"{_H}.mlp.dense_h_to_4h.bias", "f", same),
        Row(f"{_FC2}.weight", f"{_H}.mlp.dense_4h_to_h.weight", "h f", same),
        Row(f"{_FC2}.bias", f"{_H}.mlp.dense_4h_to_h.bias", "h", same),
    ),
    sizes,
    args,
    # The causal mask and the frequencies of rotary positions, which older files hold.
    derived=(r"gpt_neox\.layers\.\d+\.attention\.(bias|masked_bias|rotary_emb\.inv_freq)",),
    layer_modules=("input_layernorm.", "post_attention_layernorm.", "attention.", "mlp."),
    saved_again=1,
)
