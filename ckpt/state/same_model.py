"""Whether two configs tell of the same model, where the names and the shapes of tensors do not."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

#: How configs call the number of layers.
_DEPTHS = ("num_hidden_layers", "n_layer", "num_layers")


def difference(one: Mapping[str, Any] | None, other: Mapping[str, Any] | None) -> tuple[str, Any, Any] | None:
    """The entry in which two configs tell of different models, with both values; None where there is none."""
    for name, a, b in (
        ("model_type", *((config or {}).get("model_type") for config in (one, other))),
        (_DEPTHS[0], _depth(one), _depth(other)),
    ):
        if None not in (a, b) and a != b:
            return name, a, b
    return None


def _depth(config: Mapping[str, Any] | None) -> Any:
    """The number of layers, of a model with images those of its text model."""
    config = config or {}
    inner = config.get("text_config")
    sources = (config, inner if isinstance(inner, Mapping) else {})
    return next((of[name] for of in sources for name in _DEPTHS if of.get(name) is not None), None)
