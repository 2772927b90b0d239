"""Mistral: Llama's names, with attention to a sliding window in the first releases."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from converters.names.megatron.architectures import llama
from converters.names.megatron.args import gated
from converters.names.megatron.sizes import attention_sizes

TABLE = replace(llama.TABLE, sizes=attention_sizes, args=partial(gated, sizes=attention_sizes))
