"""The conversions that `save_pretrained` undoes in a model that `from_pretrained` loaded from the Hub's files.

transformers 5.23 leaves out every `PrefixChange` if the model was made from a config, as it did not see the files.
"""

from __future__ import annotations

from typing import Any


def stored_names(model: Any) -> Any:
    """Return `model` with the conversions that make `save_pretrained` write the names of the Hub's files."""
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import PrefixChange

    conversions = get_model_conversion_mapping(model, add_legacy=False)
    model._weight_conversions = [
        one for one in conversions if not isinstance(one, PrefixChange) or _in_files(model, one)
    ]
    return model


def _in_files(model: Any, change: Any) -> bool:
    """Return True if the Hub's files need the prefix change.

    A vision or text model of its own has a prefix in its files, and so it has inside a model of another package.  A
    model of the same package held the inner modules itself, and its files have no second prefix.
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
