"""A table of one architecture, and the relation that it declares for a model's sizes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from ckpt.plan.relation import Link, Relation
from ckpt.plan.tensors import Box, Shape
from converters.names.megatron.model.spelling import EMBEDDING, MTP_INNER, OUTPUT
from converters.names.megatron.rows import DENSE, SPARSE, Row, stacked
from converters.names.megatron.sizes import Config, Sizes


@dataclass(frozen=True)
class Table:
    """The names of an architecture: one of these per module of this package.

    `embedding` and `output` are the hub's names of the two tensors with a padded vocabulary, which are one tensor
    where `Sizes.tied`; `rows` are all others, `mtp_rows` those of layers of multi-token prediction, for which the hub
    stores `mtp_embedding` and `mtp_output` again.  `sizes` and `args` read a config; the second gives Megatron-LM's
    arguments (megatron/training/arguments.py) that describe the same model.

    `derived` are patterns of hub tensors that follow from the config and that Megatron does not store; `prefix` may
    be missing from all of the hub's names; `buffers` are endings of the names of Megatron's buffers.
    """

    embedding: str
    output: str
    rows: tuple[Row, ...]
    sizes: Callable[[Config], Sizes]
    args: Callable[[Config], dict[str, Any]]
    mtp_rows: tuple[Row, ...] = ()
    mtp_embedding: str = ""
    mtp_output: str = ""
    derived: tuple[str, ...] = ()
    prefix: str = ""
    buffers: tuple[str, ...] = ()

    def relation(self, sizes: Sizes, padded: int, copies: Mapping[str, str]) -> Relation:
        """From the hub's tensors to Megatron's, whose vocabulary has `padded` rows.

        `copies` are the hub's tensors that hold another again, of those that `copies` gives.
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
        for row in self._rows(sizes):
            pattern = row.kind(sizes, sizes.shape(row.dims))
            for name, hubs, expert in _instances(row, sizes):
                filled = stacked(pattern, expert, sizes.num_experts) if row.is_stacked else pattern
                megatron[name] = filled.shape
                hub.update(zip(hubs, filled.hub_shapes, strict=True))
                links += [Link(hubs[p.part], p.hub_box, name, p.box, p.dims) for p in filled.pieces]
        hub |= {copy: hub[owner] for copy, owner in copies.items()}
        return Relation(tuple(links), hub, megatron, b_padding=padding, a_copies=dict(copies))

    def copies(self, sizes: Sizes) -> dict[str, str]:
        """Names of the hub that hold another tensor again, where a file has them, and that tensor's name."""
        output = self.embedding if sizes.tied else self.output
        found = {self.output: self.embedding} if sizes.tied else {}
        for layer in range(sizes.num_layers, sizes.num_layers + sizes.num_mtp):
            found[self.mtp_embedding.format(n=layer)] = self.embedding
            found[self.mtp_output.format(n=layer)] = output
        return found

    def _rows(self, sizes: Sizes) -> Iterator[Row]:
        kinds = {"", DENSE, SPARSE, *sizes.holds}
        rows = self.rows + (self.mtp_rows if sizes.num_mtp else ())
        yield from (row for row in rows if row.only in kinds)


def _instances(row: Row, sizes: Sizes) -> Iterator[tuple[str, tuple[str, ...], int]]:
    """Megatron's name, the hub's names and the expert, for each layer and expert that the row stands for."""
    num_experts = sizes.num_experts if "{e}" in row.megatron else 1
    for layer, hub_layer in _layers(row, sizes):
        for expert in range(num_experts):
            hubs = tuple(hub.format(n=hub_layer, e=expert) for hub in row.hubs)
            yield row.megatron.format(n=layer, e=expert), hubs, expert


def _layers(row: Row, sizes: Sizes) -> Iterator[tuple[int, int]]:
    """(Megatron's number, the hub's number) of each layer."""
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
