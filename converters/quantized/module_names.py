"""Modules named in a quantization config, matched like their loaders do."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from fnmatch import fnmatchcase
from functools import lru_cache

#: Settings that list excluded modules.
IGNORED = frozenset(
    (
        *("modules_to_not_convert", "ignore", "ignored_layers", "exclude_modules", "exclude", "exclude_layers"),
        *("llm_int8_skip_modules", "modules_to_not_quantize"),
    )
)
_END = r"(?:(?<=\.)|(?=\.|$))"  # of a module's name
REGEX = "re:"
_MODELS = re.compile(r"(?:(?:model|language_model|text_model)\.)+")
#: Path prefixes of one language model, in memory and in files of several releases.
_PREFIXES = ("model.", "language_model.", "model.language_model.", "language_model.model.")


def matches_in_transformers(entry: str, module: str) -> bool:
    return matcher_of_transformers([entry])(module)


def matcher_of_transformers(entries: Iterable[str]) -> Callable[[str], bool]:
    """Match a regex up to a module's name, or a suffix: transformers 5.23 `should_convert_module`."""
    ends = tuple(entries)
    patterns = [found for entry in ends if (found := _compiled(f"(?:{entry}){_END}"))]
    return lambda module: module.endswith(ends) or any(pattern.match(module) for pattern in patterns)


def matches_by_name(entry: str, module: str) -> bool:
    """Match a name, or a regex after `re:`: compressed-tensors 0.20 `utils/match.py`, `match_name`."""
    return _has_regex(entry.removeprefix(REGEX), module) if entry.startswith(REGEX) else entry == module


def matches_in_some_loader(entry: str, module: str) -> bool:
    is_named = matches_by_name(entry, module) or fnmatchcase(module, entry)
    return is_named or matches_in_transformers(entry, module)


def matches_parts_of_names(entry: str, module: str) -> bool:
    """Match also inside of a name, like vLLM does for AWQ and ModelOpt."""
    return entry in module or matches_in_some_loader(entry, module)


def aliases(module: str) -> Iterator[str]:
    """Yield a module's names in releases of transformers: configs may have others than files."""
    yield module
    if found := _MODELS.match(module):
        yield from (prefix + module[found.end() :] for prefix in _PREFIXES)


def is_class(target: str) -> bool:
    return target[:1].isupper() and "." not in target


def is_target(module: str, targets: Iterable[str], *, of_class: bool) -> bool:
    """Return True if `targets` has a linear layer's name or class. For other classes, return `of_class`."""
    for target in targets:
        if target == "Linear" or any(matches_by_name(target, name) for name in aliases(module)):
            return True
        if is_class(target) and of_class:
            return True
    return False


def _has_regex(pattern: str, module: str) -> bool:
    found = _compiled(pattern)
    return found is not None and found.match(module) is not None


@lru_cache(1 << 14)  # lists may have more entries than the cache of `re`
def _compiled(pattern: str) -> re.Pattern[str] | None:
    try:
        return re.compile(pattern)
    except (re.error, OverflowError, RecursionError):
        return None
