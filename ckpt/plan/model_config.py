"""Parts of a model's config.json."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def config_parts(config: Mapping[str, Any] | None) -> list[Mapping[str, Any]]:
    """Return a model's config, followed by its `text_config` if it has one."""
    text = (config or {}).get("text_config")
    return [config or {}, *([text] if isinstance(text, Mapping) else [])]
