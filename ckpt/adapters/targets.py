"""An adapter's layers by config and by tensors.

Source: peft 0.21.2 (`tuners/tuners_utils.py`, `check_target_module_exists`). PEFT warns about layers that it can't
adapt, and ignores tensors of layers that it has not adapted.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Any

from ckpt.adapters.config import LORA, TRAINABLE_TOKENS, AdapterConfig
from ckpt.base.errors import CorruptError
from ckpt.base.text import pluralize

#: Only PEFT's own LoRA files have this entry. Other trainers name layers by their last names.
_OF_PEFTS_FILES = "layers_to_transform"
_ENTRIES = ("target_modules", "exclude_modules", "layers_to_transform", "layers_pattern")
#: Any list of layers before the first number in a name.
_ANY_LIST = r"[^.]*"
#: In upper or lower case.
_ALL_LINEAR = "all-linear"


def check(config: AdapterConfig, adapted: Collection[str]) -> None:
    """Raise CorruptError if the config names none of the `adapted` layers, or for most kinds not all.

    Some LoRA layers may be unnamed, and so may the tied layer of trained tokens.
    """
    unnamed = list(_unnamed(config, adapted))
    if not unnamed or (len(unnamed) < len(adapted) and config.kind in (LORA, TRAINABLE_TOKENS)):
        return
    few = len(unnamed) < len(adapted) or bool(config.target_parameters)
    raise CorruptError(
        f"the adapter config misses {'some' if few else 'all'} layers in the adapter file",
        path=config.path,
        fqn=unnamed[0],
        expected=_layers_in_words(unnamed),
        found=_entries_in_words(config.raw, always=_ENTRIES[0]),
    )


def unnamed(config: AdapterConfig, adapted: Collection[str]) -> Iterator[str]:
    if config.kind == LORA and (others := list(_unnamed(config, adapted))):
        words = _layers_in_words(others)
        yield f"target_modules does not name {words}: merged anyway; PEFT would skip them"


def notes(config: AdapterConfig, layers: Collection[str], adapted: Collection[str]) -> Iterator[str]:
    """Yield notes on named `layers` that are not `adapted`, and the reverse.

    Raise CorruptError if PEFT could not read the config's layer names.
    """
    if not _is_of_peft(config):
        return
    named = {layer for layer in layers if _is_adapted(config, layer)}
    if not named:  # the names come from another release of the model
        return
    if missing := sorted(named.difference(adapted)):
        words = _layers_in_words(missing)
        yield f"the adapter has no factors of {words}, although target_modules names them: these layers stay unchanged"
    yield from unnamed(config, [layer for layer in adapted if layer in layers])


def _unnamed(config: AdapterConfig, adapted: Iterable[str]) -> Iterator[str]:
    """Yield the `adapted` layers missing from the config. Yield nothing if naming depends on the model."""
    targets = config.raw.get(_ENTRIES[0], _ALL_LINEAR)
    is_open = isinstance(targets, str) and targets.lower() == _ALL_LINEAR
    has_ties = bool(config.raw.get("ensure_weight_tying"))  # a name includes all tied layers
    if _is_of_peft(config) and not (is_open or has_ties):
        yield from sorted(layer for layer in adapted if not _is_adapted(config, layer))


def _is_of_peft(config: AdapterConfig) -> bool:
    """Return True if PEFT wrote the config: only LoRA has other writers."""
    return config.kind != LORA or _OF_PEFTS_FILES in config.raw


def _is_adapted(config: AdapterConfig, layer: str) -> bool:
    try:
        return is_named(config.raw, layer) and not _is_saved(config.saved, layer)
    except (re.error, TypeError) as error:
        raise CorruptError(
            f"PEFT can't resolve the layer names in the adapter config: {error}",
            path=config.path,
            found=_entries_in_words(config.raw),
        ) from error


def _entries_in_words(raw: Mapping[str, Any], always: str = "") -> str:
    return ", ".join(f"{entry}: {raw.get(entry)!r}" for entry in _ENTRIES if raw.get(entry) or entry == always)


def _layers_in_words(layers: list[str]) -> str:
    return f"{pluralize(len(layers), 'layer')} ({', '.join(layers[:3])}{', ...' if len(layers) > 3 else ''})"


def _is_saved(saved: Iterable[str], layer: str) -> bool:
    return any(f".{name}." in f".{layer}." for name in saved)


def is_named(raw: Mapping[str, Any], layer: str) -> bool:
    targets, excluded = raw.get("target_modules"), raw.get("exclude_modules")
    if not targets or matches(excluded, layer) or not matches(targets, layer):
        return False
    wanted = raw.get("layers_to_transform")
    if isinstance(targets, str) or wanted is None or wanted == [] or layer in targets:
        return True
    lists = raw.get("layers_pattern") or [_ANY_LIST]
    for pattern in [lists] if isinstance(lists, str) else lists:
        if match := re.match(rf"(?:.*?\.)?{pattern}\.(?P<number>\d+)\.", layer):
            return int(match["number"]) in ([wanted] if isinstance(wanted, int) else wanted)
    return False


def matches(given: object, layer: str) -> bool:
    """Return True if `layer` matches a regular expression in full, or ends with a name in a list."""
    if isinstance(given, str):
        return re.fullmatch(given, layer) is not None
    return isinstance(given, list | Mapping) and any(f".{layer}".endswith(f".{name}") for name in given)
