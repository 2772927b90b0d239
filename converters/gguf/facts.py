"""Facts about a GGUF file for this family's own modules."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class GgufFacts:
    """llama.cpp's architecture in the file, and the type of each tensor to write in blocks, by name."""

    architecture: str | None = None
    blocks: Mapping[str, str] = field(default_factory=dict)
