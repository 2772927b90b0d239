"""Qwen3.5 with experts."""

from __future__ import annotations

from converters.names.megatron.architectures import qwen3_5, qwen3_5_moe_text, qwen3_vl
from converters.names.megatron.vision import multimodal_table

TABLE = multimodal_table(
    "qwen3_5_moe", {"qwen3_5_moe_text": qwen3_5_moe_text.TABLE}, qwen3_vl.VISION, qwen3_5.POSITIONS
)
