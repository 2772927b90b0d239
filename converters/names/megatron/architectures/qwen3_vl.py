"""Qwen3-VL: Qwen3's text model, and an unchanged vision tower."""

from __future__ import annotations

from functools import partial

from converters.names.megatron.architectures import qwen3
from converters.names.megatron.args import mrope
from converters.names.megatron.vision import multimodal_table

VISION = "vision_model.**    model.visual.**    same"
POSITIONS = partial(mrope, sections=(24, 20, 20), interleaved=True)

TABLE = multimodal_table("qwen3_vl", {"qwen3_vl_text": qwen3.TABLE}, VISION, POSITIONS)
