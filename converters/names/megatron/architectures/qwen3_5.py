"""Qwen3.5: the text model with hybrid layers, and an unchanged vision tower."""

from __future__ import annotations

from functools import partial

from converters.names.megatron.architectures import qwen3_5_text, qwen3_vl
from converters.names.megatron.args import mrope
from converters.names.megatron.vision import multimodal_table

POSITIONS = partial(mrope, sections=(11, 11, 10), interleaved=True)

TABLE = multimodal_table("qwen3_5", {"qwen3_5_text": qwen3_5_text.TABLE}, qwen3_vl.VISION, POSITIONS)
