"""Mistral: Llama's names, with attention to a sliding window in the first releases."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from converters.names.megatron.architectures import llama
from converters.names.megatron.args import gated
from converters.names.megatron.sizes import Config, attention_sizes


def args(config: Config) -> dict[str, Any]:
    return gated(config, attention_sizes)


TABLE = replace(llama.TABLE, sizes=attention_sizes, args=args)
