"""Qwen3: Llama's names, and norms of each head's queries and keys."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from converters.names.families.tables import FAMILIES
from converters.names.megatron.architectures import llama
from converters.names.megatron.args import gated

TABLE = replace(llama.TABLE, family=FAMILIES["qwen3"], args=partial(gated, slides="use_sliding_window"))
