"""`ckpt/plan/relation.py`: relations between namespaces against numpy."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from math import prod
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from numpy.typing import NDArray

from ckpt.errors import CkptError, CorruptError, LossError
from ckpt.plan.checkpoint import Checkpoint, ParamGroup, TrainingState
from ckpt.plan.dtypes import BFLOAT16, FLOAT32
from ckpt.plan.planner import check_source
from ckpt.plan.relation import Link, Relation, translate
from ckpt.plan.tensors import ZEROS, Box, Extent, FlatRange, Fragment, Shape, Tensor, Whole, stepped, whole
from ckpt.views.lazy import LazyTensor
from tests.support.strategies import Store, assembled, stored, tensor_of

Arrays = dict[str, NDArray]
Case = tuple[Relation, Arrays, Arrays]


def relation(links: Sequence[Link], a: Arrays, b: Arrays) -> Relation:
    shapes = [{name: array.shape for name, array in side.items()} for side in (a, b)]
    return Relation(tuple(links), *shapes)


def numbered(shapes: dict[str, Shape]) -> Arrays:
    return {
        name: 1000 * number + np.arange(prod(shape)).reshape(shape)
        for number, (name, shape) in enumerate(shapes.items())
    }


def slab(shape: Shape, dim: int, start: int, size: int) -> Box:
    offsets, sizes = [0] * len(shape), list(shape)
    offsets[dim], sizes[dim] = start, size
    return Box(tuple(offsets), tuple(sizes))


def renamed(shape: Shape) -> st.SearchStrategy[Case]:
    a = numbered({"x": shape})
    return st.just((relation([Link.rename("x", "y", shape)], a, {"y": a["x"]}), a, {"y": a["x"]}))


@st.composite
def concatenated(draw: st.DrawFn, shape: Shape) -> Case:
    """Concatenate q, k and v with different sizes."""
    assume(shape)
    dim = draw(st.integers(0, len(shape) - 1))
    sizes = draw(st.lists(st.integers(1, 4), min_size=1, max_size=4))
    a = numbered({f"x{i}": (*shape[:dim], size, *shape[dim + 1 :]) for i, size in enumerate(sizes)})
    b = {"y": np.concatenate(list(a.values()), axis=dim)}
    links, start = [], 0
    for name, array in a.items():
        box = slab(b["y"].shape, dim, start, array.shape[dim])
        links.append(Link(name, whole(array.shape), "y", box, tuple(range(len(shape)))))
        start += array.shape[dim]
    return relation(links, a, b), a, b


@st.composite
def stacked(draw: st.DrawFn, shape: Shape) -> Case:
    """Stack experts into one tensor with an extra dim at any position."""
    count, dim = draw(st.integers(1, 4)), draw(st.integers(0, len(shape)))
    a = numbered({f"x{i}": shape for i in range(count)})
    b = {"y": np.stack(list(a.values()), axis=dim)}
    dims = tuple(d if d < dim else d + 1 for d in range(len(shape)))
    links = [Link(name, whole(shape), "y", slab(b["y"].shape, dim, i, 1), dims) for i, name in enumerate(a)]
    return relation(links, a, b), a, b


@st.composite
def transposed(draw: st.DrawFn, shape: Shape) -> Case:
    order = draw(st.permutations(range(len(shape))))
    a = numbered({"x": shape})
    b = {"y": a["x"].transpose(order)}
    dims = tuple(order.index(dim) for dim in range(len(shape)))
    return relation([Link("x", whole(shape), "y", whole(b["y"].shape), dims)], a, b), a, b


@st.composite
def interleaved(draw: st.DrawFn, shape: Shape) -> Case:
    """Interleave gate and up rows like some fused projections, and stack them transposed."""
    assume(shape)
    a = numbered({"gate": shape, "up": shape})
    rows = np.stack(list(a.values()), axis=1).reshape(2 * shape[0], *shape[1:])
    order = draw(st.permutations(range(len(shape))))
    b = {"y": rows.transpose(order)}
    dims = tuple(order.index(dim) for dim in range(len(shape)))
    at = order.index(0)
    links = [
        Link(name, slab(shape, 0, row, 1), "y", slab(b["y"].shape, at, 2 * row + number, 1), dims)
        for number, name in enumerate(a)
        for row in range(shape[0])
    ]
    return relation(links, a, b), a, b


@st.composite
def combed(draw: st.DrawFn, shape: Shape) -> Case:
    """Interleave rows declared with a step: one link per tensor; the last tensor may be shorter."""
    assume(shape)
    count = draw(st.integers(1, 3))
    sizes = [shape[0] + (number < draw(st.integers(0, count))) for number in range(count)]
    sizes.sort(reverse=True)
    a = numbered({f"x{number}": (size, *shape[1:]) for number, size in enumerate(sizes)})
    rows = np.zeros((sum(sizes), *shape[1:]))
    for number, array in enumerate(a.values()):
        rows[number::count] = array
    order = draw(st.permutations(range(len(shape))))
    b = {"y": rows.transpose(order)}
    dims = tuple(order.index(dim) for dim in range(len(shape)))
    at = order.index(0)
    links = []
    for number, (name, array) in enumerate(a.items()):
        into = slab(b["y"].shape, at, number, len(array))
        steps = tuple(count if dim == at else 1 for dim in range(len(shape)))
        links.append(Link(name, whole(array.shape), "y", stepped(into.offsets, into.sizes, steps), dims))
    return relation(links, a, b), a, b


CASES: dict[str, Callable[[Shape], st.SearchStrategy[Case]]] = {
    "renamed": renamed,
    "concatenated": concatenated,
    "stacked": stacked,
    "transposed": transposed,
    "interleaved": interleaved,
    "combed": combed,
}
SHAPES = st.lists(st.integers(1, 4), max_size=3).map(tuple)


def checkpoint_of(tensors: Sequence[Tensor], **more: Any) -> Checkpoint:
    return Checkpoint("run", "test", {(t.fqn, t.role): t for t in tensors}, (), **more)


def zeros(fqn: str, shape: Shape, role: str = "weight", dtype: Any = FLOAT32) -> Tensor:
    return Tensor(fqn, role, dtype, shape, Whole(Extent.contiguous(f"{fqn}.bin", 0, dtype, shape)))


def fused(*names: str, shape: Shape = (2, 3)) -> Relation:
    """Return a relation that stacks `names`, all with one shape, as `y`."""
    whole_shape = (len(names), *shape)
    dims = tuple(range(1, len(shape) + 1))
    links = [Link(name, whole(shape), "y", slab(whole_shape, 0, i, 1), dims) for i, name in enumerate(names)]
    return Relation(tuple(links), dict.fromkeys(names, shape), {"y": whole_shape})


class TestRelations:
    @pytest.mark.parametrize("kind", CASES)
    @given(st.data())
    def test_it_does_what_numpy_does_and_back(self, kind: str, data: st.DataObject) -> None:
        """Forwards the relation equals numpy's operation; backwards it restores the source, through any pieces."""
        mapped, a, b = data.draw(CASES[kind](data.draw(SHAPES)))
        if data.draw(st.booleans()):  # declared the other way round: splits are inverted stacks
            mapped, a, b = mapped.inverse(), b, a
        store: Store = {}
        source = checkpoint_of(
            [tensor_of(name, array, data.draw(stored(array, name, store))) for name, array in a.items()]
        )
        there = translate(source, mapped, "there")
        assert there.namespace == "there"
        assert {fqn for fqn, _ in there.tensors} == set(b)
        for (fqn, _), tensor in there.tensors.items():
            check_source(tensor)
            assert tensor.shape == b[fqn].shape
            assert (assembled(tensor.fragments(), tensor.shape, store) == b[fqn]).all()
        back = translate(there, mapped.inverse(), "here")
        for (fqn, _), tensor in back.tensors.items():
            check_source(tensor)
            assert (assembled(tensor.fragments(), tensor.shape, store) == a[fqn]).all()

    @pytest.mark.parametrize("kind", CASES)
    @given(st.data())
    def test_the_inverse_of_the_inverse_is_the_relation(self, kind: str, data: st.DataObject) -> None:
        mapped, _, _ = data.draw(CASES[kind](data.draw(SHAPES)))
        assert mapped.inverse().inverse() == mapped
        mapped.check()
        mapped.inverse().check()

    def test_flat_pieces_stay_flat_where_the_order_is_kept(self) -> None:
        """This keeps a thousand ranks cheap: a rank's part of an expert is one flat range of the stack."""
        flat = Fragment(FlatRange(0, 6), Extent.contiguous("f", 0, FLOAT32, (6,)))
        parts = [tensor_of(name, np.zeros((2, 3)), [flat]) for name in ("x0", "x1")]
        there = translate(checkpoint_of(parts), fused("x0", "x1"), "there")
        regions = [fragment.region for fragment in there.tensors["y", "weight"].fragments()]
        assert regions == [FlatRange(0, 6), FlatRange(6, 12)]

    def test_padding_is_zero_one_way_and_left_out_the_other(self) -> None:
        """Rows 3 and 4 of `y` are not in `x`, in any role."""
        rows = Box((0, 0), (3, 2))
        mapped = Relation(
            (Link("x", rows, "y", rows, (0, 1)),), {"x": (3, 2)}, {"y": (5, 2)}, {}, {"y": (Box((3, 0), (2, 2)),)}
        )
        source = checkpoint_of([zeros("x", (3, 2)), zeros("x", (3, 2), "exp_avg", BFLOAT16)])
        there = translate(source, mapped, "there")
        for (_, role), tensor in there.tensors.items():
            check_source(tensor)
            stored, padding = tensor.fragments()
            assert (stored.region, padding.region) == (Box((0, 0), (3, 2)), Box((3, 0), (2, 2)))
            assert (padding.extent.path, padding.extent.dtype) == (ZEROS, source.tensors["x", role].dtype)
        assert not any(LazyTensor(there.tensors["y", "weight"], {})[3:].flatten())
        back = translate(there, mapped.inverse(), "here")
        for key, tensor in back.tensors.items():
            check_source(tensor)
            assert list(tensor.fragments()) == [f._replace(region=rows) for f in source.tensors[key].fragments()]
        with pytest.raises(LossError, match="exactly once"):
            replace(mapped, b_padding={"y": (Box((3, 0), (1, 2)),)}).check()
        with pytest.raises(LossError, match="exactly once"):
            replace(mapped, b_padding={"y": (Box((2, 0), (3, 2)),)}).check()

    def test_copies_are_made_one_way_and_compared_the_other(self) -> None:
        """`again` is copied from `y`; on the way back it is a replica of `y`."""
        mapped = Relation(
            (Link.rename("x", "y", (2,)),), {"x": (2,)}, {"y": (2,), "again": (2,)}, b_copies={"again": "y"}
        )
        there = translate(checkpoint_of([zeros("x", (2,)), zeros("x", (2,), "exp_avg")]), mapped, "there")
        assert set(there.tensors) == {("y", "weight"), ("y", "exp_avg"), ("again", "weight")}
        back = translate(there, mapped.inverse(), "here")
        assert set(back.tensors) == {("x", "weight"), ("x", "exp_avg")}
        assert len(back.tensors["x", "weight"].replicas) == 1
        other = checkpoint_of([zeros("y", (2,)), zeros("again", (2,), dtype=BFLOAT16)])
        with pytest.raises(LossError, match="stored twice"):
            translate(other, mapped.inverse(), "here")
        with pytest.raises(LossError, match="exactly once"):
            replace(mapped, b_shapes={"y": (2,), "again": (3,)}).check()

    def test_a_dim_that_is_dropped(self) -> None:
        link = Link("x", Box((0, 0, 0), (2, 1, 3)), "y", Box((0, 0), (2, 3)), (0, None, 1))
        assert link.inverse() == Link("y", Box((0, 0), (2, 3)), "x", Box((0, 0, 0), (2, 1, 3)), (0, 2))
        assert link.inverse().inverse() == link
        assert link.is_one_to_one and link.keeps_order


class TestRefusals:
    def refused(self, mapped: Relation, fqn: str, kind: str) -> None:
        with pytest.raises(LossError) as caught:
            mapped.check()
        assert caught.value.fqn == fqn and kind in str(caught.value.found)
        assert caught.value.exit_code == 6

    @pytest.mark.parametrize("kind", [kind for kind in CASES if kind != "renamed"])
    @given(st.data())
    def test_any_link_that_is_missing_is_a_loss(self, kind: str, data: st.DataObject) -> None:
        mapped, _, _ = data.draw(CASES[kind](data.draw(SHAPES)))
        links = list(mapped.links)
        links.pop(data.draw(st.integers(0, len(links) - 1)))
        for one in (replace(mapped, links=tuple(links)), replace(mapped, links=tuple(links)).inverse()):
            with pytest.raises(LossError):
                one.check()

    def test_a_hole_on_either_side(self) -> None:
        half = Link("x", Box((0,), (2,)), "y", Box((0,), (2,)), (0,))
        self.refused(Relation((half,), {"x": (4,)}, {"y": (2,)}), "x", "hole at elements 2:4")
        self.refused(Relation((half,), {"x": (2,)}, {"y": (4,)}), "y", "hole at elements 2:4")

    def test_a_place_that_is_taken_twice(self) -> None:
        links = tuple(Link(name, whole((2,)), "y", whole((2,)), (0,)) for name in ("x0", "x1"))
        self.refused(Relation(links, {"x0": (2,), "x1": (2,)}, {"y": (2,)}), "y", "overlap")

    def test_a_tensor_without_elements_needs_a_place_too(self) -> None:
        self.refused(Relation((), {"x": (0, 3)}, {}), "x", "hole")
        self.refused(Relation((), {}, {"y": (0, 3)}), "y", "hole")
        empty = relation([Link.rename("x", "y", (0, 3))], {"x": np.zeros((0, 3))}, {"y": np.zeros((0, 3))})
        there = translate(checkpoint_of([zeros("x", (0, 3))]), empty, "there")
        assert there.tensors["y", "weight"].shape == (0, 3)

    @pytest.mark.parametrize(
        "link",
        [
            Link("x", whole((2, 3)), "y", whole((3, 2)), (0, 1)),  # a reshape
            Link("x", whole((2, 3)), "y", whole((6,)), (0, None)),  # a dim with elements dropped
            Link("x", whole((2, 3)), "y", whole((2, 3)), (0, 0)),  # two dims into one
            Link("x", whole((2, 3)), "y", whole((2, 3)), (0,)),  # a dim forgotten
            Link("x", whole((6,)), "y", whole((6,)), (1,)),  # a dim out of range
        ],
    )
    def test_boxes_of_different_sizes_are_no_link(self, link: Link) -> None:
        mapped = Relation((link,), {"x": link.a_box.sizes}, {"y": link.b_box.sizes})
        with pytest.raises(LossError, match="boxes of different sizes"):
            mapped.check()

    def test_a_tensor_that_the_relation_does_not_know(self) -> None:
        with pytest.raises(LossError) as caught:
            translate(checkpoint_of([zeros("x0", (2, 3)), zeros("other", (1,))]), fused("x0"), "there")
        assert caught.value.fqn == "other"

    def test_a_part_without_the_role_that_the_others_have(self) -> None:
        source = checkpoint_of([zeros("x0", (2, 3)), zeros("x1", (2, 3)), zeros("x0", (2, 3), "exp_avg")])
        with pytest.raises(LossError) as caught:
            translate(source, fused("x0", "x1"), "there")
        assert (caught.value.fqn, caught.value.expected) == ("x1", "exp_avg")
        source = checkpoint_of([zeros("x0", (2, 3)), zeros("x1", (2, 3)), zeros("x1", (2, 3), "exp_avg")])
        with pytest.raises(LossError) as caught:
            translate(source, fused("x0", "x1"), "there")
        assert (caught.value.fqn, caught.value.expected) == ("x0", "exp_avg")

    def test_a_state_with_a_shape_of_its_own_cannot_be_stacked_but_renamed(self) -> None:
        """Adafactor's row and column statistics differ in shape from their parameter."""
        source = checkpoint_of([zeros("x", (2, 3)), zeros("x", (2,), "exp_avg_sq_row")])
        with pytest.raises(LossError, match="a different shape") as caught:
            translate(source, fused("x"), "there")
        assert caught.value.fqn == "x"
        there = translate(source, Relation((Link.rename("x", "y", (2, 3)),), {"x": (2, 3)}, {"y": (2, 3)}), "there")
        assert there.tensors["y", "exp_avg_sq_row"].shape == (2,)

    def test_parts_of_different_dtypes(self) -> None:
        source = checkpoint_of([zeros("x0", (2, 3)), zeros("x1", (2, 3), dtype=BFLOAT16)])
        with pytest.raises(CorruptError, match="several dtypes") as caught:
            translate(source, fused("x0", "x1"), "there")
        assert caught.value.found == "bfloat16, float32"


class TestEverythingElseIsCarried:
    def test_every_role(self) -> None:
        roles = ("weight", "master", "exp_avg", "a state of the user's own")
        source = checkpoint_of([zeros(name, (2, 3), role) for name in ("x0", "x1") for role in roles])
        there = translate(source, fused("x0", "x1"), "there")
        assert set(there.tensors) == {("y", role) for role in roles}
        native = zeros("x0", (2, 3), "master")._replace(native=BFLOAT16)
        assert translate(checkpoint_of([native]), fused("x0"), "there").tensors["y", "master"].native == BFLOAT16

    def test_replicas(self) -> None:
        """A part held by only one rank completes every other replica."""
        again = Whole(Extent.contiguous("again.bin", 0, FLOAT32, (2, 3)), 1)
        parts = [zeros("x0", (2, 3))._replace(replicas=(again,)), zeros("x1", (2, 3))]
        (replica,) = translate(checkpoint_of(parts), fused("x0", "x1"), "there").tensors["y", "weight"].replicas
        assert [fragment.extent.path for fragment in replica.fragments((2, 2, 3))] == ["again.bin", "x1.bin"]

    def test_param_groups_and_scalars_and_items(self) -> None:
        state = TrainingState(
            7,
            (ParamGroup(("x0", "x1"), {"lr": 0.1}), ParamGroup(("other",), {"lr": 0.2})),
            {"step": {"x0": 5, "x1": 5, "other": 6}},
            lr_scheduler={"last_epoch": 3},
        )
        source = checkpoint_of([zeros("x0", (2, 3)), zeros("x1", (2, 3))], state=state)
        there = translate(source, fused("x0", "x1"), "there").state
        assert there.param_groups == (ParamGroup(("y",), {"lr": 0.1}), ParamGroup(("other",), {"lr": 0.2}))
        assert there.scalars == {"step": {"y": 5, "other": 6}}
        assert (there.step, there.entries()) == (state.step, {"lr_scheduler": {"last_epoch": 3}})
        back = translate(translate(source, fused("x0", "x1"), "there"), fused("x0", "x1").inverse(), "here").state
        assert back.param_groups[0] == ParamGroup(("x0", "x1"), {"lr": 0.1})
        assert back.scalars == state.scalars

    def test_scalars_that_one_name_cannot_hold(self) -> None:
        state = TrainingState(scalars={"step": {"x0": 5, "x1": 6}})
        source = checkpoint_of([zeros("x0", (2, 3)), zeros("x1", (2, 3))], state=state)
        with pytest.raises(LossError) as caught:
            translate(source, fused("x0", "x1"), "there")
        assert (caught.value.fqn, caught.value.expected, caught.value.found) == ("x1", 5, 6)

    def test_ties(self) -> None:
        """The alias and its owner get their new names, even if the relation does not know the alias."""
        shapes = {"embed": (2, 3), "head": (2, 3)}
        links = tuple(Link.rename(name, f"model.{name}", shape) for name, shape in shapes.items())
        known = Relation(links, shapes, {f"model.{name}": shape for name, shape in shapes.items()})
        tensors = [zeros("embed", (2, 3)), zeros("head", (2, 3))]
        assert translate(checkpoint_of(tensors, ties={"head": "embed"}), known, "n").ties == {
            "model.head": "model.embed"
        }
        unknown = Relation(links[:1], {"embed": (2, 3)}, {"model.embed": (2, 3)})
        assert translate(checkpoint_of(tensors[:1], ties={"head": "embed"}), unknown, "n").ties == {
            "head": "model.embed"
        }

    def test_every_error_is_one_of_ours(self) -> None:
        """A relation with unknown tensors is refused with an error of ckpt."""
        stray = Relation((Link.rename("x", "y", (2,)),), {"x": (2,)}, {"y": (2,)})
        with pytest.raises(CkptError):
            translate(checkpoint_of([]), stray, "there")
        with pytest.raises(CkptError):
            Relation(stray.links, {}, {"y": (2,)}).check()
