"""Mixtral: Mistral's attention, experts in every layer."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from converters.names.megatron.architectures import llama
from converters.names.megatron.args import gated
from converters.names.megatron.rows import Row, gated_mlp, same
from converters.names.megatron.sizes import Config, Sizes, attention_sizes

_M, _H = "decoder.layers.{n}", "model.layers.{n}"
_EXPERT = f"{_M}.mlp.experts.local_experts.{{e}}"

EXPERTS = (
    Row(f"{_M}.pre_mlp_layernorm.weight", f"{_H}.post_attention_layernorm.weight", "h", same),
    Row(f"{_M}.mlp.router.weight", f"{_H}.block_sparse_moe.gate.weight", "e h", same),
    *gated_mlp(_EXPERT, f"{_H}.block_sparse_moe.experts.{{e}}", "m", names="w1 w3 w2"),
)


def sizes(config: Config) -> Sizes:
    num_experts = config.count("num_local_experts", "num_experts")
    return attention_sizes(
        config,
        dims={"e": num_experts, "m": config.size("intermediate_size")},
        sparse=frozenset(range(config.num_layers)),
        num_experts=num_experts,
    )


TABLE = replace(
    llama.TABLE,
    rows=llama.FINAL_NORM + llama.ATTENTION + EXPERTS,
    sizes=sizes,
    args=partial(gated, sizes=sizes, base=1e6),
    expert_modules=("gate.", "experts."),
)
