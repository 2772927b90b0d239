"""Mistral Small 3.1 and later: Mistral's text model, with Pixtral's tower and the projector unchanged."""

from __future__ import annotations

from converters.names.megatron.architectures import llava, mistral
from converters.names.megatron.vision import multimodal_table

TABLE = multimodal_table("mistral3", {"mistral": mistral.TABLE}, llava.VISION)
