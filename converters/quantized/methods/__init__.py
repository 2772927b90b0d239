"""Quantization methods, one per module: each declares its weights' parts, and computes their plain values.

A module in this folder with a `METHOD` is registered by being here.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cache
from importlib import import_module
from pkgutil import iter_modules

from converters.quantized.module_names import IGNORED
from converters.quantized.scheme import Method, Quantizer, Scheme, Settings, UnknownValues

#: Settings of every method: its name, its excluded modules, its maker, and scales that no weight needs.
_KNOWN = IGNORED | {"quant_method", "quantization", "dequantize", "producer", "kv_cache_scheme", "kv_cache_quant_algo"}


@cache
def methods() -> Mapping[str, Method]:
    modules = (import_module(f"{__name__}.{module.name}") for module in iter_modules(__path__))
    found: list[Method] = [module.METHOD for module in modules]
    return {name: method for method in found for name in method.names}


def schemes_of(name: str | None, settings: Settings) -> Sequence[Scheme] | None:
    """Return a method's schemes. None if the method or its settings are unknown.

    Without a recorded method, return all self-describing schemes. The values are unknown if the method does not know a
    setting: weights may have been rotated, pruned or split before they were quantized.
    """
    if name is None:
        return [scheme for method in dict.fromkeys(methods().values()) for scheme in method.unrecorded()]
    if (method := methods().get(name)) is None:
        return None
    found, unknown = method.schemes(settings), unknown_setting(method, settings)
    if found is None or unknown is None:
        return found
    values = UnknownValues(f"{unknown} in the config, which may change the weights (remove it there if it does not)")
    return [scheme if scheme.dequantize is None else replace(scheme, dequantize=values) for scheme in found]


def unknown_setting(method: Method, settings: Settings) -> str | None:
    known = method.known | _KNOWN
    return next((key for key in _keys(settings) if key not in known and not key.endswith("_version")), None)


def _keys(settings: Settings) -> Iterator[str]:
    """Yield the keys of settings that may have an effect, with those in config groups."""
    groups = settings.get("config_groups")
    groups = [group for group in groups.values() if isinstance(group, Mapping)] if isinstance(groups, Mapping) else []
    inner = [value for group in groups for value in group.values() if isinstance(value, Mapping)]
    yield from (key for each in (settings, *groups, *inner) for key, value in each.items() if not _is_neutral(value))


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
