"""Comparison of an adapter's tensors with the layers that its config names, as PEFT finds them in the base.

Source: peft 0.21.2 (`tuners/tuners_utils.py`, `check_target_module_exists`). PEFT warns about layers that it can't
adapt, and ignores tensors of layers that it has not adapted.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Any

from ckpt.adapters.config import LORA, AdapterConfig
from ckpt.base.errors import CorruptError
from ckpt.base.text import counted

#: Entry that only PEFT's own files have. Configs from other trainers name layers by their last names.
_OF_PEFTS_FILES = "layers_to_transform"
_ENTRIES = ("target_modules", "exclude_modules", "layers_to_transform", "layers_pattern")
#: Any list of layers before the first number in a name, if the config names no list.
_ANY_LIST = r"[^.]*"


def notes(config: AdapterConfig, layers: Collection[str], adapted: Collection[str]) -> Iterator[str]:
    """Yield notes on `layers` of the base that the config names but that are not `adapted`, and the reverse.

    Raise CorruptError if PEFT could not read the config's layer names.
    """
    if config.kind != LORA or _OF_PEFTS_FILES not in config.raw:
        return
    try:
        named = {layer for layer in layers if is_named(config.raw, layer) and not _is_saved(config.saved, layer)}
    except (re.error, TypeError) as error:
        raise CorruptError(
            f"the adapter's config does not name its layers as PEFT reads them: {error}",
            path=config.path,
            found=", ".join(f"{entry}: {config.raw[entry]!r}" for entry in _ENTRIES if config.raw.get(entry)),
        ) from error
    if not named:  # the names come from another release of the model
        return
    if missing := sorted(named.difference(adapted)):
        words = _layers_in_words(missing)
        yield f"the adapter has no factors of {words}, which target_modules names: nothing is added there"
    if others := sorted(layer for layer in adapted if layer in layers and layer not in named):
        words = _layers_in_words(others)
        yield f"target_modules does not name {words}: merged all the same, where PEFT would pass over them"


def _layers_in_words(layers: list[str]) -> str:
    return f"{counted(len(layers), 'layer')} ({', '.join(layers[:3])}{', ...' if len(layers) > 3 else ''})"


def _is_saved(saved: Iterable[str], layer: str) -> bool:
    return any(f".{name}." in f".{layer}." for name in saved)


def is_named(raw: Mapping[str, Any], layer: str) -> bool:
    targets, excluded = raw.get("target_modules"), raw.get("exclude_modules")
    if not targets or _matches(excluded, layer) or not _matches(targets, layer):
        return False
    wanted = raw.get("layers_to_transform")
    if isinstance(targets, str) or wanted is None or wanted == [] or layer in targets:
        return True
    lists = raw.get("layers_pattern") or [_ANY_LIST]
    for pattern in [lists] if isinstance(lists, str) else lists:
        if match := re.match(rf"(?:.*?\.)?{pattern}\.(?P<number>\d+)\.", layer):
            return int(match["number"]) in ([wanted] if isinstance(wanted, int) else wanted)
    return False


def _matches(given: object, layer: str) -> bool:
    """Return True if `layer` matches a regular expression in full, or ends with a name in a list."""
    if isinstance(given, str):
        return re.fullmatch(given, layer) is not None
    return isinstance(given, list) and any(f".{layer}".endswith(f".{name}") for name in given)
