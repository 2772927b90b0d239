"""Qwen2 and Qwen2.5: Llama's names, and biases for queries, keys and values."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from converters.names.families.tables import FAMILIES
from converters.names.megatron.architectures import llama
from converters.names.megatron.args import gated

TABLE = replace(llama.TABLE, family=FAMILIES["qwen2"], args=partial(gated, slides="use_sliding_window"))
