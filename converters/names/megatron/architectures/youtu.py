"""Youtu-LLM: DeepSeek-V3's latent attention, and Llama's MLP in every layer."""

from __future__ import annotations

from typing import Any

from converters.names.families.rows import Sizes
from converters.names.families.tables import FAMILIES
from converters.names.megatron.architectures import deepseek_v3, llama
from converters.names.megatron.table import Table


def args(sizes: Sizes) -> dict[str, Any]:
    deepseek_v3.interleaved(sizes)
    return deepseek_v3.latent(sizes)


TABLE = Table(FAMILIES["youtu"], args, llama.TOP, deepseek_v3.ATTENTION, dense=llama.MLP, notes=deepseek_v3.notes)
