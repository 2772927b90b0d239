"""Qwen2 and Qwen2.5: Llama's names, and biases of queries, keys and values."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from converters.names.megatron.architectures import llama
from converters.names.megatron.args import gated
from converters.names.megatron.sizes import Config, Sizes, attention_sizes


def sizes(config: Config) -> Sizes:
    return attention_sizes(config, holds=["qkv bias"])


def args(config: Config) -> dict[str, Any]:
    return gated(config, sizes, slides=config.flag("use_sliding_window"))


TABLE = replace(llama.TABLE, sizes=sizes, args=args)
