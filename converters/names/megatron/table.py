"""A table of one architecture, and the relation that it declares for a model's sizes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from ckpt.plan.relation import Link, Relation
from ckpt.plan.tensors import Box, Shape
from converters.names.megatron.model.spelling import EMBEDDING, MTP_INNER, OUTPUT
from converters.names.megatron.rows import DENSE, SPARSE, Row, stacked
from converters.names.megatron.sizes import Config, Sizes


@dataclass(frozen=True)
class Table:
    """All that ckpt has to be told of an architecture: one of these per module of `architectures`.

    The embedding and the output layer, whose vocabulary Megatron pads, are one tensor where `Sizes.tied`.
    """

    #: Hub names of the embedding and the output layer.
    embedding: str
    output: str
    #: All other tensors.
    rows: tuple[Row, ...]
    #: Reads sizes from a config.
    sizes: Callable[[Config], Sizes]
    #: Reads Megatron-LM's arguments (megatron/training/arguments.py) for the same model from a config.
    args: Callable[[Config], dict[str, Any]]
    #: Layers of multi-token prediction, in each of which the Hub stores the embedding and the output layer again.
    mtp_rows: tuple[Row, ...] = ()
    mtp_embedding: str = ""
    mtp_output: str = ""
    #: Patterns of Hub tensors that follow from the config and that Megatron does not store.
    derived: tuple[str, ...] = ()
    #: What all Hub names begin with, or none.
    prefix: str = ""
    #: Endings of the names of Megatron's buffers.
    buffers: tuple[str, ...] = ()
    #: Modules of a layer, and of an MLP with experts, in the order in which transformers registers them.
    layer_modules: tuple[str, ...] = ("self_attn.", "mlp.", "input_layernorm.", "post_attention_layernorm.")
    expert_modules: tuple[str, ...] = ("router.", "experts.", "gate.", "shared_experts.")
    #: How often a layer's attention saves its result, or queries, keys and values, once more for the backward pass.
    saved_again: int = 0

    def relation(self, sizes: Sizes, padded: int, copies: Mapping[str, str]) -> Relation:
        """The relation from the Hub's tensors to Megatron's, whose vocabulary has `padded` rows.

        `copies` maps Hub tensors that are second copies to their originals: those of `Table.copies` that are there.
        """
        links: list[Link] = []
        hub: dict[str, Shape] = {}
        megatron: dict[str, Shape] = {}
        padding: dict[str, tuple[Box, ...]] = {}
        rows, hidden = sizes.dims["v"], sizes.dims["h"]
        stored = Box((0, 0), (rows, hidden))
        for name, ours in ((EMBEDDING, self.embedding), (OUTPUT, self.output)):
            if name == OUTPUT and sizes.tied:
                continue
            links.append(Link(ours, stored, name, stored, (0, 1)))
            hub[ours], megatron[name] = stored.sizes, (padded, hidden)
            if padded > rows:
                padding[name] = (Box((rows, 0), (padded - rows, hidden)),)
        for row in rows_of(self.rows + (self.mtp_rows if sizes.num_mtp else ()), sizes):
            pattern = row.kind(sizes, sizes.shape(row.dims))
            for name, hubs, expert in _instances(row, sizes):
                filled = stacked(pattern, expert, sizes.num_experts) if row.is_stacked else pattern
                megatron[name] = filled.shape
                hub.update(zip(hubs, filled.hub_shapes, strict=True))
                links += [Link(hubs[p.part], p.hub_box, name, p.box, p.dims) for p in filled.pieces]
        hub |= {copy: hub[owner] for copy, owner in copies.items()}
        return Relation(tuple(links), hub, megatron, b_padding=padding, a_copies=dict(copies))

    def copies(self, sizes: Sizes) -> dict[str, str]:
        """Hub names that are second copies of a tensor, mapped to the name of the original."""
        output = self.embedding if sizes.tied else self.output
        found = {self.output: self.embedding} if sizes.tied else {}
        for layer in range(sizes.num_layers, sizes.num_layers + sizes.num_mtp):
            found[self.mtp_embedding.format(n=layer)] = self.embedding
            found[self.mtp_output.format(n=layer)] = output
        return found


def rows_of(rows: Iterable[Row], sizes: Sizes) -> Iterator[Row]:
    """Those of a table's rows that a model of these sizes has."""
    kinds = {"", DENSE, SPARSE, *sizes.holds}
    yield from (row for row in rows if row.only in kinds)


def _instances(row: Row, sizes: Sizes) -> Iterator[tuple[str, tuple[str, ...], int]]:
    """Megatron's name, the hub's names and the expert, for each layer and expert that the row stands for."""
    num_experts = sizes.num_experts if "{e}" in row.megatron else 1
    for layer, hub_layer in layers_of(row, sizes):
        for expert in range(num_experts):
            hubs = tuple(hub.format(n=hub_layer, e=expert) for hub in row.hubs)
            yield row.megatron.format(n=layer, e=expert), hubs, expert


def layers_of(row: Row, sizes: Sizes) -> Iterator[tuple[int, int]]:
    """(Megatron's number, the hub's number) of each layer; once (0, 0) for a row outside all layers."""
    if "{n}" not in row.megatron:
        yield 0, 0
    elif row.megatron.startswith("mtp."):
        yield from ((number, sizes.num_layers + number) for number in range(sizes.num_mtp))
    else:
        for number in range(sizes.num_layers):
            if row.only not in (DENSE, SPARSE) or (number in sizes.sparse) == (row.only == SPARSE):
                yield number, number


def inside_mtp(rows: tuple[Row, ...]) -> tuple[Row, ...]:
    """The rows of a sparse decoder layer as those of the layer inside an MTP layer."""
    layer, inner = "decoder.layers.{n}.", f"mtp.layers.{{n}}.{MTP_INNER}."
    return tuple(
        replace(row, megatron=row.megatron.replace(layer, inner), only="" if row.only == SPARSE else row.only)
        for row in rows
        if row.megatron.startswith(layer) and row.only != DENSE
    )
