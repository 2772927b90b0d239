"""Qwen3 MoE: Qwen3's names, with experts in all layers or in some."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from converters.names.megatron.architectures import llama
from converters.names.megatron.args import gated
from converters.names.megatron.rows import SPARSE, Row, gated_mlp, same
from converters.names.megatron.sizes import Config, Sizes, attention_sizes

_M, _H = "decoder.layers.{n}", "model.layers.{n}"

EXPERTS = (
    Row(f"{_M}.pre_mlp_layernorm.weight", f"{_H}.post_attention_layernorm.weight", "h", same, only=SPARSE),
    Row(f"{_M}.mlp.router.weight", f"{_H}.mlp.gate.weight", "e h", same, only=SPARSE),
    *gated_mlp(f"{_M}.mlp.experts.local_experts.{{e}}", f"{_H}.mlp.experts.{{e}}", "m", SPARSE),
)


def sizes(config: Config) -> Sizes:
    num_experts, step = config.count("num_experts", "num_local_experts"), config.size("decoder_sparse_step", default=1)
    dense = set(config.get("mlp_only_layers") or ())
    sparse = frozenset(n for n in range(config.num_layers) if n not in dense and (n + 1) % step == 0)
    return attention_sizes(
        config,
        dims={"e": num_experts, "m": config.size("moe_intermediate_size")},
        holds=["qk norm"] + ["qkv bias"] * config.flag("attention_bias"),
        sparse=sparse,
        num_experts=num_experts,
    )


def args(config: Config) -> dict[str, Any]:
    # Probabilities that are not normalised are those over all experts, not over the chosen ones.
    more = {"moe_router_pre_softmax": not config.flag("norm_topk_prob")}
    return gated(config, sizes=sizes, slides="use_sliding_window") | more


TABLE = replace(llama.TABLE, rows=llama.TABLE.rows + EXPERTS, sizes=sizes, args=args)
