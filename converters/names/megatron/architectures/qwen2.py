"""Qwen2 and Qwen2.5: Llama's names, and biases of queries, keys and values."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from converters.names.megatron.architectures import llama
from converters.names.megatron.args import gated
from converters.names.megatron.sizes import Config, Sizes, attention_sizes


def sizes(config: Config) -> Sizes:
    return attention_sizes(config, holds=["qkv bias"])


TABLE = replace(llama.TABLE, sizes=sizes, args=partial(gated, sizes=sizes, slides="use_sliding_window"))
