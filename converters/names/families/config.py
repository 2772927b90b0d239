"""Checked access to a model's config.json."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ckpt.base.errors import CorruptError

_MAX_SIZE = 1 << 40
_MAX_COUNT = 1 << 20
#: Error message for a missing size.
NO_SIZE = "the config does not state a size"


@dataclass(frozen=True)
class Config:
    """config.json with values checked on access."""

    values: Mapping[str, Any]

    def size(self, *names: str, default: int | None = None) -> int:
        """Return the first existing entry, a positive integer, or the default. Raise CorruptError without either."""
        for name in names:
            value = self.values.get(name)
            if value is None:
                continue
            if type(value) is not int or not 0 < value < _MAX_SIZE:
                raise CorruptError("the config states no size", expected=f"{name}: a positive integer", found=value)
            return value
        if default is None:
            raise CorruptError(NO_SIZE, expected=names[0], found="no such entry")
        return default

    def count(self, *names: str, default: int | None = None) -> int:
        """Return `size` for layers and experts, which are listed one by one. Raise CorruptError above a limit."""
        found = self.size(*names, default=default)
        if found > _MAX_COUNT:
            raise CorruptError("the config has too many of something", found=f"{names[0]} {found}")
        return found

    def natural(self, *names: str) -> int:
        """Return the first existing one of `names`, an integer that may be 0. Default 0."""
        stated = next((name for name in names if self.values.get(name) is not None), None)
        return 0 if stated is None or self.values[stated] == 0 else self.size(stated)

    def numbers(self, name: str) -> list[Any]:
        """Return a list, by default an empty one. Raise CorruptError for any other value."""
        value = self.values.get(name) or []
        if not isinstance(value, list):
            raise CorruptError("the config states no list", expected=f"{name}: a list", found=value)
        return value

    def number(self, name: str, default: float | None = None) -> float:
        value = self.values.get(name)
        value = default if value is None else value
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise CorruptError("the config does not state a number", expected=name, found=value)
        return value

    def flag(self, name: str, default: bool = False) -> bool:
        value = self.values.get(name)
        return default if value is None else bool(value)

    def mapping(self, *names: str) -> Mapping[str, Any]:
        """Return the first of `names` that is an object, or else an empty one."""
        return next((self.values[n] for n in names if isinstance(self.values.get(n), Mapping)), {})

    def get(self, name: str) -> Any:
        return self.values.get(name)

    @property
    def num_layers(self) -> int:
        """Number of layers, counted in the list of layers if there is one."""
        for name in ("layers_block_type", "hybrid_override_pattern"):
            listed = self.get(name)
            if isinstance(listed, list | str) and listed:
                return Config({name: len(listed)}).count(name)
        return self.count("num_hidden_layers", "n_layer")

    @property
    def rope(self) -> Mapping[str, Any]:
        """Rotary parameters: transformers 5's, plus older configs' entries. `rope_scaling` overrides the rest."""
        stated = self.mapping("rope_scaling") or self.mapping("rope_parameters")
        beside = {name: self.get(name) for name in ("rope_theta", "partial_rotary_factor")}
        older = {name: value for name, value in beside.items() if value is not None}
        return {**older, **stated, "rope_type": stated.get("rope_type", stated.get("type", "default"))}


def architectures(config: Mapping[str, Any]) -> list[str]:
    """Return the model's class names, without FSDP1's prefix for wrapped classes."""
    named = config.get("architectures")
    if not isinstance(named, list):
        return []
    return [re.sub(r"^FSDP(?=[A-Z])", "", name) for name in named if isinstance(name, str)]
