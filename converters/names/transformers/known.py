"""Whether the names of a model are known at all: whether something vouches for what the Hub calls its tensors."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from converters.names.transformers.installed import converted_identifiers, model_folder, model_types
from converters.names.transformers.tables import declared


def known_from(config: Mapping[str, Any]) -> Literal["tables", "transformers"] | None:
    """Who knows what becomes of this model's names between memory and the Hub; None where nobody does.

    `tables` are ckpt's own; `transformers` is the installed one, of release 5 or later, which has this model type.
    """
    if declared(config) is not None:
        return "tables"
    whole = next(model_types(config), None)
    if whole is None or converted_identifiers() is None or model_folder(whole) is None:
        return None
    return "transformers"
