"""gpt-oss: attention sinks, experts with biases that the hub stacks, gate and up columns in turns."""

from __future__ import annotations

from typing import Any

from converters.names.megatron.architectures import llama
from converters.names.megatron.args import common, experts, window, yarn
from converters.names.megatron.rows import Row, interleaved, same, transposed
from converters.names.megatron.sizes import Config, Sizes, attention_sizes
from converters.names.megatron.table import Table

_M, _H = "decoder.layers.{n}", "model.layers.{n}"
_EXPERT, _STACK = f"{_M}.mlp.experts.local_experts.{{e}}", f"{_H}.mlp.experts"

ROWS = (
    Row(f"{_M}.self_attention.core_attention.softmax_offset", f"{_H}.self_attn.sinks", "heads", same),
    Row(f"{_M}.pre_mlp_layernorm.weight", f"{_H}.post_attention_layernorm.weight", "h", same),
    Row(f"{_M}.mlp.router.weight", f"{_H}.mlp.router.weight", "e h", same),
    Row(f"{_M}.mlp.router.bias", f"{_H}.mlp.router.bias", "e", same),
    Row(f"{_EXPERT}.linear_fc1.weight", f"{_STACK}.gate_up_proj", "h 2m", interleaved),
    Row(f"{_EXPERT}.linear_fc1.bias", f"{_STACK}.gate_up_proj_bias", "2m", interleaved),
    Row(f"{_EXPERT}.linear_fc2.weight", f"{_STACK}.down_proj", "m h", transposed),
    Row(f"{_EXPERT}.linear_fc2.bias", f"{_STACK}.down_proj_bias", "h", same),
)


def sizes(config: Config) -> Sizes:
    num_experts = config.count("num_local_experts", "num_experts")
    heads = config.size("num_attention_heads")
    return attention_sizes(
        config,
        dims={"e": num_experts, "m": config.size("intermediate_size"), "heads": heads},
        holds=["qkv bias", "biases"] if config.flag("attention_bias", True) else [],
        sparse=frozenset(range(config.num_layers)),
        num_experts=num_experts,
    )


def args(config: Config) -> dict[str, Any]:
    found = sizes(config)
    return (
        common(config, found)
        | yarn(config, 150000.0)
        | window(config)
        | experts(config, found)
        | {
            "norm_epsilon": config.number("rms_norm_eps", 1e-5),
            "add_bias_linear": True,
            "add_qkv_bias": True,
            "swiglu": False,
            "quick_geglu": True,
            "glu_linear_offset": 1.0,
            "activation_func_clamp_value": config.number("swiglu_limit", 7.0),
            "softmax_type": "learnable",
        }
    )


TABLE = Table(llama.EMBEDDING, llama.OUTPUT, llama.FINAL_NORM + llama.ATTENTION + ROWS, sizes, args)
