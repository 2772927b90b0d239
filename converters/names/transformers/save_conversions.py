"""Conversions reverted by `save_pretrained` for a model that `from_pretrained` loaded from the Hub's files.

If the model was made from a config, transformers 5.23 leaves out every `PrefixChange`, because it did not see the
files.
"""

from __future__ import annotations

from typing import Any


def stored_names(model: Any) -> Any:
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import PrefixChange

    conversions = get_model_conversion_mapping(model, add_legacy=False)
    model._weight_conversions = [
        one for one in conversions if not isinstance(one, PrefixChange) or _in_files(model, one)
    ]
    return model


def _in_files(model: Any, change: Any) -> bool:
    """Return True if the Hub's files need the prefix change.

    A separate vision or text model has a prefix in its files, and keeps it inside another package's model. A model in
    the same package held the inner modules itself, and its files have no second prefix.
    """
    from transformers import PreTrainedModel
    from transformers.conversion_mapping import get_checkpoint_conversion_mapping

    modules = dict(model.named_modules())
    base, scope = model.base_model_prefix, change.scope_prefix
    path = "" if scope is None else next((p for p in (f"{base}.{scope}".strip("."), scope) if p in modules), scope)
    if change.prefix_to_add is not None:
        return path in ("", base)
    cls = type(modules[path])
    own = get_checkpoint_conversion_mapping(cls.__name__)
    if own is None or len(own) != 1:
        return False
    while path:
        path = path.rpartition(".")[0]
        if isinstance(modules[path], PreTrainedModel):
            return _package(type(modules[path])) != _package(cls)
    return True


def _package(cls: type) -> str:
    return cls.__module__.rpartition(".")[0]
