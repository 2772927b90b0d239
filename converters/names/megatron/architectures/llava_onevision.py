"""LLaVA-OneVision: LLaVA with SigLIP's tower and image tiles."""

from __future__ import annotations

from converters.names.megatron.architectures import llava
from converters.names.megatron.vision import multimodal_table

TABLE = multimodal_table("llava_onevision", llava.TEXTS, llava.NEWLINE + llava.VISION)
