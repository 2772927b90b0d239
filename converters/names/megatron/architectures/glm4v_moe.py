"""GLM-4.5V: GLM-4.5's text model without multi-token prediction, and an unchanged vision tower."""

from __future__ import annotations

from functools import partial

from converters.names.megatron.architectures import glm4_moe
from converters.names.megatron.args import mrope
from converters.names.megatron.vision import multimodal_table

VISION = "visual.**    model.visual.**    same"
POSITIONS = partial(mrope, sections=(8, 12, 12), interleaved=False)

TABLE = multimodal_table("glm4v_moe", {"glm4v_moe_text": glm4_moe.TABLE}, VISION, POSITIONS)
