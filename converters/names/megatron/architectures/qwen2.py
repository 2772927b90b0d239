"""Qwen2 and Qwen2.5: Llama's names, and biases of queries, keys and values."""

from __future__ import annotations

from typing import Any

from converters.names.megatron.architectures import llama
from converters.names.megatron.args import common, rotary, silu, window
from converters.names.megatron.sizes import Config, Sizes, attention_sizes
from converters.names.megatron.table import Table


def sizes(config: Config) -> Sizes:
    return attention_sizes(config, holds=["qkv bias"])


def args(config: Config) -> dict[str, Any]:
    silu(config)
    slides = window(config, used=config.flag("use_sliding_window"))
    return common(config, sizes(config)) | rotary(config) | slides | {"add_qkv_bias": True}


TABLE = Table(
    llama.EMBEDDING,
    llama.OUTPUT,
    llama.FINAL_NORM + llama.ATTENTION + llama.MLP,
    sizes,
    args,
    derived=llama.DERIVED,
)
