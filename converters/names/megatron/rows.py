"""Parser for tables: the Hub tensors that form a Megatron tensor, as boxes.

    self_attention.linear_qkv.[weight|bias]    self_attn.[q|k|v]_proj.[weight|bias]    qkv
    |                                          |                                       |
    Megatron's name                            the Hub's name, or several              the kind: one of `KINDS`

Brackets with the same words in both names are alternatives. Other brackets in the Hub's name list several tensors that
form one Megatron tensor. `{e}` is an expert. If only Megatron's name has it, the Hub's tensor is a stack of all
experts. `**` is any rest of a name, for a module that is the same on both sides.

megatron-core 0.16.1: for each query group, `linear_qkv` has the query heads, the key head and the value head
(transformer/attention.py, `get_query_key_value_tensors`). A gated MLP's `linear_fc1` has all gate rows, then all up
rows (transformer/mlp.py). A matrix is [out, in], like in torch's Linear.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cache

from ckpt.plan.tensors import Box, Shape, stepped, whole
from converters.names.families.rows import Sizes, choices

#: Kinds like `same`: vocabulary rows, padded by Megatron, and the Hub's second copies.
PADDED, COPY = "padded", "copy"
#: Kind like `same`: a norm's weights, stored less one in Megatron like its other norms.
CENTRED = "centred"
#: A name's rest.
EVERY = "**"

_CHOICE = re.compile(r"\[[^]]+\]")


@dataclass(frozen=True, slots=True)
class RowPiece:
    """Box of Hub tensor `part`, found at `box` of Megatron's. `dims` as in `ckpt.plan.relation.Link`."""

    part: int
    hub_box: Box
    box: Box
    dims: tuple[int | None, ...]


@dataclass(frozen=True, slots=True)
class Pattern:
    """Tensors and boxes of one row, equal in every layer and expert."""

    hub_shapes: tuple[Shape, ...]
    shape: Shape
    pieces: tuple[RowPiece, ...]


@dataclass(frozen=True, slots=True)
class MegatronRow:
    """Table line, for one choice of its alternatives."""

    megatron: str
    hubs: tuple[str, ...]
    kind: str

    @property
    def is_stacked(self) -> bool:
        return "{e}" in self.megatron and "{e}" not in self.hubs[0]

    def pattern(self, sizes: Sizes, shape: Shape) -> Pattern:
        return KINDS[self.kind](sizes, shape[1:] if self.is_stacked else shape)


@cache
def parse(text: str, prefix: str = "") -> tuple[MegatronRow, ...]:
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
    pieces = []
    for piece in pattern.pieces:
        box = piece.hub_box
        taken = stepped((expert, *box.offsets), (1, *box.sizes), (1, *box.all_steps))
        pieces.append(replace(piece, hub_box=taken, dims=(None, *piece.dims)))
    return Pattern(tuple((num_experts, *shape) for shape in pattern.hub_shapes), pattern.shape, tuple(pieces))


def same(sizes: Sizes, shape: Shape) -> Pattern:
    return Pattern((shape,), shape, (RowPiece(0, whole(shape), whole(shape), tuple(range(len(shape)))),))


def transposed(sizes: Sizes, shape: Shape) -> Pattern:
    """Transpose a Hub matrix [in, out]; keep its bias."""
    turned = shape[::-1]
    return Pattern((shape,), turned, (RowPiece(0, whole(shape), whole(turned), tuple(range(len(shape)))[::-1]),))


def joined(sizes: Sizes, shape: Shape) -> Pattern:
    """Join two tensors: gate and up."""
    rows = shape[0]
    pieces = tuple(_rows_piece(number, (0, rows), (number * rows, rows), shape) for number in range(2))
    return Pattern((shape, shape), (2 * rows, *shape[1:]), pieces)


def interleaved(sizes: Sizes, shape: Shape) -> Pattern:
    """Split one tensor with gate and up alternating along the last dim. A matrix is [in, out]."""
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
    """Swap the halves of a matrix's columns."""
    rows, half = shape[0], shape[1] // 2
    halves = [Box((0, number * half), (rows, half)) for number in range(2)]
    pieces = tuple(RowPiece(0, halves[number], halves[1 - number], (0, 1)) for number in range(2))
    return Pattern((shape,), shape, pieces)


def qkv(sizes: Sizes, shape: Shape) -> Pattern:
    """Join queries (with `shape`), keys and values by query group."""
    pieces = tuple(
        _rows_piece(number, (taken, size), (placed, size), shape)
        for number, taken, size, placed in _rows_by_group(sizes)
    )
    keys = (sizes.dims["groups"] * sizes.dims["d"], *shape[1:])
    return Pattern((shape, keys, keys), (shape[0] + 2 * keys[0], *shape[1:]), pieces)


def one_qkv(sizes: Sizes, shape: Shape) -> Pattern:
    """Reorder one tensor with all queries, keys and values, by query group. A matrix is [out, in]."""
    head, heads, groups = (sizes.dims[name] for name in ("d", "heads", "groups"))
    first = (0, heads * head, (heads + groups) * head)
    pieces = tuple(
        _rows_piece(0, (first[number] + taken, size), (placed, size), shape)
        for number, taken, size, placed in _rows_by_group(sizes)
    )
    return Pattern((shape,), shape, pieces)


def gated_qkv(sizes: Sizes, shape: Shape) -> Pattern:
    """Join queries, each head followed by its gate (together `shape`), keys and values.

    Megatron puts a group's gates after its queries.
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
    """Join a gated delta net's queries, keys, values (`shape`), gates, betas and alphas."""
    counts = (shape[0], sizes.dims["lv"], sizes.dims["lh"], sizes.dims["lh"])
    starts = [sum(counts[:number]) for number in range(len(counts))]
    pieces = [
        _rows_piece(part, (0, rows), (start, rows), shape)
        for part, (rows, start) in enumerate(zip(counts, starts, strict=True))
    ]
    return Pattern(tuple((rows, *shape[1:]) for rows in counts), (sum(counts), *shape[1:]), tuple(pieces))


def delta_by_head(sizes: Sizes, shape: Shape) -> Pattern:
    """Join a gated delta net's rows grouped by key head, with `shape`, and its betas and alphas.

    Megatron has all queries, then all keys.
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
    """Yield each group's queries (0), keys (1), values (2): kind, first row in the kind, rows, first row in all."""
    head, groups = sizes.dims["d"], sizes.dims["groups"]
    queries = sizes.dims["heads"] // groups * head
    for group in range(groups):
        start = group * (queries + 2 * head)
        for number, (size, offset) in enumerate(((queries, 0), (head, queries), (head, queries + head))):
            yield number, group * size, size, start + offset


def fused_qkv(sizes: Sizes, shape: Shape) -> Pattern:
    """Transpose all queries, keys and values along one tensor's last dim. A matrix is [in, out]."""
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
    """Place a Hub tensor's rows `taken` (offset, size) at Megatron's rows `placed`."""
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
