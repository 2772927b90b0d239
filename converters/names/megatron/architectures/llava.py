"""LLaVA 1.5: one of several text models, with unchanged vision tower and projector."""

from __future__ import annotations

from converters.names.megatron.architectures import llama, mistral, qwen2, qwen3
from converters.names.megatron.vision import multimodal_table

TEXTS = {"mistral": mistral.TABLE, "qwen2": qwen2.TABLE, "qwen3": qwen3.TABLE, "llama": llama.TABLE}
VISION = """
    vision_tower.**             vision_tower.vision_model.**    same
    vision_tower.**             vision_tower.**             same
    multi_modal_projector.**    multi_modal_projector.**    same
"""
#: End of each row of tiles, for models that tile images.
NEWLINE = "image_newline    image_newline    same \n"

TABLE = multimodal_table("llava", TEXTS, VISION)
