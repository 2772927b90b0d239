"""Saved values as text and plain data for safe display: bounded and escaped."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import islice
from typing import Any

from ckpt.base.text import one_line, pluralize
from ckpt.plan.dtypes import DType

_MAX_TEXT = 120  # characters
MAX_MEMBERS = 8  # shown per container
_MAX_DEPTH = 4
_MAX_NODES = 200  # values per entry

JSON = None | bool | int | float | str | list[Any] | dict[str, Any]


@dataclass(frozen=True, slots=True)
class Bounds:
    text: int = _MAX_TEXT
    members: int = MAX_MEMBERS
    depth: int = _MAX_DEPTH
    nodes: int = _MAX_NODES


SHORT = Bounds()
#: High enough for everything that frameworks save, low enough to stop an attack.
FULL = Bounds(100_000, 100_000, 50, 1_000_000)


def summarise(value: Any, bounds: Bounds = SHORT) -> JSON:
    """Return bounded plain data: long texts and containers are cut, other objects show only their type."""
    return _summarise(value, bounds, bounds.depth, [bounds.nodes])


def _summarise(value: Any, bounds: Bounds, depth: int, budget: list[int]) -> JSON:
    budget[0] -= 1
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, int):
        # Printing a long integer takes quadratic time.
        return value if value.bit_length() <= 64 else f"<integer of {pluralize(value.bit_length(), 'bit')}>"
    if isinstance(value, float):
        return value if math.isfinite(value) else str(value)
    if isinstance(value, str):
        return one_line(value, bounds.text)
    if isinstance(value, bytes | bytearray):
        return f"<{pluralize(len(value), 'byte')}>"
    if isinstance(value, DType):
        return value.name
    if isinstance(value, Mapping):
        return _summarise_mapping(value, bounds, depth, budget)
    if isinstance(value, list | tuple | set | frozenset):
        if depth == 0 or budget[0] <= 0:
            return f"<{pluralize(len(value), 'value')}>"
        shown = []
        for member in islice(value, bounds.members):
            if budget[0] <= 0:
                break
            shown.append(_summarise(member, bounds, depth - 1, budget))
        left = len(value) - len(shown)
        return [*shown, f"... {left} more"] if left else shown
    return _kind_of_value(value)


def _summarise_mapping(value: Mapping[Any, Any], bounds: Bounds, depth: int, budget: list[int]) -> JSON:
    if depth == 0 or budget[0] <= 0:
        return f"<{pluralize(len(value), 'entry')}>"
    shown: dict[str, JSON] = {}
    for key in islice(value, bounds.members * 2):
        if budget[0] <= 0:
            break
        shown[_key(key)] = _summarise(value[key], bounds, depth - 1, budget)
    left = len(value) - len(shown)
    if left:
        shown["..."] = f"{left} more"
    return shown


def _key(key: Any) -> str:
    return str(summarise(key) if isinstance(key, str | int | float | bytes | None) else _kind_of_value(key))


def _kind_of_value(value: Any) -> str:
    name = getattr(value, "typename", None)
    shape = getattr(value, "shape", None)
    dtype = getattr(value, "dtype", None)
    text = one_line(name, _MAX_TEXT) if isinstance(name, str) else type(value).__name__
    if isinstance(shape, tuple) and all(isinstance(size, int) for size in shape) and len(shape) <= 64:
        return f"<{text} {one_line(str(dtype), _MAX_TEXT) if isinstance(dtype, str | DType) else ''}{list(shape)}>"
    return f"<{text}>"


def summary_text(value: Any) -> str:
    return json_text(summarise(value))


def json_text(value: JSON, limit: int = _MAX_TEXT) -> str:
    if isinstance(value, list):
        text = "[" + ", ".join(json_text(member, limit) for member in value) + "]"
    elif isinstance(value, dict):
        text = ", ".join(f"{name} {json_text(member, limit)}" for name, member in value.items())
    else:
        return str(value)
    return text if len(text) <= limit else text[: limit - 3] + "..."
