"""Qwen3: Llama's names, and norms of each head's queries and keys."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from converters.names.megatron.architectures import llama
from converters.names.megatron.args import gated
from converters.names.megatron.sizes import Config, Sizes, attention_sizes


def sizes(config: Config) -> Sizes:
    # The class's head size is 128 whatever the hidden size.
    values = {"head_dim": 128, **{k: v for k, v in config.values.items() if v is not None}}
    return attention_sizes(Config(values), holds=["qk norm"] + ["qkv bias"] * config.flag("attention_bias"))


TABLE = replace(llama.TABLE, sizes=sizes, args=partial(gated, sizes=sizes, slides="use_sliding_window"))
