"""LLaVA-NeXT: LLaVA with image tiles."""

from __future__ import annotations

from converters.names.megatron.architectures import llava
from converters.names.megatron.vision import multimodal_table

TABLE = multimodal_table("llava_next", llava.TEXTS, llava.NEWLINE + llava.VISION)
