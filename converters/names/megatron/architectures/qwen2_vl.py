"""Qwen2-VL: Qwen2's text model, and an unchanged vision tower."""

from __future__ import annotations

from functools import partial

from converters.names.megatron.architectures import qwen2
from converters.names.megatron.args import mrope
from converters.names.megatron.vision import multimodal_table

VISION = "visual.**    visual.**    same"
POSITIONS = partial(mrope, sections=(16, 24, 24), interleaved=False)

TABLE = multimodal_table("qwen2_vl", {"qwen2_vl_text": qwen2.TABLE}, VISION, POSITIONS)
