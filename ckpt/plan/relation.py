"""Invertible relations between two namespaces for the same tensors.

A link says that a box in one tensor equals a box in another, dim by dim. Renaming, stacking, splitting, interleaving
and transposing all have this form.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, NamedTuple

from ckpt.base.errors import CorruptError, LossError
from ckpt.plan.checkpoint import MODEL_ROLES, WEIGHT, Checkpoint, Key, ParamGroup, TrainingState
from ckpt.plan.dtypes import DType
from ckpt.plan.tensors import (
    ZEROS,
    Box,
    Extent,
    FlatRange,
    Fragment,
    Run,
    Shape,
    Source,
    Tensor,
    TiedCopy,
    Whole,
    as_boxes,
    flat_range,
    run_fragments,
    runs_of,
    stepped,
    whole,
)
from ckpt.plan.tiling import TilingFault, check_tiling


@dataclass(frozen=True, slots=True)
class Link:
    """Box `a_box` in tensor `a` equals box `b_box` in tensor `b`.

    `dims[d]` is the dim of `b` for dim `d` of `a`, or None for a dim with size 1 missing in `b`. Dims of `b` without a
    counterpart have size 1 in `b_box`.
    """

    a: str
    a_box: Box
    b: str
    b_box: Box
    dims: tuple[int | None, ...]

    @classmethod
    def rename(cls, a: str, b: str, shape: Shape) -> Link:
        return cls(a, whole(shape), b, whole(shape), tuple(range(len(shape))))

    def is_renaming(self, a_shape: Shape, b_shape: Shape) -> bool:
        is_same = a_shape == b_shape and self.dims == tuple(range(len(a_shape)))
        return is_same and self.a_box.is_whole(a_shape) and self.b_box.is_whole(b_shape)

    def inverse(self) -> Link:
        back: list[int | None] = [None] * len(self.b_box.sizes)
        for dim, target in enumerate(self.dims):
            if target is not None:
                back[target] = dim
        return Link(self.b, self.b_box, self.a, self.a_box, tuple(back))

    @property
    def is_one_to_one(self) -> bool:
        """True if each dim has a counterpart of the same size, or has size 1."""
        sizes, left = self.a_box.sizes, list(self.b_box.sizes)
        if len(sizes) != len(self.dims):
            return False
        for size, target in zip(sizes, self.dims, strict=True):
            if target is None:
                if size != 1:
                    return False
            elif 0 <= target < len(left) and left[target] == size:
                left[target] = -1  # taken
            else:
                return False
        return all(size in (-1, 1) for size in left)

    @property
    def keeps_order(self) -> bool:
        """True if both boxes have the same row-major order."""
        kept = [d for d in self.dims if d is not None]
        return kept == sorted(kept)


@dataclass(frozen=True)
class Relation:
    """Links between all tensors in two namespaces, with the shapes on each side.

    `a_padding` holds boxes in `a` without a counterpart in `b`: rows that make a vocabulary divisible. They are left
    out on the way to `b`, and zero on the way back. `a_copies` maps tensors in `a` to others in `a` with the same
    content; `b` has only the latter. The `b_` fields are the same for `b`.

    Example:
        relation = Relation.renaming({"old.weight": "new.weight"}, {"old.weight": (4, 8)})
        renamed = translate(checkpoint, relation, "hub")
    """

    links: tuple[Link, ...]
    a_shapes: Mapping[str, Shape]
    b_shapes: Mapping[str, Shape]
    a_padding: Mapping[str, tuple[Box, ...]] = field(default_factory=dict)
    b_padding: Mapping[str, tuple[Box, ...]] = field(default_factory=dict)
    a_copies: Mapping[str, str] = field(default_factory=dict)
    b_copies: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def renaming(cls, names: Mapping[str, str], shapes: Mapping[str, Shape]) -> Relation:
        """Return a relation that renames tensors from old to new."""
        links = tuple(Link.rename(name, new, shapes[name]) for name, new in names.items())
        return cls(links, {link.a: shapes[link.a] for link in links}, {link.b: shapes[link.a] for link in links})

    def inverse(self) -> Relation:
        return Relation(
            tuple(link.inverse() for link in self.links),
            self.b_shapes,
            self.a_shapes,
            self.b_padding,
            self.a_padding,
            self.b_copies,
            self.a_copies,
        )

    def check(self) -> Relation:
        """Raise LossError unless every element has exactly one place on each side."""
        assert self._is_proved
        return self

    @cached_property
    def _is_proved(self) -> bool:
        for link in self.links:
            if not link.is_one_to_one:
                raise LossError(
                    "the name mapping links boxes of different sizes",
                    fqn=link.a,
                    found=f"{link.a_box} is {link.b_box} of {link.b!r}",
                )
        a_boxes = _boxes_by_name((link.a, link.a_box) for link in self.links)
        b_boxes = _boxes_by_name((link.b, link.b_box) for link in self.links)
        _check_side(a_boxes, self.a_shapes, self.a_padding, self.a_copies)
        _check_side(b_boxes, self.b_shapes, self.b_padding, self.b_copies)
        return True


def _boxes_by_name(placed: Iterable[tuple[str, Box]]) -> dict[str, list[Box]]:
    boxes: dict[str, list[Box]] = {}
    for name, box in placed:
        boxes.setdefault(name, []).append(box)
    return boxes


def _check_side(
    placed: Mapping[str, list[Box]],
    shapes: Mapping[str, Shape],
    padding: Mapping[str, tuple[Box, ...]],
    copies: Mapping[str, str],
) -> None:
    """Prove that links and padding tile every tensor, and copies have linked owners."""
    for name in [*placed, *padding, *copies, *copies.values()]:
        if name not in shapes:
            raise LossError("the name mapping names a missing tensor", fqn=name)
    for name, shape in shapes.items():
        if name in copies and name not in placed and copies[name] not in copies and shapes[copies[name]] == shape:
            continue
        boxes = [*placed.get(name, ()), *padding.get(name, ())]
        fault = check_tiling(boxes, shape)
        if not boxes:  # an empty tensor is tiled even without boxes
            fault = TilingFault("hole", whole(shape))
        if fault is not None:
            raise LossError(
                "the name mapping does not place this tensor exactly once",
                fqn=name,
                found=f"{fault.kind} at {fault.region} of shape {list(shape)}",
            )


#: The two numbers are both boxes' first elements, if both are flat with the same row-major order.
_LinkedPart = tuple[Link, Shape, Source, tuple[int, int] | None]


def _flat_starts(link: Link, a_shape: Shape, b_shape: Shape) -> tuple[int, int] | None:
    a, b = flat_range(link.a_box, a_shape), flat_range(link.b_box, b_shape)
    return (a.start, b.start) if a and b and link.keeps_order else None


class _Linked(NamedTuple):
    """A tensor joined from linked boxes in other tensors, with zeros in the boxes `zeros`.

    `starts` lists each part's start and number, or is None if a part or the padding is not flat.
    """

    parts: tuple[_LinkedPart, ...]
    zeros: tuple[Box, ...]
    dtype: DType
    starts: tuple[tuple[int, int], ...] | None

    def fragments(self, shape: Shape) -> Iterator[Fragment]:
        for link, a_shape, source, flat in self.parts:
            if flat is not None and hasattr(source, "runs") and not isinstance(source, Whole | _Linked):
                first, move = flat[0], flat[1] - flat[0]
                found = runs_of(source, a_shape, first, first + link.a_box.numel)
                if found is not None:
                    yield from run_fragments((a + move, b + move, extent, at, rank) for a, b, extent, at, rank in found)
                    continue
            for fragment in source.fragments(a_shape):
                if isinstance(fragment.region, FlatRange) and flat is not None:
                    yield from _shift(fragment, flat, link.a_box.numel)
                else:
                    yield from _carry(fragment, a_shape, link)
        for box in self.zeros:
            yield Fragment(box, Extent.contiguous(ZEROS, 0, self.dtype, box.sizes))

    def runs(self, shape: Shape, start: int, stop: int) -> Sequence[Run] | None:
        if self.starts is None:
            return None
        found: list[Run] = []
        for at in range(max(0, bisect_right(self.starts, (start, len(self.parts))) - 1), len(self.starts)):
            begin, number = self.starts[at]
            if begin >= stop:
                break
            link, a_shape, source, flat = self.parts[number]
            assert flat is not None
            move = begin - flat[0]
            first, last = max(start, begin) - move, min(stop, begin + link.a_box.numel) - move
            inner = runs_of(source, a_shape, first, last) if first < last else ()
            if inner is None:
                return None
            found += [(a + move, b + move, extent, at, rank) for a, b, extent, at, rank in inner] if move else inner
        return found


def _shift(fragment: Fragment, starts: tuple[int, int], numel: int) -> Iterator[Fragment]:
    region = fragment.region
    assert isinstance(region, FlatRange)
    start, stop = max(region.start, starts[0]), min(region.stop, starts[0] + numel)
    if start < stop:
        extent = fragment.extent.flat(start - region.start, stop - region.start)
        move = starts[1] - starts[0]
        yield Fragment(FlatRange(start + move, stop + move), extent, fragment.rank)


def _carry(fragment: Fragment, a_shape: Shape, link: Link) -> Iterator[Fragment]:
    for piece in as_boxes(fragment, a_shape):
        box = piece.region
        assert isinstance(box, Box)
        common = box.intersect(link.a_box)
        if common is None:
            continue
        part, linked = piece.extent.narrow(common.relative_to(box)), common.relative_to(link.a_box)
        num_dims, linked_steps = len(link.b_box.sizes), linked.all_steps
        offsets, sizes, steps, strides = [0] * num_dims, [1] * num_dims, [1] * num_dims, [0] * num_dims
        for dim, target in enumerate(link.dims):
            if target is not None:
                offsets[target] = linked.offsets[dim]
                sizes[target] = common.sizes[dim]
                strides[target] = part.strides[dim]
                steps[target] = linked_steps[dim]
        region = link.b_box.inside(stepped(tuple(offsets), tuple(sizes), tuple(steps)))
        placed = Extent(part.path, part.offset, part.dtype, tuple(sizes), tuple(strides))
        yield Fragment(region, placed, fragment.rank)


def translate(checkpoint: Checkpoint, relation: Relation, namespace: str) -> Checkpoint:
    """Return `checkpoint` under the names of the relation's `b` side.

    Translate every role. Raise LossError if the relation has no place for a tensor.
    """
    relation.check()
    into: dict[str, list[Link]] = {name: [] for name in relation.b_shapes}
    names: dict[str, dict[str, None]] = {name: {} for name in relation.a_shapes}
    for link in relation.links:
        into[link.b].append(link)
        names[link.a][link.b] = None
    onto = {name: list(new) for name, new in names.items()}

    roles: dict[str, list[str]] = {}
    for fqn, role in checkpoint.tensors:
        roles.setdefault(fqn, []).append(role)
    for fqn in roles:
        if fqn not in onto:
            raise LossError("the name mapping has no place for this tensor", fqn=fqn)
    checkpoint = _with_copies_as_replicas(checkpoint, relation.a_copies, roles)

    tensors: dict[Key, Tensor] = {}
    for name, links in into.items():
        joint = _Joint.of(name, links, relation)
        for role in dict.fromkeys(role for link in links for role in roles.get(link.a, (WEIGHT,))):
            tensors[name, role] = joint.tensor(checkpoint, role, relation.a_shapes)
    for name, owner in relation.b_copies.items():
        for role in [role for role in MODEL_ROLES if (owner, role) in tensors]:
            tensors[name, role] = tensors[owner, role].renamed(name)
    return replace(
        checkpoint,
        tensors=tensors,
        namespace=namespace,
        ties=_translate_ties(checkpoint.ties, onto),
        state=_translate_state(checkpoint.state, onto),
    )


def _with_copies_as_replicas(
    checkpoint: Checkpoint, copies: Mapping[str, str], roles: Mapping[str, list[str]]
) -> Checkpoint:
    """Turn each copy under another name into a replica, so that it is compared."""
    if not copies:
        return checkpoint
    tensors = dict(checkpoint.tensors)
    for copy, owner in copies.items():
        for role in roles.get(copy, ()):
            one, other = tensors.pop((copy, role)), tensors.get((owner, role))
            if other is None or (one.dtype, one.shape) != (other.dtype, other.shape):
                raise LossError(
                    "a shared tensor is stored twice, in different forms",
                    fqn=copy,
                    expected=f"the {role} of {owner!r} again" + (f", {other.dtype}" if other else ""),
                    found="no such tensor" if other is None else f"{one.dtype} of shape {list(one.shape)}",
                )
            again = map(TiedCopy, (one.source, *one.replicas))
            tensors[owner, role] = other._replace(replicas=(*other.replicas, *again))
    return replace(checkpoint, tensors=tensors)


class _Joint(NamedTuple):
    """Recipe for a tensor, computed once and used for every role. `starts` is like in `_Linked`."""

    name: str
    shape: Shape
    links: list[Link]
    padding: tuple[Box, ...]
    is_renaming: bool
    flat: tuple[tuple[int, int] | None, ...] = ()
    starts: tuple[tuple[int, int], ...] | None = None

    @classmethod
    def of(cls, name: str, links: list[Link], relation: Relation) -> _Joint:
        shape, padding = relation.b_shapes[name], relation.b_padding.get(name, ())
        if not padding and len(links) == 1 and links[0].is_renaming(relation.a_shapes[links[0].a], shape):
            return cls(name, shape, links, padding, True)
        flat = tuple(_flat_starts(link, relation.a_shapes[link.a], shape) for link in links)
        starts = None
        if not padding and None not in flat:
            starts = tuple(sorted((pair[1], n) for n, pair in enumerate(flat) if pair and links[n].a_box.numel))
        return cls(name, shape, links, padding, False, flat, starts)

    def tensor(self, checkpoint: Checkpoint, role: str, a_shapes: Mapping[str, Shape]) -> Tensor:
        """Raise LossError or CorruptError if the parts do not fit together."""
        name, parts = self.name, []
        for link in self.links:
            tensor = checkpoint.tensors.get((link.a, role))
            if tensor is None:
                raise LossError(
                    f"{name!r} is made from several tensors, and one of them has no {role!r}",
                    fqn=link.a,
                    expected=role,
                )
            if not self.is_renaming and tensor.shape != a_shapes[link.a]:
                raise LossError(
                    f"{name!r} is made from parts of tensors, and the {role!r} of one part has a different shape",
                    fqn=link.a,
                    expected=f"shape {list(a_shapes[link.a])}",
                    found=f"shape {list(tensor.shape)}",
                )
            parts.append(tensor)
        first = parts[0]
        if self.is_renaming:
            return first.renamed(name)
        if len(parts) > 1 and len(dtypes := {tensor.dtype for tensor in parts}) > 1:
            raise CorruptError(
                f"{name!r} is made from tensors of several dtypes",
                fqn=first.fqn,
                found=", ".join(sorted(map(str, dtypes))),
            )

        shapes = [tensor.shape for tensor in parts]

        def linked(sources: Iterable[Source]) -> Source:
            chosen = tuple(zip(self.links, shapes, sources, self.flat, strict=True))
            return _Linked(chosen, self.padding, first.dtype, self.starts)

        most = max(map(len, [tensor.replicas for tensor in parts]))
        replicas = [  # parts with fewer replicas use the tensor itself
            linked([(*one.replicas[number : number + 1], one.source)[0] for one in parts]) for number in range(most)
        ]
        source = linked([tensor.source for tensor in parts])
        return Tensor(name, role, first.dtype, self.shape, source, first.native, tuple(replicas))


def _translate_ties(ties: Mapping[str, str], onto: Mapping[str, list[str]]) -> dict[str, str]:
    """Rename aliases and owners pairwise. A name without links stays."""
    named = ((onto.get(alias, [alias]), onto.get(owner, [owner])) for alias, owner in ties.items())
    return {alias: owner for pair in named for alias, owner in zip(*pair, strict=False)}


def _translate_state(state: TrainingState, onto: Mapping[str, list[str]]) -> TrainingState:
    def names(fqns: Iterable[str]) -> tuple[str, ...]:
        return tuple(dict.fromkeys(new for fqn in fqns for new in onto.get(fqn, [fqn])))

    groups = tuple(ParamGroup(names(group.fqns), group.options) for group in state.param_groups)
    scalars: dict[str, dict[str, Any]] = {}
    for name, values in state.scalars.items():
        translated = scalars.setdefault(name, {})
        for fqn, value in values.items():
            for new in onto.get(fqn, [fqn]):
                if translated.setdefault(new, value) != value:
                    raise LossError(
                        f"{new!r} is made from parameters that differ in {name!r}",
                        fqn=fqn,
                        expected=translated[new],
                        found=value,
                    )
    return replace(state, param_groups=groups, scalars=scalars)
