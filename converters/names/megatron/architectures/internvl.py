"""InternVL 3 and 3.5 in transformers' form: Qwen's or Llama's text model, and all other modules unchanged."""

from __future__ import annotations

from converters.names.megatron.architectures import llava, qwen3_moe
from converters.names.megatron.vision import multimodal_table

TEXTS = {name: llava.TEXTS[name] for name in ("qwen2", "qwen3", "llama")}

TABLE = multimodal_table("internvl", {**TEXTS, "qwen3_moe": qwen3_moe.TABLE}, llava.VISION)
