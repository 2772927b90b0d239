"""Quantization methods, one per module: each declares its weights' parts, and computes their plain values.

A module in this folder with a `METHOD` is registered by being here.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cache
from importlib import import_module
from pkgutil import iter_modules

from converters.quantized.scheme import Method, Quantizer, Scheme, Settings, UnknownValues

#: Keys for weights that were rotated, pruned or split before they were quantized.
_CHANGES = re.compile(r"rotation|hadamard|transform|spars|permut|low_?rank|svd", re.IGNORECASE)


@cache
def methods() -> Mapping[str, Method]:
    modules = (import_module(f"{__name__}.{module.name}") for module in iter_modules(__path__))
    found: list[Method] = [module.METHOD for module in modules]
    return {name: method for method in found for name in method.names}


def schemes_of(name: str | None, settings: Settings) -> Sequence[Scheme] | None:
    """Return a method's schemes. None if the method or its settings are unknown.

    Without a recorded method, return all self-describing schemes. The values are unknown if a setting changes them in a
    way that no method computes.
    """
    if name is None:
        return [scheme for method in dict.fromkeys(methods().values()) for scheme in method.unrecorded()]
    found = methods()[name].schemes(settings) if name in methods() else None
    changes = [key for key, value in settings.items() if _CHANGES.search(key) and not _is_neutral(value)]
    if found is None or not changes:
        return found
    return [replace(scheme, dequantize=UnknownValues(f"{changes[0]} in the config")) for scheme in found]


def _is_neutral(value: object) -> bool:
    """Return True for a setting without effect: compressed-tensors records dense weights, and empty transforms."""
    if not isinstance(value, Mapping):
        return not value
    return not value.get("config_groups", True) or value.get("format", None if value else "dense") == "dense"


def quantizer_of(name: str, model_type: str) -> Quantizer:
    found = [method.quantizers[name] for method in methods().values() if name in method.quantizers]
    own = (one for one in found if one.model_types is not None and model_type in one.model_types)
    return next(own, None) or next(one for one in found if one.model_types is None)


def own_methods(model_type: str) -> list[str]:
    """Return the values of `--quantize` with a quantizer for just this architecture."""
    pairs = (pair for method in dict.fromkeys(methods().values()) for pair in method.quantizers.items())
    return [name for name, one in pairs if one.model_types is not None and model_type in one.model_types]
