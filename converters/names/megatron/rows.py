"""How a table is read: which tensors of the Hub make up a tensor of Megatron's, and how, as boxes.

    self_attention.linear_qkv.[weight|bias]    self_attn.[q|k|v]_proj.[weight|bias]    qkv
    |                                          |                                       |
    Megatron's name                            the Hub's name, or several              the kind: one of `KINDS`

Brackets with the same words in both names are alternatives: this is one row for weights and one for biases.  Other
brackets of the Hub's name are several tensors that make up one of Megatron's.  `{e}` is an expert; where only
Megatron's name has it, the Hub's tensor is a stack of all experts'.  `**` is the rest of any name: a module that both
sides have as it is.

Megatron's conventions (megatron-core 0.16.1): `linear_qkv` holds, for each query group, the group's query heads, its
key head and its value head (transformer/attention.py, `get_query_key_value_tensors`); `linear_fc1` of a gated MLP
holds all gate rows and then all up rows (transformer/mlp.py); a matrix is [out, in], as torch's Linear has it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cache

from ckpt.plan.tensors import Box, Shape, stepped, whole
from converters.names.families.rows import Sizes, choices

#: Kinds of rows that are `same` otherwise: rows of the vocabulary, which Megatron pads; the Hub's second copy of one.
PADDED, COPY = "padded", "copy"
#: A kind that is `same` otherwise: the weights of a norm that Megatron has less one, as those of its other norms.
CENTRED = "centred"
#: What stands for the rest of a name.
EVERY = "**"

_CHOICE = re.compile(r"\[[^]]+\]")


@dataclass(frozen=True, slots=True)
class RowPiece:
    """Box `hub_box` of hub tensor number `part` is `box` of Megatron's; `dims`: see `ckpt.plan.relation.Link`."""

    part: int
    hub_box: Box
    box: Box
    dims: tuple[int | None, ...]


@dataclass(frozen=True, slots=True)
class Pattern:
    """One row's tensors and boxes, which are the same in every layer and expert."""

    hub_shapes: tuple[Shape, ...]
    shape: Shape
    pieces: tuple[RowPiece, ...]


@dataclass(frozen=True, slots=True)
class MegatronRow:
    """A line of a table, for one choice of its alternatives."""

    megatron: str
    hubs: tuple[str, ...]
    kind: str

    @property
    def is_stacked(self) -> bool:
        return "{e}" in self.megatron and "{e}" not in self.hubs[0]

    def pattern(self, sizes: Sizes, shape: Shape) -> Pattern:
        """The row's boxes, where the first of the Hub's tensors is of this shape, or a stack of such."""
        return KINDS[self.kind](sizes, shape[1:] if self.is_stacked else shape)


@cache
def parse(text: str, prefix: str = "") -> tuple[MegatronRow, ...]:
    """The rows of a table, whose names of Megatron's get a prefix."""
    return tuple(row for line in filter(None, map(str.strip, text.splitlines())) for row in _parallel(line, prefix))


def _parallel(line: str, prefix: str) -> Iterator[MegatronRow]:
    megatron, hub, kind = line.split()
    match = _CHOICE.search(megatron)
    if match is None:
        yield MegatronRow(prefix + megatron, tuple(choices(hub)), kind)
        return
    for choice in match[0][1:-1].split("|"):
        yield from _parallel(line.replace(match[0], choice), prefix)


def stacked(pattern: Pattern, expert: int, num_experts: int) -> Pattern:
    """The pattern where the hub's tensor is a stack of all experts' along a first dim."""
    pieces = []
    for piece in pattern.pieces:
        box = piece.hub_box
        taken = stepped((expert, *box.offsets), (1, *box.sizes), (1, *box.all_steps))
        pieces.append(replace(piece, hub_box=taken, dims=(None, *piece.dims)))
    return Pattern(tuple((num_experts, *shape) for shape in pattern.hub_shapes), pattern.shape, tuple(pieces))


def same(sizes: Sizes, shape: Shape) -> Pattern:
    """One tensor, as it is."""
    return Pattern((shape,), shape, (RowPiece(0, whole(shape), whole(shape), tuple(range(len(shape)))),))


def transposed(sizes: Sizes, shape: Shape) -> Pattern:
    """A matrix that the hub has as [in, out], and its bias."""
    turned = shape[::-1]
    return Pattern((shape,), turned, (RowPiece(0, whole(shape), whole(turned), tuple(range(len(shape)))[::-1]),))


def joined(sizes: Sizes, shape: Shape) -> Pattern:
    """Two tensors, one behind the other: gate and up."""
    rows = shape[0]
    pieces = tuple(_rows_piece(number, (0, rows), (number * rows, rows), shape) for number in range(2))
    return Pattern((shape, shape), (2 * rows, *shape[1:]), pieces)


def interleaved(sizes: Sizes, shape: Shape) -> Pattern:
    """Gate and up in turns along the last dim of one tensor: gate 0, up 0, gate 1, ...; a matrix is [in, out]."""
    last = len(shape) - 1
    half = shape[last] // 2
    order = (1, 0) if last else (0,)
    turned = shape[::-1]
    pieces = []
    for number in range(2):
        taken = stepped((0,) * last + (number,), (*shape[:last], half), (1,) * last + (2,))
        pieces.append(RowPiece(0, taken, Box((number * half,) + (0,) * last, (half, *turned[1:])), order))
    return Pattern((shape,), turned, tuple(pieces))


def exchanged(sizes: Sizes, shape: Shape) -> Pattern:
    """A matrix whose two halves of columns have changed places."""
    rows, half = shape[0], shape[1] // 2
    halves = [Box((0, number * half), (rows, half)) for number in range(2)]
    pieces = tuple(RowPiece(0, halves[number], halves[1 - number], (0, 1)) for number in range(2))
    return Pattern((shape,), shape, pieces)


def qkv(sizes: Sizes, shape: Shape) -> Pattern:
    """Queries, keys and values of the hub, of which `shape` is that of the queries, by query group."""
    pieces = tuple(
        _rows_piece(number, (taken, size), (placed, size), shape)
        for number, taken, size, placed in _rows_by_group(sizes)
    )
    keys = (sizes.dims["groups"] * sizes.dims["d"], *shape[1:])
    return Pattern((shape, keys, keys), (shape[0] + 2 * keys[0], *shape[1:]), pieces)


def one_qkv(sizes: Sizes, shape: Shape) -> Pattern:
    """One tensor of all queries, all keys, all values, by query group; a matrix is [out, in]."""
    head, heads, groups = (sizes.dims[name] for name in ("d", "heads", "groups"))
    first = (0, heads * head, (heads + groups) * head)
    pieces = tuple(
        _rows_piece(0, (first[number] + taken, size), (placed, size), shape)
        for number, taken, size, placed in _rows_by_group(sizes)
    )
    return Pattern((shape,), shape, pieces)


def gated_qkv(sizes: Sizes, shape: Shape) -> Pattern:
    """Queries of the hub, each head with its gate behind it and of `shape` in all, keys and values, by query group.

    Megatron has a group's gates behind its queries.
    """
    head, groups = sizes.dims["d"], sizes.dims["groups"]
    each = sizes.dims["heads"] // groups
    pieces = []
    for group in range(groups):
        start = group * (2 * each + 2) * head
        for number in range(each):
            taken = (group * each + number) * 2 * head
            for half in range(2):
                placed = start + (half * each + number) * head
                pieces.append(_rows_piece(0, (taken + half * head, head), (placed, head), shape))
        for part in (1, 2):
            placed = start + (2 * each + part - 1) * head
            pieces.append(_rows_piece(part, (group * head, head), (placed, head), shape))
    keys = (groups * head, *shape[1:])
    return Pattern((shape, keys, keys), (shape[0] + 2 * keys[0], *shape[1:]), tuple(pieces))


def delta(sizes: Sizes, shape: Shape) -> Pattern:
    """Queries, keys and values of a gated delta net, of `shape`, its gates, betas and alphas: one behind the other."""
    counts = (shape[0], sizes.dims["lv"], sizes.dims["lh"], sizes.dims["lh"])
    starts = [sum(counts[:number]) for number in range(len(counts))]
    pieces = [
        _rows_piece(part, (0, rows), (start, rows), shape)
        for part, (rows, start) in enumerate(zip(counts, starts, strict=True))
    ]
    return Pattern(tuple((rows, *shape[1:]) for rows in counts), (sum(counts), *shape[1:]), tuple(pieces))


def delta_by_head(sizes: Sizes, shape: Shape) -> Pattern:
    """A gated delta net's queries, keys, values and gates by key head, of `shape`, and its betas and alphas likewise.

    Megatron has all queries, then all keys, and so on.
    """
    heads, values = sizes.dims["lg"], sizes.dims["lh"]
    each = values // heads
    keys, inner = sizes.dims["le"], each * sizes.dims["ld"]
    pieces, start = [], 0
    for part, sections in enumerate(((keys, keys, inner, inner), (each, each))):
        for number, rows in enumerate(sections):
            for head in range(heads):
                taken = head * sum(sections) + sum(sections[:number])
                pieces.append(_rows_piece(part, (taken, rows), (start + head * rows, rows), shape))
            start += heads * rows
    return Pattern((shape, (2 * values, *shape[1:])), (start, *shape[1:]), tuple(pieces))


def _rows_by_group(sizes: Sizes) -> Iterator[tuple[int, int, int, int]]:
    """Queries (0), keys (1) and values (2) of each group: their first row among all of the kind, rows, first row."""
    head, groups = sizes.dims["d"], sizes.dims["groups"]
    queries = sizes.dims["heads"] // groups * head
    for group in range(groups):
        start = group * (queries + 2 * head)
        for number, (size, offset) in enumerate(((queries, 0), (head, queries), (head, queries + head))):
            yield number, group * size, size, start + offset


def fused_qkv(sizes: Sizes, shape: Shape) -> Pattern:
    """All queries, all keys, all values along the last dim of one tensor; a matrix is [in, out]."""
    last, head, heads = len(shape) - 1, sizes.dims["d"], sizes.dims["heads"]
    turned = shape[::-1]
    pieces = []
    for number in range(3):
        for group in range(heads):
            taken = Box((0,) * last + ((number * heads + group) * head,), (*shape[:last], head))
            placed = Box(((group * 3 + number) * head,) + (0,) * last, (head, *turned[1:]))
            pieces.append(RowPiece(0, taken, placed, (1, 0) if last else (0,)))
    return Pattern((shape,), turned, tuple(pieces))


def _rows_piece(part: int, taken: tuple[int, int], placed: tuple[int, int], shape: Shape) -> RowPiece:
    """Rows `taken` (offset, size) of a hub tensor are rows `placed` of Megatron's."""
    tail, zeros = shape[1:], (0,) * (len(shape) - 1)
    return RowPiece(
        part,
        Box((taken[0], *zeros), (taken[1], *tail)),
        Box((placed[0], *zeros), (placed[1], *tail)),
        tuple(range(len(shape))),
    )


KINDS: Mapping[str, Callable[[Sizes, Shape], Pattern]] = {
    PADDED: same,
    COPY: same,
    CENTRED: same,
    "same": same,
    "transposed": transposed,
    "joined": joined,
    "interleaved": interleaved,
    "exchanged": exchanged,
    "qkv": qkv,
    "fused_qkv": fused_qkv,
    "one_qkv": one_qkv,
    "gated_qkv": gated_qkv,
    "delta": delta,
    "delta_by_head": delta_by_head,
}
