"""Qwen2.5-VL: Qwen2's text model, and an unchanged vision tower."""

from __future__ import annotations

from converters.names.megatron.architectures import qwen2, qwen2_vl
from converters.names.megatron.vision import multimodal_table

TABLE = multimodal_table("qwen2_5_vl", {"qwen2_5_vl_text": qwen2.TABLE}, qwen2_vl.VISION, qwen2_vl.POSITIONS)
