"""`ckpt/plan/spans.py`: a plan's arrays, and the parts computed by rules, agree with the single fragments."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from math import prod
from unittest.mock import patch

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from ckpt.errors import CkptError
from ckpt.plan import planner
from ckpt.plan.checkpoint import Checkpoint, Slot, Target, TargetFile
from ckpt.plan.dtypes import BFLOAT16, FLOAT32
from ckpt.plan.planner import check_source, make_plan
from ckpt.plan.relation import Link, Relation, translate
from ckpt.plan.tensors import (
    Box,
    Extent,
    FlatRange,
    Fragment,
    Pieces,
    Run,
    Shape,
    Source,
    Tensor,
    flat_range,
    overlay,
    run_fragments,
    runs_of,
    whole,
)
from converters.deepspeed.flat_groups import FlatGroup, InFlatGroup, InSlots, slot_size
from tests.support.pieces import all_copies
from tests.support.strategies import shapes, stored, tensor_of, tilings

WORLD_SIZES = st.sampled_from([1, 2, 3, 5, 8, 64])


def rank_extents(world_size: int, length: int) -> list[Extent]:
    return [Extent.contiguous(f"rank{rank}", 8 * rank, FLOAT32, (length,)) for rank in range(world_size)]


@st.composite
def rules(draw: st.DrawFn, shape: Shape) -> Source:
    """Draw one of ZeRO's rules for a tensor with this shape, anywhere in the ranks' buffers."""
    world_size, before, numel = draw(WORLD_SIZES), draw(st.integers(0, 9)), prod(shape)
    if draw(st.booleans()):
        return InSlots(rank_extents(world_size, before + slot_size(numel, world_size)), before)
    partition = max(1, -(-(before + numel) // world_size))
    return InFlatGroup(FlatGroup(rank_extents(world_size, partition), partition), before, 0)


def stacked(sources: Sequence[Source], shape: Shape) -> Checkpoint:
    """Return tensors with one shape, translated to one stacked tensor `y`."""
    number = len(sources)
    tensors = {(f"x{i}", "weight"): Tensor(f"x{i}", "weight", FLOAT32, shape, s) for i, s in enumerate(sources)}
    dims = tuple(range(1, len(shape) + 1))
    links = tuple(
        Link(f"x{i}", whole(shape), "y", Box((i, *(0,) * len(shape)), (1, *shape)), dims) for i in range(number)
    )
    relation = Relation(links, {f"x{i}": shape for i in range(number)}, {"y": (number, *shape)})
    return translate(Checkpoint("run", "test", tensors, ()), relation, "there")


def elements(fragments: Sequence[Fragment], shape: Shape, start: int, stop: int) -> dict[int, tuple[str, int]]:
    """Return the file and byte for each element of a part."""
    wanted = Extent.contiguous("wanted", 0, FLOAT32, (stop - start,))
    found = {}
    for common in overlay(fragments, [Fragment(FlatRange(start, stop), wanted)], shape):
        region = common.region if isinstance(common.region, FlatRange) else flat_range(common.region, shape)
        assert region is not None and common.a.is_contiguous
        for number in range(region.numel):
            found[region.start + number] = common.a.path, common.a.offset + 4 * number
    return found


def as_elements(runs: Sequence[Run]) -> dict[int, tuple[str, int]]:
    return {
        first + number: (extent.path, extent.offset + 4 * (at + number))
        for first, last, extent, at, _ in runs
        for number in range(last - first)
    }


class TestRules:
    @given(shapes(3, min_size=1), st.data())
    def test_a_rule_says_of_a_part_what_its_fragments_say(self, shape: Shape, data: st.DataObject) -> None:
        source, numel = data.draw(rules(shape)), prod(shape)
        start = data.draw(st.integers(0, numel))
        stop = data.draw(st.integers(start, numel))
        runs = runs_of(source, shape, start, stop)
        assert runs is not None
        assert as_elements(runs) == elements(list(source.fragments(shape)), shape, start, stop)
        assert [run[:2] for run in runs] == sorted(run[:2] for run in runs)
        assert all(run[0] < run[1] and start <= run[0] and run[1] <= stop for run in runs)

    @given(shapes(2, min_size=1), st.integers(1, 4), st.data())
    def test_a_relation_asks_for_the_part_only(self, shape: Shape, number: int, data: st.DataObject) -> None:
        """Tensors stacked and split again, whole or in part, agree with the fragments, which walk everything."""
        sources = [data.draw(rules(shape)) for _ in range(number)]
        there = stacked(sources, shape)
        tensor = there.tensors["y", "weight"]
        start = data.draw(st.integers(0, tensor.numel))
        stop = data.draw(st.integers(start, tensor.numel))
        runs = runs_of(tensor.source, tensor.shape, start, stop)
        assert runs is not None
        each = [
            {
                at + i * prod(shape): place
                for at, place in elements(list(s.fragments(shape)), shape, 0, prod(shape)).items()
            }
            for i, s in enumerate(sources)
        ]
        expected = {at: place for one in each for at, place in one.items() if start <= at < stop}
        assert as_elements(runs) == expected
        assert elements(list(tensor.fragments()), tensor.shape, start, stop) == expected

    @given(shapes(3, min_size=1), st.data())
    def test_pieces_are_runs_or_none(self, shape: Shape, data: st.DataObject) -> None:
        values = np.arange(prod(shape)).reshape(shape)
        tensor = tensor_of("w", values, data.draw(stored(values, "in", {})))
        runs = tensor.runs()
        if runs is not None:
            assert as_elements(runs) == elements(list(tensor.fragments()), shape, 0, tensor.numel)
            check_source(tensor._replace(source=Pieces(tuple(run_fragments(runs)))))

    @given(shapes(2, min_size=1), st.data())
    def test_a_damaged_rule_is_refused_as_its_fragments_are(self, shape: Shape, data: st.DataObject) -> None:
        """Its buffer is missing or has another dtype."""
        source = data.draw(rules(shape))
        extents = source.extents if isinstance(source, InSlots) else source.group.extents
        number = data.draw(st.integers(0, len(extents) - 1))
        damaged = list(extents)
        how = data.draw(st.sampled_from(["dtype", "missing"]))
        if how == "dtype":
            damaged[number] = damaged[number]._replace(dtype=BFLOAT16)
        else:
            damaged = damaged[:number]
        if isinstance(source, InSlots):
            if how == "missing":
                return  # one extent per rank
            worse: Source = replace(source, extents=damaged)
        else:
            worse = replace(source, group=replace(source.group, extents=damaged))
        one = Tensor("w", "weight", FLOAT32, shape, worse)
        listed = one._replace(source=Pieces(tuple(worse.fragments(shape))))
        assert faults(one) == faults(listed)


def faults(tensor: Tensor) -> str:
    try:
        check_source(tensor)
    except CkptError as error:
        return str(error)
    return ""


class TestPlans:
    @given(shapes(2, min_size=1), st.integers(1, 3), st.data())
    def test_arrays_hold_the_copies_that_the_overlay_finds(
        self, shape: Shape, number: int, data: st.DataObject
    ) -> None:
        """For any slots, contiguous or not, cast or not, both copy the same elements between the same bytes."""
        there = stacked([data.draw(rules(shape)) for _ in range(number)], shape)
        tensor = there.tensors["y", "weight"]
        dtype = data.draw(st.sampled_from([FLOAT32, BFLOAT16]))
        slots, at = [], 0
        for region in data.draw(tilings(tensor.shape)):
            sizes = region.sizes if isinstance(region, Box) else (region.numel,)
            extent = Extent.contiguous("out", at, dtype, sizes)
            slots.append(Slot(("y", "weight"), region, extent))
            at = extent.end
        file = TargetFile("out", at, (), tuple(slots))
        plan = make_plan(there, Target((file,)))
        expected = [
            common
            for slot in slots
            for common in overlay(tensor.fragments(), [Fragment(slot.region, slot.extent)], tensor.shape)
        ]
        copies = all_copies(plan, file)
        assert {place for copy in copies for place in places(copy.source, copy.target)} == {
            place for common in expected for place in places(common.a, common.b)
        }
        assert plan.num_copies == len(copies)
        assert sum(len(spans) for spans in plan.spans(file)) == sum(copy.is_flat for copy in copies)


def places(source: Extent, target: Extent) -> list[tuple[str, int, int]]:
    """Return the file and byte of each source element, and its byte in the target."""

    def offsets(extent: Extent) -> list[int]:
        return [
            extent.offset + extent.dtype.itemsize * sum(i * s for i, s in zip(index, extent.strides, strict=True))
            for index in np.ndindex(*extent.shape)
        ]

    return [(source.path, a, b) for a, b in zip(offsets(source), offsets(target), strict=True)]


@given(shapes(3, min_size=1), st.data())
def test_a_box_of_a_tensor_in_one_piece_is_found_as_any_other(shape: Shape, data: st.DataObject) -> None:
    """Rows, columns and boxes partly or wholly outside, in transposed tensors too."""
    offsets = tuple(data.draw(st.integers(0, n)) for n in shape)
    box = Box(offsets, tuple(data.draw(st.integers(0, n)) for n in shape))
    stored_as = Extent.contiguous("in", 8, FLOAT32, shape)
    if data.draw(st.booleans()):
        reverse = Extent.contiguous("in", 8, FLOAT32, shape[::-1])
        stored_as = reverse._replace(shape=shape, strides=reverse.strides[::-1])
    slot = Slot(("w", "weight"), box, Extent.contiguous("out", 0, FLOAT32, box.sizes))
    fragments = [Fragment(whole(shape), stored_as)]
    found = list(planner._slot_copies(iter(fragments), shape, slot))
    with patch.object(planner, "_lies_in_one", lambda *_: False):
        assert found == list(planner._slot_copies(iter(fragments), shape, slot))
