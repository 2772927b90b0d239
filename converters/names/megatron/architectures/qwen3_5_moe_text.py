"""Qwen3.5's text model with experts and a gated shared expert."""

from __future__ import annotations

from dataclasses import replace

from converters.names.families.tables import FAMILIES
from converters.names.megatron.architectures import qwen2_moe, qwen3_5_text, qwen3_moe, qwen3_next

TABLE = replace(
    qwen3_5_text.TABLE,
    family=FAMILIES["qwen3_5_moe_text"],
    args=lambda sizes: qwen3_next.hybrid(sizes) | qwen2_moe.shared(sizes),
    dense="",
    sparse=qwen3_moe.EXPERTS + qwen2_moe.SHARED,
)
