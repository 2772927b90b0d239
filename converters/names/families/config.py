"""Checked access to a model's config.json."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ckpt.base.errors import CorruptError

_MAX_SIZE = 1 << 40
_MAX_COUNT = 1 << 20
NO_SIZE = "the config does not state a size"
#: Older configs have these outside the rotary object.
_ROPE_BESIDE = ("rope_theta", "partial_rotary_factor")
_ORIGINAL = "original_max_position_embeddings"
#: Rotary positions that depend on the original sequence length.
_ROPE_OF_LENGTH = ("llama3", "yarn", "longrope")
#: Current names of older kinds. Sections for images are no scaling.
_ROPE_TYPES = {"mrope": "default", "su": "longrope"}


def of_another_model(
    path: Path | str, expected: str, found: str, hint: str = "does the config belong to this checkpoint?"
) -> CorruptError:
    """Return the error for a config that contradicts the run's record, given in `expected`."""
    return CorruptError(
        "the config belongs to another model than the run trained",
        path=path,
        expected=f"{expected}, recorded by the run",
        found=found,
        hint=hint,
    )


def nested(values: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    """Return an object in a JSON object, or an empty one."""
    found = values.get(name)
    return found if isinstance(found, Mapping) else {}


@dataclass(frozen=True)
class Config:
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
        """Return `size` for layers and experts. They are listed one by one, so raise CorruptError above a limit."""
        found = self.size(*names, default=default)
        if found > _MAX_COUNT:
            raise CorruptError("a count in the config is too large", found=f"{names[0]} {found}")
        return found

    def natural(self, *names: str) -> int:
        """Return the first existing entry, an integer that may be 0. Default 0."""
        stated = next((name for name in names if self.values.get(name) is not None), None)
        return 0 if stated is None or self.values[stated] == 0 else self.size(stated)

    def numbers(self, name: str) -> list[Any]:
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
        return next((self.values[n] for n in names if isinstance(self.values.get(n), Mapping)), {})

    def get(self, name: str) -> Any:
        return self.values.get(name)

    @property
    def num_layers(self) -> int:
        for name in ("layers_block_type", "hybrid_override_pattern"):
            listed = self.get(name)
            if isinstance(listed, list | str) and listed:
                return Config({name: len(listed)}).count(name)
        return self.count("num_hidden_layers", "n_layer")

    @property
    def rope(self) -> Mapping[str, Any]:
        """Rotary parameters: transformers 5's, plus older configs' entries. `rope_scaling` overrides the rest."""
        stated = self.mapping("rope_scaling") or self.mapping("rope_parameters")
        beside = {name: self.get(name) for name in _ROPE_BESIDE}
        older = {name: value for name, value in beside.items() if value is not None}
        found = {**older, **stated, "rope_type": stated.get("rope_type", stated.get("type", "default"))}
        if found["rope_type"] in _ROPE_OF_LENGTH:  # like transformers 5 (`standardize_rope_params`)
            lengths = (self.get(_ORIGINAL), stated.get(_ORIGINAL), self.get("max_position_embeddings"))
            found[_ORIGINAL] = next((length for length in lengths if length is not None), None)
        return found

    def rope_contradictions(self) -> Iterator[dict[str, Any]]:
        parts = {name: self.mapping(name) for name in ("rope_scaling", "rope_parameters") if self.mapping(name)}
        if any(isinstance(value, Mapping) for part in parts.values() for value in part.values()):
            return  # other parameters for each kind of layer
        stated: dict[str, dict[str, Any]] = {}
        for name in (*_ROPE_BESIDE, _ORIGINAL):
            stated[name] = {name: self.get(name)}
        for part, values in parts.items():
            for name, value in {"rope_type": "default", **values}.items() if len(parts) > 1 else values.items():
                is_type = name in ("rope_type", "type")
                kind = rope_type({name: value}) if is_type else value
                stated.setdefault("rope_type" if is_type else name, {})[f"{part}.{name}"] = kind
        for found in stated.values():
            given = {name: value for name, value in found.items() if value is not None}
            if any(value != next(iter(given.values())) for value in given.values()):
                yield given


def rope_type(rope: Mapping[str, Any]) -> str:
    kind = rope.get("rope_type", rope.get("type")) or "default"
    return str(_ROPE_TYPES.get(kind, kind)) if isinstance(kind, str) else str(kind)


def architectures(config: Mapping[str, Any]) -> list[str]:
    """Return the class names, without FSDP1's prefix for wrapped classes."""
    named = config.get("architectures")
    if not isinstance(named, list):
        return []
    return [re.sub(r"^FSDP(?=[A-Z])", "", name) for name in named if isinstance(name, str)]
