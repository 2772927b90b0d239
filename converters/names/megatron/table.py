"""Table of one architecture."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any

from ckpt.base.errors import LossError
from ckpt.plan.relation import Link, Relation
from ckpt.plan.tensors import Box, Shape
from converters.names.families.composites import Composite
from converters.names.families.rows import Family, Sizes
from converters.names.megatron.model.spelling import EMBEDDING, MTP_INNER, OUTPUT
from converters.names.megatron.rows import CENTRED, COPY, EVERY, PADDED, MegatronRow, Pattern, parse, stacked

_LAYER, _INNER = "decoder.layers.{n}.", f"mtp.layers.{{n}}.{MTP_INNER}."
#: Linear layers with biases in all or none.
_LINEAR = re.compile(r"^(?:decoder|mtp)\..*\.linear_(proj|fc1|fc2)\.(weight|bias)$")
#: Layer number, Hub prefix, and the rest of each name.
_Layer = tuple[int | None, str, Mapping[str, Shape]]


@dataclass(frozen=True, slots=True)
class RowPlace:
    """Row in one layer, or outside all layers (`layer` None). `prefix` begins the Hub's names."""

    row: MegatronRow
    layer: int | None
    prefix: str
    shapes: tuple[Shape, ...]
    pattern: Pattern

    @property
    def megatron(self) -> str:
        return self.row.megatron.replace("{n}", str(self.layer))

    @property
    def hubs(self) -> tuple[str, ...]:
        return tuple(self.prefix + hub for hub in self.row.hubs)


@dataclass(frozen=True)
class Table:
    """Architecture facts needed by Megatron's formats.

    `family` determines tensors and shapes. `top` has the rows outside all layers, `layer` the rows for every layer,
    without its name prefix.
    """

    family: Family | Composite
    #: Megatron-LM's arguments (megatron/training/arguments.py) for the same model.
    args: Callable[[Sizes], dict[str, Any]]
    top: str
    layer: str
    dense: str = ""
    sparse: str = ""
    #: Rows for layers with a given Hub tensor.
    beside: Mapping[str, str] = field(default_factory=dict)
    #: Rows for a multi-token prediction layer, added to a sparse layer's, or else a dense layer's. Megatron's names are
    #: complete.
    prediction: str = ""
    #: Prefix in the Hub's names, which files may omit.
    prefix: str = ""
    #: Notes on small differences between Megatron's and transformers' computation.
    notes: Callable[[Sizes], Sequence[str]] = lambda sizes: ()

    @property
    def rows(self) -> tuple[MegatronRow, ...]:
        """All rows, except for multi-token prediction."""
        return parse(self.top) + parse("".join((self.layer, self.dense, self.sparse, *self.beside.values())), _LAYER)

    @property
    def kept(self) -> tuple[MegatronRow, ...]:
        return tuple(row for row in parse(self.top) if row.hubs[0].endswith(EVERY))

    def hub_name(self, megatron: str) -> str:
        return next(row.hubs[0] for row in parse(self.top) if row.megatron == megatron)

    @property
    def second_names(self) -> dict[str, str]:
        """Second, in-memory names of tensors outside all layers, with their Hub names."""
        return {row.hubs[0]: self.hub_name(row.megatron) for row in parse(self.top) if row.kind == COPY}

    def places(self, sizes: Sizes) -> Iterator[RowPlace]:
        """Yield every row for every layer with its tensors."""

        @cache
        def pattern(row: MegatronRow, shape: Shape) -> Pattern:
            return row.pattern(sizes, shape)

        for rows, layers in self._sections(sizes):
            for row in rows:
                for layer, prefix, held in layers:
                    if all(hub in held for hub in row.hubs):
                        shapes = tuple(held[hub] for hub in row.hubs)
                        yield RowPlace(row, layer, prefix, shapes, pattern(row, shapes[0]))

    def centred(self, sizes: Sizes) -> list[str]:
        return [place.megatron for place in self.places(sizes) if place.row.kind == CENTRED]

    def _sections(self, sizes: Sizes) -> Iterator[tuple[tuple[MegatronRow, ...], Sequence[_Layer]]]:
        layers = [(n, self.family.prefix(n), held) for n, held in enumerate(sizes.layers)]
        behind = self.family.predicted_prefix
        predicted = [(n, behind(n, sizes.num_layers), held) for n, held in enumerate(sizes.predicted)]
        yield tuple(_spread(parse(self.top), sizes.top)), [(None, "", sizes.top)]
        yield parse(self.layer, _LAYER), layers
        yield parse(self.dense, _LAYER), [layer for layer in layers if layer[0] not in sizes.sparse]
        yield parse(self.sparse, _LAYER), [layer for layer in layers if layer[0] in sizes.sparse]
        for hub, rows in self.beside.items():
            yield parse(rows, _LAYER), [layer for layer in layers if hub in layer[2]]
            yield self._inside(rows), [layer for layer in predicted if self._inner + hub in layer[2]]
        yield parse(self.prediction) + self._inside(self.layer + (self.sparse or self.dense)), predicted

    def _check_predicted(self, sizes: Sizes) -> None:
        """Raise LossError unless multi-token prediction layers are like the last layer."""
        for hub in self.beside:
            if sizes.predicted and (hub in sizes.layers[-1]) != (self._inner + hub in sizes.predicted[0]):
                raise LossError(
                    "Megatron builds multi-token prediction layers like the last layer, but these layers differ",
                    fqn=f"{self.family.predicted_prefix(0, sizes.num_layers)}{self._inner}{hub}",
                    expected="the same attention kind in both",
                )

    @property
    def _inner(self) -> str:
        return self.family.inside

    def _inside(self, rows: str) -> tuple[MegatronRow, ...]:
        return tuple(replace(row, hubs=tuple(self._inner + hub for hub in row.hubs)) for row in parse(rows, _INNER))

    def relation(self, sizes: Sizes, padded: int, copies: Mapping[str, str]) -> Relation:
        """Relate the Hub's tensors to Megatron's, with `padded` vocabulary rows.

        `copies` comes from `Table.copies`. Raise LossError for a Hub tensor without a place in Megatron.
        """
        places = list(self.places(sizes))
        _check_all_placed(self.family, sizes, places)
        _check_biases(places)
        self._check_predicted(sizes)
        links: list[Link] = []
        hub: dict[str, Shape] = {}
        megatron: dict[str, Shape] = {}
        padding: dict[str, tuple[Box, ...]] = {}
        for place in places:
            row, pattern, shape = place.row, place.pattern, place.pattern.shape
            if row.kind == COPY:
                continue
            if row.kind == PADDED and padded > shape[0]:
                padding[row.megatron] = (Box((shape[0], *(0,) * len(shape[1:])), (padded - shape[0], *shape[1:])),)
            megatron_name, hub_names = place.megatron, place.hubs
            for expert in range(sizes.num_experts if "{e}" in row.megatron else 1):
                number = str(expert)
                name = megatron_name.replace("{e}", number)
                hubs = [one.replace("{e}", number) for one in hub_names]
                filled = stacked(pattern, expert, sizes.num_experts) if row.is_stacked else pattern
                megatron[name] = (padded, *shape[1:]) if row.kind == PADDED else shape
                hub.update(zip(hubs, place.shapes, strict=True))
                links += [Link(hubs[p.part], p.hub_box, name, p.box, p.dims) for p in filled.pieces]
        hub |= {copy: hub[owner] for copy, owner in copies.items()}
        return Relation(tuple(links), hub, megatron, b_padding=padding, a_copies=dict(copies))

    def copies(self, sizes: Sizes) -> dict[str, str]:
        owners = {name: self.hub_name(name) for name in (EMBEDDING, OUTPUT)}
        found = {}
        if sizes.tied:
            found[owners[OUTPUT]] = owners[EMBEDDING]
            owners[OUTPUT] = owners[EMBEDDING]
        for place in self.places(sizes):
            if place.row.kind == COPY:
                if place.row.megatron not in owners:
                    raise LossError(
                        "this class has an unused extra tensor if the embeddings are untied",
                        found=place.hubs[0],
                    )
                found[place.hubs[0]] = owners[place.row.megatron]
        return found


def _spread(rows: Iterable[MegatronRow], names: Iterable[str]) -> Iterator[MegatronRow]:
    """Repeat rows for each tensor of an unchanged module. The first match counts."""
    kept: set[str] = set()
    for row in rows:
        before, is_module, _ = row.hubs[0].partition(EVERY)
        if not is_module:
            yield row
            continue
        for name in names:
            if name.startswith(before) and name not in kept:
                kept.add(name)
                yield MegatronRow(row.megatron.replace(EVERY, name.removeprefix(before)), (name,), row.kind)


def _check_all_placed(family: Family | Composite, sizes: Sizes, places: Iterable[RowPlace]) -> None:
    placed = {name for place in places for name in place.hubs}
    held = [("", sizes.top), *((family.prefix(number), layer) for number, layer in enumerate(sizes.layers))]
    held += [(family.predicted_prefix(n, sizes.num_layers), layer) for n, layer in enumerate(sizes.predicted)]
    for prefix, shapes in held:
        for name, shape in shapes.items():
            if prefix + name not in placed:
                raise LossError(
                    "Megatron has no place for this tensor", fqn=prefix + name, found=f"shape {list(shape)}"
                )


def _check_biases(places: Iterable[RowPlace]) -> None:
    """Raise LossError if only some linear layers have biases. Queries, keys and values may have biases alone."""
    linear = {place.row.megatron: place for place in reversed(list(places)) if _LINEAR.search(place.row.megatron)}
    biases = [place for name, place in linear.items() if name.endswith("bias")]
    bare = [
        place
        for name, place in linear.items()
        if name.endswith("weight") and name.removesuffix("weight") + "bias" not in linear
    ]
    if biases and bare:
        raise LossError(
            "Megatron needs biases in all linear layers, or no biases",
            fqn=biases[-1].hubs[0],
            found=f"no bias beside {bare[-1].hubs[0]}",
        )
