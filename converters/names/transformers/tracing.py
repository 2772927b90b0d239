"""Tensors without data that record a source box for each of their boxes.

transformers' own conversion code (`core_model_loading.py`, 5.x) runs on them. Stacking, splitting, transposing and
reshaping come out as links. Any other operation is refused by name.

This imports torch, so import it only if a model's names need converting.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from math import prod
from typing import Any

import torch

from ckpt.base.errors import LossError
from ckpt.plan.relation import Link
from ckpt.plan.tensors import Box, Shape, whole

#: Maximum pieces of one tensor; more would be no description.
MAX_PIECES = 1 << 20

_SAFE = frozenset({"__get__", "size", "dim", "ndimension", "numel", "is_contiguous", "is_floating_point", "__len__"})
_SAME = frozenset({"contiguous", "clone", "detach", "requires_grad_"})


@dataclass(frozen=True, slots=True)
class TracedPiece:
    """Box `source_box` of `source`, found at the traced tensor's `box`."""

    source: str
    source_box: Box
    box: Box
    dims: tuple[int | None, ...]

    def narrow(self, dim: int, start: int, stop: int) -> TracedPiece | None:
        """Cut out `start:stop` of dim `dim`, in the whole's coordinates. None if nothing is left."""
        low, size = self.box.offsets[dim], self.box.sizes[dim]
        first, last = max(start, low), min(stop, low + size)
        if first >= last:
            return None
        if first == low and last == low + size:
            return self
        source_box = self.source_box
        for source_dim, target in enumerate(self.dims):
            if target == dim:
                offset = source_box.offsets[source_dim] + first - low
                source_box = _cut_box(source_box, source_dim, offset, last - first)
        return TracedPiece(self.source, source_box, _cut_box(self.box, dim, first, last - first), self.dims)

    def moved(self, dim: int, by: int) -> TracedPiece:
        box = _cut_box(self.box, dim, self.box.offsets[dim] + by, self.box.sizes[dim])
        return TracedPiece(self.source, self.source_box, box, self.dims)

    def without(self, dim: int) -> TracedPiece:
        box = Box(_spliced(self.box.offsets, dim, 1), _spliced(self.box.sizes, dim, 1))
        dims = tuple(None if d is None or d == dim else d - (d > dim) for d in self.dims)
        return TracedPiece(self.source, self.source_box, box, dims)

    def at(self, dim: int, offset: int) -> TracedPiece:
        box = Box(_spliced(self.box.offsets, dim, 0, offset), _spliced(self.box.sizes, dim, 0, 1))
        return TracedPiece(
            self.source, self.source_box, box, tuple(None if d is None else d + (d >= dim) for d in self.dims)
        )


def _spliced(values: Shape, dim: int, count: int, *new: int) -> Shape:
    return (*values[:dim], *new, *values[dim + count :])


def _cut_box(box: Box, dim: int, offset: int, size: int) -> Box:
    return Box(_spliced(box.offsets, dim, 1, offset), _spliced(box.sizes, dim, 1, size))


class Traced(torch.Tensor):  # type: ignore[misc, unused-ignore]
    pieces: tuple[TracedPiece, ...]
    #: Shape; torch's own property goes through `__torch_function__`.
    sizes: Shape

    @staticmethod
    def of(shape: Shape, pieces: Iterable[TracedPiece]) -> Traced:
        traced: Traced = torch.Tensor._make_subclass(Traced, torch.empty(shape, device="meta"))
        traced.pieces, traced.sizes = tuple(pieces), tuple(shape)
        if len(traced.pieces) > MAX_PIECES:
            raise LossError("the name conversion cuts this tensor into too many pieces", fqn=traced.pieces[0].source)
        return traced

    @staticmethod
    def source(name: str, shape: Shape) -> Traced:
        return Traced.of(shape, [TracedPiece(name, whole(shape), whole(shape), tuple(range(len(shape))))])

    def links(self, name: str) -> list[Link]:
        return [Link(p.source, p.source_box, name, p.box, p.dims) for p in self.pieces]

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        name = getattr(func, "__name__", str(func))
        if name in _SAFE:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **(kwargs or {}))
        if name in _SAME:
            return args[0]
        operation = _OPERATIONS.get(name)
        if operation is None:
            sources = [p.source for a in _traced(args) for p in a.pieces]
            raise LossError(
                f"transformers converts this tensor with {name!r}; ckpt supports only rearranged boxes",
                fqn=sources[0] if sources else None,
            )
        return operation(*args, **(kwargs or {}))


def _traced(args: Iterable[Any]) -> list[Traced]:
    found: list[Traced] = []
    for arg in args:
        if isinstance(arg, Traced):
            found.append(arg)
        elif isinstance(arg, (list, tuple)):
            found += _traced(arg)
    return found


def _dim(tensor: Traced, dim: int) -> int:
    return dim if dim >= 0 else dim + len(tensor.sizes)


def _cat(tensors: Sequence[Traced], dim: int = 0) -> Traced:
    dim = _dim(tensors[0], dim)
    first = tensors[0].sizes
    reached, pieces = 0, []
    for tensor in tensors:
        if tensor.sizes[:dim] != first[:dim] or tensor.sizes[dim + 1 :] != first[dim + 1 :]:
            raise _do_not_fit(tensors[0], tensor)
        pieces += [piece.moved(dim, reached) for piece in tensor.pieces]
        reached += tensor.sizes[dim]
    return Traced.of(_spliced(first, dim, 1, reached), pieces)


def _stack(tensors: Sequence[Traced], dim: int = 0) -> Traced:
    shape, pieces = tensors[0].sizes, []
    dim = dim if dim >= 0 else dim + len(shape) + 1
    for number, tensor in enumerate(tensors):
        if tensor.sizes != shape:
            raise _do_not_fit(tensors[0], tensor)
        pieces += [piece.at(dim, number) for piece in tensor.pieces]
    return Traced.of(_spliced(shape, dim, 0, len(tensors)), pieces)


def _do_not_fit(first: Traced, other: Traced) -> LossError:
    return LossError(
        "related tensors have incompatible shapes",
        fqn=other.pieces[0].source if other.pieces else None,
        expected=list(first.sizes),
        found=list(other.sizes),
    )


def _unsqueeze(tensor: Traced, dim: int) -> Traced:
    return _stack([tensor], dim)


def _squeeze(tensor: Traced, dim: int) -> Traced:
    dim = _dim(tensor, dim)
    if tensor.sizes[dim] != 1:
        return tensor
    return Traced.of(_spliced(tensor.sizes, dim, 1), [piece.without(dim) for piece in tensor.pieces])


def _narrow(tensor: Traced, dim: int, start: int, length: int) -> Traced:
    dim = _dim(tensor, dim)
    parts = [part for p in tensor.pieces if (part := p.narrow(dim, start, start + length)) is not None]
    return Traced.of(_spliced(tensor.sizes, dim, 1, length), [part.moved(dim, -start) for part in parts])


def _split(tensor: Traced, split_size_or_sections: int | Sequence[int], dim: int = 0) -> tuple[Traced, ...]:
    dim = _dim(tensor, dim)
    total, sizes = tensor.sizes[dim], split_size_or_sections
    if isinstance(sizes, int):
        sizes = [min(sizes, total - at) for at in range(0, total, sizes)] if total else [0]
    if sum(sizes) != total:
        raise LossError(
            "transformers splits this tensor into parts with another size",
            fqn=tensor.pieces[0].source,
            expected=f"{sum(sizes)} in dim {dim}",
            found=list(tensor.sizes),
        )
    starts = accumulate(sizes, initial=0)
    return tuple(_narrow(tensor, dim, start, size) for start, size in zip(starts, sizes, strict=False))


def _chunk(tensor: Traced, chunks: int, dim: int = 0) -> tuple[Traced, ...]:
    return _split(tensor, max(1, -(-tensor.sizes[_dim(tensor, dim)] // chunks)), dim)


def _unbind(tensor: Traced, dim: int = 0) -> tuple[Traced, ...]:
    return tuple(_squeeze(part, dim) for part in _split(tensor, 1, dim))


def _transpose(tensor: Traced, dim0: int, dim1: int) -> Traced:
    order = list(range(tensor.ndim))
    a, b = _dim(tensor, dim0), _dim(tensor, dim1)
    order[a], order[b] = order[b], order[a]
    return _permute(tensor, order)


def _permute(tensor: Traced, *dims: Any) -> Traced:
    order = [_dim(tensor, d) for d in (dims[0] if isinstance(dims[0], (list, tuple)) else dims)]

    def permuted(sizes: Shape) -> Shape:
        return tuple(sizes[d] for d in order)

    pieces = [
        TracedPiece(
            p.source,
            p.source_box,
            Box(permuted(p.box.offsets), permuted(p.box.sizes)),
            tuple(None if d is None else order.index(d) for d in p.dims),
        )
        for p in tensor.pieces
    ]
    return Traced.of(permuted(tensor.sizes), pieces)


def _reshape(tensor: Traced, *shape: Any) -> Traced:
    wanted = [int(n) for n in (shape[0] if isinstance(shape[0], (list, tuple)) else shape)]
    if -1 in wanted:
        known = prod(n for n in wanted if n != -1)
        wanted[wanted.index(-1)] = tensor.numel() // known if known else 0
    if prod(wanted) != tensor.numel():
        raise LossError(
            "transformers reshapes this tensor to another size",
            fqn=tensor.pieces[0].source if tensor.pieces else None,
            expected=wanted,
            found=list(tensor.sizes),
        )
    if 0 in wanted:
        return Traced.of(tuple(wanted), [])
    dim, rest = 0, tensor
    for old, new in _dim_groups(list(tensor.sizes), wanted):
        if old != new:
            for _ in range(len(old) - 1):
                rest = _merge(rest, dim)
            for inner in range(1, len(new)):
                rest = _divide(rest, dim + inner - 1, prod(new[inner:]))
            if not old:
                for _ in new:
                    rest = _unsqueeze(rest, dim)
            elif not new:
                rest = _squeeze(rest, dim)
        dim += len(new)
    return rest


def _dim_groups(old: list[int], new: list[int]) -> list[tuple[list[int], list[int]]]:
    """Split two shapes into the shortest runs of dims with as many elements."""
    groups, i, j = [], 0, 0
    while i < len(old) or j < len(new):
        a, b = old[i : i + 1], new[j : j + 1]
        i, j = i + 1, j + 1
        while prod(a) != prod(b):
            if prod(a) < prod(b):
                a.append(old[i])
                i += 1
            else:
                b.append(new[j])
                j += 1
        groups.append((a, b))
    return groups


def _merge(tensor: Traced, dim: int) -> Traced:
    rows, row = tensor.sizes[dim], tensor.sizes[dim + 1]
    pieces = []
    for piece in tensor.pieces:
        for index in range(rows) if rows > 1 else [0]:
            part = piece.narrow(dim, index, index + 1)
            if part is not None:
                pieces.append(part.without(dim).moved(dim, index * row))
    return Traced.of(_spliced(tensor.sizes, dim, 2, rows * row), pieces)


def _divide(tensor: Traced, dim: int, row: int) -> Traced:
    """Split dim `dim` into two; the inner one has size `row`."""
    rows = tensor.sizes[dim] // row
    pieces = []
    for piece in tensor.pieces:
        low, size = piece.box.offsets[dim], piece.box.sizes[dim]
        for index in range(low // row, (low + size - 1) // row + 1):
            part = piece.narrow(dim, index * row, (index + 1) * row)
            if part is not None:
                pieces.append(part.at(dim, index).moved(dim + 1, -index * row))
    return Traced.of(_spliced(tensor.sizes, dim, 1, rows, row), pieces)


def _flatten(tensor: Traced, start_dim: int = 0, end_dim: int = -1) -> Traced:
    first, last = _dim(tensor, start_dim), _dim(tensor, end_dim)
    for _ in range(last - first):
        tensor = _merge(tensor, first)
    return tensor


def _index(tensor: Traced, index: Any) -> Traced:
    dim = 0
    for item in index if isinstance(index, tuple) else (index,):
        if item is Ellipsis and dim == 0:
            continue
        if isinstance(item, int):
            start = item if item >= 0 else item + tensor.sizes[dim]
            tensor = _squeeze(_narrow(tensor, dim, start, 1), dim)
        elif isinstance(item, slice) and item.step in (None, 1):
            start, stop, _ = item.indices(tensor.sizes[dim])
            tensor = _narrow(tensor, dim, start, max(0, stop - start))
            dim += 1
        else:
            raise LossError(
                "transformers converts this tensor with an unsupported index (not a box)", fqn=tensor.pieces[0].source
            )
    return tensor


_OPERATIONS: dict[str, Callable[..., Any]] = {
    "cat": _cat,
    "concat": _cat,
    "stack": _stack,
    "split": _split,
    "chunk": _chunk,
    "unbind": _unbind,
    "narrow": _narrow,
    "transpose": _transpose,
    "permute": _permute,
    "squeeze": _squeeze,
    "unsqueeze": _unsqueeze,
    "reshape": _reshape,
    "view": _reshape,
    "flatten": _flatten,
    "__getitem__": _index,
}
