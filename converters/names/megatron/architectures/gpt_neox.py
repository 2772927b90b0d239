"""GPT-NeoX (Pythia and others): `query_key_value` is Megatron's own, one group per head."""

from __future__ import annotations

from typing import Any

from ckpt.base.errors import LossError
from converters.names.megatron.args import common, rotary
from converters.names.megatron.rows import both, same
from converters.names.megatron.sizes import Config, Sizes, attention_sizes
from converters.names.megatron.table import Table

_M, _H = "decoder.layers.{n}", "gpt_neox.layers.{n}"
_A = f"{_M}.self_attention"


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
        *both("decoder.final_layernorm.", "gpt_neox.final_layer_norm", "h", "h", same),
        *both(f"{_A}.linear_qkv.layer_norm_", f"{_H}.input_layernorm", "h", "h", same),
        *both(f"{_A}.linear_qkv.", f"{_H}.attention.query_key_value", "3h h", "3h", same),
        *both(f"{_A}.linear_proj.", f"{_H}.attention.dense", "h h", "h", same),
        *both(f"{_M}.mlp.linear_fc1.layer_norm_", f"{_H}.post_attention_layernorm", "h", "h", same),
        *both(f"{_M}.mlp.linear_fc1.", f"{_H}.mlp.dense_h_to_4h", "f h", "f", same),
        *both(f"{_M}.mlp.linear_fc2.", f"{_H}.mlp.dense_4h_to_h", "h f", "h", same),
    ),
    sizes,
    args,
    # The causal mask and the frequencies of rotary positions, which older files hold.
    derived=(r"gpt_neox\.layers\.\d+\.attention\.(bias|masked_bias|rotary_emb\.inv_freq)",),
    layer_modules=("input_layernorm.", "post_attention_layernorm.", "attention.", "mlp."),
    saved_again=1,
)
