"""Mistral: Llama's names, with attention to a sliding window in the first releases."""

from __future__ import annotations

from typing import Any

from converters.names.megatron.architectures import llama
from converters.names.megatron.args import common, rotary, silu, window
from converters.names.megatron.sizes import Config, attention_sizes
from converters.names.megatron.table import Table


def args(config: Config) -> dict[str, Any]:
    silu(config)
    return common(config, attention_sizes(config)) | rotary(config) | window(config)


TABLE = Table(
    llama.EMBEDDING,
    llama.OUTPUT,
    llama.FINAL_NORM + llama.ATTENTION + llama.MLP,
    attention_sizes,
    args,
    derived=llama.DERIVED,
)
