"""LLaVA-NeXT: LLaVA with image tiles."""

from __future__ import annotations

from converters.names.megatron.architectures import llava
from converters.names.megatron.vision import sighted

TABLE = sighted("llava_next", llava.TEXTS, llava.NEWLINE + llava.VISION)
