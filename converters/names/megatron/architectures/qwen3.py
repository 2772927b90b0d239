"""Qwen3: Llama's names, and norms of each head's queries and keys."""

from __future__ import annotations

from typing import Any

from converters.names.megatron.architectures import llama
from converters.names.megatron.args import common, rotary, silu, window
from converters.names.megatron.sizes import Config, Sizes, attention_sizes
from converters.names.megatron.table import Table


def sizes(config: Config) -> Sizes:
    # The class's head size is 128 whatever the hidden size.
    values = {"head_dim": 128, **{k: v for k, v in config.values.items() if v is not None}}
    return attention_sizes(Config(values), holds=["qk norm"] + ["qkv bias"] * config.flag("attention_bias"))


def args(config: Config) -> dict[str, Any]:
    silu(config)
    found = sizes(config)
    slides = window(config, used=config.flag("use_sliding_window"))
    more = {"qk_layernorm": True, "add_qkv_bias": "qkv bias" in found.holds}
    return common(config, found) | rotary(config) | slides | more


TABLE = Table(
    llama.EMBEDDING,
    llama.OUTPUT,
    llama.FINAL_NORM + llama.ATTENTION + llama.MLP,
    sizes,
    args,
    derived=llama.DERIVED,
)
