"""Mixtral: Mistral's attention, experts in every layer."""

from __future__ import annotations

from typing import Any

from converters.names.megatron.architectures import llama
from converters.names.megatron.args import common, experts, rotary, silu, window
from converters.names.megatron.rows import Row, joined, same
from converters.names.megatron.sizes import Config, Sizes, attention_sizes
from converters.names.megatron.table import Table

_M, _H = "decoder.layers.{n}", "model.layers.{n}"
_EXPERT, _HUB_EXPERT = f"{_M}.mlp.experts.local_experts.{{e}}", f"{_H}.block_sparse_moe.experts.{{e}}"

EXPERTS = (
    Row(f"{_M}.pre_mlp_layernorm.weight", f"{_H}.post_attention_layernorm.weight", "h", same),
    Row(f"{_M}.mlp.router.weight", f"{_H}.block_sparse_moe.gate.weight", "e h", same),
    Row(f"{_EXPERT}.linear_fc1.weight", (f"{_HUB_EXPERT}.w1.weight", f"{_HUB_EXPERT}.w3.weight"), "m h", joined),
    Row(f"{_EXPERT}.linear_fc2.weight", f"{_HUB_EXPERT}.w2.weight", "h m", same),
)


def sizes(config: Config) -> Sizes:
    num_experts = config.count("num_local_experts", "num_experts")
    return attention_sizes(
        config,
        dims={"e": num_experts, "m": config.size("intermediate_size")},
        sparse=frozenset(range(config.num_layers)),
        num_experts=num_experts,
    )


def args(config: Config) -> dict[str, Any]:
    silu(config)
    found = sizes(config)
    return common(config, found) | rotary(config, 1e6) | window(config) | experts(config, found)


TABLE = Table(
    llama.EMBEDDING,
    llama.OUTPUT,
    llama.FINAL_NORM + llama.ATTENTION + EXPERTS,
    sizes,
    args,
    derived=llama.DERIVED,
    expert_modules=("gate.", "experts."),
)
