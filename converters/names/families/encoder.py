"""Tables of encoders, for each class of a `model_type`."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from ckpt.plan.tensors import Shape
from converters.names.families.config import Config
from converters.names.families.rows import DERIVED, Saved, filled, num_labels

_FIRST, _LATER = "first_layer", "later_layer"
TIED = "tie_word_embeddings"
LAYERS, POOLED = ("num_hidden_layers",), ("pooled",)
CLASSIFIER = "classifier.weight labels h \n classifier.bias labels \n"


@dataclass(frozen=True)
class Head:
    """Tensors of one class: `rows` under their full names, besides the base model's under `prefix`.

    `optional` rows are a tied tensor's other names. `kinds` meet conditions in the base model's rows.
    """

    rows: str = ""
    optional: str = ""
    prefix: str | None = None
    kinds: Collection[str] = ()


@dataclass(frozen=True)
class Stack:
    """Layers under one prefix, counted by a config entry. `needs` is a kind required of the class."""

    prefix: str
    count: tuple[str, ...]
    default: int
    rows: str
    needs: str = ""


@dataclass(frozen=True)
class Encoder:
    """One `model_type`. `stem` begins its class names, `base` its tensor names except in `Model`.

    `sizes` maps short names to a config entry and its default. `dims` adds computed sizes, and `kinds` computed
    conditions. `stages` yields layers of changing sizes. `flags` are defaults for entries in conditions. The table
    covers a config if `covers` returns True. An entry of a nested config has a dotted name.
    """

    stem: str
    base: str
    top: str
    stacks: tuple[Stack, ...]
    heads: Mapping[str, Head]
    sizes: Mapping[str, tuple[str, int | None]]
    dims: Callable[[Config, Mapping[str, int]], Mapping[str, int]] = lambda config, dims: {}
    kinds: Callable[[Config], Collection[str]] = lambda config: ()
    stages: Callable[[Config], Iterator[tuple[str, Shape]]] = lambda config: iter(())
    flags: Mapping[str, Any] = field(default_factory=lambda: {TIED: True})
    covers: Callable[[Config], bool] = lambda config: True
    labels: int = 2
    ignored: tuple[str, ...] = (r"(.*\.)?embeddings\.position_ids",)

    def saved(self, values: Mapping[str, Any], cls: str) -> Saved | None:
        """Return the tensors saved by `cls`. None if the table does not cover it."""
        stated = {name: value for name, value in values.items() if value is not None}
        config = Config({**self.flags, **stated, **dict(_dotted(stated))})
        head = self.heads.get(cls.removeprefix(self.stem)) if cls.startswith(self.stem) else None
        if head is None or not self.covers(config):
            return None
        dims = {short: config.size(name, default=default) for short, (name, default) in self.sizes.items()}
        dims["labels"] = num_labels(config, self.labels)
        dims |= self.dims(config, dims)
        prefix = f"{self.base}." if head.prefix is None else head.prefix
        kinds = (*head.kinds, *self.kinds(config))
        required = dict(filled(self.top, config, dims, kinds, prefix))
        for name, shape in (*self._layers(config, dims, kinds), *self.stages(config)):
            required[prefix + name] = shape
        required |= filled(head.rows, config, dims, kinds)
        optional = {name: shape for name, shape in filled(head.optional, config, dims) if name not in required}
        return Saved(cls, required, optional, (*DERIVED, *self.ignored), self.base)

    def _layers(self, config: Config, dims: Mapping[str, int], kinds: Collection[str]) -> Iterator[tuple[str, Shape]]:
        for stack in self.stacks:
            if stack.needs and stack.needs not in kinds:
                continue
            for number in range(config.count(*stack.count, default=stack.default)):
                here = (*kinds, _LATER if number else _FIRST)
                yield from filled(stack.rows, config, dims, here, f"{stack.prefix}.{number}.")


def _dotted(values: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    for name, nested in values.items():
        if isinstance(nested, Mapping):
            yield from ((f"{name}.{inner}", value) for inner, value in nested.items() if value is not None)
