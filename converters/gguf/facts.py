"""Facts about a GGUF file for this family's own modules."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class GgufFacts:
    """llama.cpp's architecture in the file, its recorded numbers by key, and the types of tensors in blocks by name."""

    architecture: str | None = None
    recorded: Mapping[str, float] = field(default_factory=dict)
    blocks: Mapping[str, str] = field(default_factory=dict)
