"""A table of one architecture, and the relation that it declares for a model's sizes."""

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
#: Linear layers that have biases all or none; those of queries, keys and values may have them alone.
_LINEAR = re.compile(r"^(?:decoder|mtp)\..*\.linear_(proj|fc1|fc2)\.(weight|bias)$")
#: A layer's number, what begins the Hub's names in it, and the rest of these names.
_Layer = tuple[int | None, str, Mapping[str, Shape]]


@dataclass(frozen=True, slots=True)
class RowPlace:
    """A row in one layer, or outside of all (`layer` is None), with the shapes that the Hub's tensors have there.

    `prefix` begins the Hub's names.
    """

    row: MegatronRow
    layer: int | None
    prefix: str
    shapes: tuple[Shape, ...]
    pattern: Pattern

    @property
    def megatron(self) -> str:
        """Megatron's name, in which `{e}` may stand."""
        return self.row.megatron.replace("{n}", str(self.layer))

    @property
    def hubs(self) -> tuple[str, ...]:
        return tuple(self.prefix + hub for hub in self.row.hubs)


@dataclass(frozen=True)
class Table:
    """Everything that Megatron's formats need to know of an architecture; each module of `architectures` has one.

    Which tensors there are, and of which shape, `family` says.  `top` are the rows of what is in no layer, `layer` of
    what is in every one, `dense` and `sparse` of what is in layers without and with experts.  Rows of layers leave out
    what all names of a layer begin with; how a row is read, `rows` says.
    """

    family: Family | Composite
    #: Megatron-LM's arguments (megatron/training/arguments.py) for the same model.
    args: Callable[[Sizes], dict[str, Any]]
    top: str
    layer: str
    dense: str = ""
    sparse: str = ""
    #: Rows of what is in layers which have a tensor that the Hub calls so: layers of several kinds.
    beside: Mapping[str, str] = field(default_factory=dict)
    #: What is in a layer of multi-token prediction beside the tensors of a sparse layer, or of a dense one where no
    #: layer has experts; Megatron's names are in full.
    prediction: str = ""
    #: What begins the Hub's names, where files may leave it out.
    prefix: str = ""
    #: What Megatron computes a little otherwise than transformers: sentences for whoever converts.
    notes: Callable[[Sizes], Sequence[str]] = lambda sizes: ()

    @property
    def rows(self) -> tuple[MegatronRow, ...]:
        """All rows but those of multi-token prediction."""
        return parse(self.top) + parse("".join((self.layer, self.dense, self.sparse, *self.beside.values())), _LAYER)

    @property
    def kept(self) -> tuple[MegatronRow, ...]:
        """The rows of modules that are kept as they are."""
        return tuple(row for row in parse(self.top) if row.hubs[0].endswith(EVERY))

    def hub_name(self, megatron: str) -> str:
        """The Hub's name of a tensor that is one of its own and in no layer."""
        return next(row.hubs[0] for row in parse(self.top) if row.megatron == megatron)

    @property
    def second_names(self) -> dict[str, str]:
        """Names that tensors in no layer have in memory beside those in the Hub's files, mapped to the latter."""
        return {row.hubs[0]: self.hub_name(row.megatron) for row in parse(self.top) if row.kind == COPY}

    def places(self, sizes: Sizes) -> Iterator[RowPlace]:
        """Every row in every layer in which the Hub's files have its tensors."""

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
        """Megatron's names of tensors that are the Hub's less one."""
        return [place.megatron for place in self.places(sizes) if place.row.kind == CENTRED]

    def _sections(self, sizes: Sizes) -> Iterator[tuple[tuple[MegatronRow, ...], Sequence[_Layer]]]:
        """Rows, and where they may stand."""
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
        """Megatron's layers of multi-token prediction are of the kind of the last layer."""
        for hub in self.beside:
            if sizes.predicted and (hub in sizes.layers[-1]) != (self._inner + hub in sizes.predicted[0]):
                raise LossError(
                    "Megatron builds layers of multi-token prediction like the last layer, and these are unlike it",
                    fqn=f"{self.family.predicted_prefix(0, sizes.num_layers)}{self._inner}{hub}",
                    expected="the same kind of attention in both",
                )

    @property
    def _inner(self) -> str:
        """What the Hub's names of a layer inside one of multi-token prediction begin with."""
        return self.family.inside

    def _inside(self, rows: str) -> tuple[MegatronRow, ...]:
        """Rows of a layer, inside one of multi-token prediction."""
        return tuple(replace(row, hubs=tuple(self._inner + hub for hub in row.hubs)) for row in parse(rows, _INNER))

    def relation(self, sizes: Sizes, padded: int, copies: Mapping[str, str]) -> Relation:
        """The relation from the Hub's tensors to Megatron's, whose vocabulary has `padded` rows.

        `copies` maps Hub tensors that are second copies to their originals: those of `Table.copies` that are there.
        Raises LossError for a tensor of the Hub's that Megatron has no place for.
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
        """Hub names that are second copies of a tensor, mapped to the name of the original."""
        owners = {name: self.hub_name(name) for name in (EMBEDDING, OUTPUT)}
        found = {}
        if sizes.tied:
            found[owners[OUTPUT]] = owners[EMBEDDING]
            owners[OUTPUT] = owners[EMBEDDING]
        for place in self.places(sizes):
            if place.row.kind == COPY:
                if place.row.megatron not in owners:
                    raise LossError(
                        "this class has a tensor more where the output layer is not the embedding, which nothing uses",
                        found=place.hubs[0],
                    )
                found[place.hubs[0]] = owners[place.row.megatron]
        return found


def _spread(rows: Iterable[MegatronRow], names: Iterable[str]) -> Iterator[MegatronRow]:
    """Rows, those of a module that is kept as it is once for each of its tensors: the first row counts."""
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
    """Megatron has a place for every tensor of the Hub's."""
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
    """Megatron has biases in all linear layers or in none, besides those of queries, keys and values alone."""
    linear = {place.row.megatron: place for place in reversed(list(places)) if _LINEAR.search(place.row.megatron)}
    biases = [place for name, place in linear.items() if name.endswith("bias")]
    bare = [
        place
        for name, place in linear.items()
        if name.endswith("weight") and name.removesuffix("weight") + "bias" not in linear
    ]
    if biases and bare:
        raise LossError(
            "Megatron has biases in all linear layers or in none",
            fqn=biases[-1].hubs[0],
            found=f"no bias beside {bare[-1].hubs[0]}",
        )
