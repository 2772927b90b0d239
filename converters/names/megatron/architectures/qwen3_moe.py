"""Qwen3 MoE: Qwen3's names, with experts in all layers or in some."""

from __future__ import annotations

from typing import Any

from converters.names.megatron.architectures import llama
from converters.names.megatron.args import common, experts, rotary, silu, window
from converters.names.megatron.rows import SPARSE, Row, joined, same
from converters.names.megatron.sizes import Config, Sizes, attention_sizes
from converters.names.megatron.table import Table

_M, _H = "decoder.layers.{n}", "model.layers.{n}"
_EXPERT, _HUB_EXPERT = f"{_M}.mlp.experts.local_experts.{{e}}", f"{_H}.mlp.experts.{{e}}"

EXPERTS = (
    Row(f"{_M}.pre_mlp_layernorm.weight", f"{_H}.post_attention_layernorm.weight", "h", same, only=SPARSE),
    Row(f"{_M}.mlp.router.weight", f"{_H}.mlp.gate.weight", "e h", same, only=SPARSE),
    Row(
        f"{_EXPERT}.linear_fc1.weight",
        (f"{_HUB_EXPERT}.gate_proj.weight", f"{_HUB_EXPERT}.up_proj.weight"),
        "m h",
        joined,
        only=SPARSE,
    ),
    Row(f"{_EXPERT}.linear_fc2.weight", f"{_HUB_EXPERT}.down_proj.weight", "h m", same, only=SPARSE),
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
    silu(config)
    found = sizes(config)
    more = {
        "qk_layernorm": True,
        "add_qkv_bias": "qkv bias" in found.holds,
        # Probabilities that are not normalised are those over all experts, not over the chosen ones.
        "moe_router_pre_softmax": not config.flag("norm_topk_prob"),
    }
    slides = window(config, used=config.flag("use_sliding_window"))
    return common(config, found) | rotary(config) | slides | experts(config, found) | more


TABLE = Table(
    llama.EMBEDDING,
    llama.OUTPUT,
    llama.FINAL_NORM + llama.ATTENTION + llama.MLP + EXPERTS,
    sizes,
    args,
    derived=llama.DERIVED,
)
