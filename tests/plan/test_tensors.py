"""`ckpt/plan/tensors.py`, `tiling.py`: boxes and flat ranges against numpy."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from math import prod

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from ckpt.plan.dtypes import FLOAT32
from ckpt.plan.planner import check_source
from ckpt.plan.tensors import (
    Box,
    Extent,
    FlatRange,
    Fragment,
    Region,
    Shape,
    Source,
    Tensor,
    contiguous_strides,
    flat_boxes,
    flat_range,
    is_contiguous,
    overlay,
    stepped,
    whole,
)
from ckpt.plan.tiling import check_tiling, tiling_faults
from converters.deepspeed.flat_groups import FlatGroup, InFlatGroup, InSlots, slot_size
from tests.support.strategies import Store, assembled, indices, positions, shapes, stored, tilings

WORLD_SIZES = st.integers(1, 17)


@st.composite
def shape_and_box(draw: st.DrawFn) -> tuple[Shape, Box]:
    shape = draw(shapes())
    offsets = tuple(draw(st.integers(0, size)) for size in shape)
    return shape, Box(offsets, tuple(draw(st.integers(0, n - a)) for a, n in zip(offsets, shape, strict=True)))


@st.composite
def stepped_boxes(draw: st.DrawFn, shape: Shape) -> Box:
    offsets, sizes, steps = [], [], []
    for full in shape:
        offsets.append(draw(st.integers(0, max(full - 1, 0))))
        steps.append(draw(st.integers(1, 4)))
        sizes.append(draw(st.integers(0, -(-(full - offsets[-1]) // steps[-1]))))
    return stepped(tuple(offsets), tuple(sizes), tuple(steps))


class TestBoxes:
    @given(shape_and_box(), st.data())
    def test_the_common_part_is_that_of_the_sets_of_elements(
        self, case: tuple[Shape, Box], data: st.DataObject
    ) -> None:
        shape, a = case
        offsets = tuple(data.draw(st.integers(0, size)) for size in shape)
        b = Box(offsets, tuple(data.draw(st.integers(0, n - o)) for o, n in zip(offsets, shape, strict=True)))
        expected = set(indices(a, shape).flat) & set(indices(b, shape).flat)
        common = a.intersect(b)
        assert set(() if common is None else indices(common, shape).flat) == expected
        assert common == b.intersect(a)

    @given(shapes(), st.data())
    def test_boxes_with_steps_too(self, shape: Shape, data: st.DataObject) -> None:
        """The intersection of two boxes, its place within one of them, and back."""
        a, b = data.draw(stepped_boxes(shape)), data.draw(stepped_boxes(shape))
        common = a.intersect(b)
        assert common == b.intersect(a)
        expected = set(indices(a, shape).flat) & set(indices(b, shape).flat)
        assert set(() if common is None else indices(common, shape).flat) == expected
        if common is not None:
            inner = common.relative_to(a)
            assert (indices(a, shape).reshape(-1)[indices(inner, a.sizes)] == indices(common, shape)).all()
            assert a.inside(inner) == common
            assert all(end == indices(common, shape).max(initial=0) + 1 for end in common.ends if len(shape) == 1)

    @given(shape_and_box())
    def test_a_box_is_a_flat_range_exactly_where_its_elements_follow_each_other(self, case: tuple[Shape, Box]) -> None:
        shape, box = case
        elements = indices(box, shape).reshape(-1)
        flat = flat_range(box, shape)
        if (np.diff(elements) == 1).all():
            assert flat is not None and (indices(flat, shape) == elements).all()
        else:
            assert flat is None

    @given(shapes(), st.data())
    def test_a_flat_range_becomes_few_boxes_that_hold_it_in_order(self, shape: Shape, data: st.DataObject) -> None:
        total = prod(shape)
        start = data.draw(st.integers(0, total))
        stop = data.draw(st.integers(start, total))
        boxes = list(flat_boxes(shape, start, stop))
        elements = [index for box in boxes for index in indices(box, shape).flat]
        assert elements == list(range(start, stop))  # ordered, disjoint and complete at once
        assert len(boxes) <= max(1, 2 * len(shape) - 1)
        assert all(box.numel for box in boxes)
        # Each box is a flat range again, and together they give the requested range.
        flat = [flat_range(box, shape) for box in boxes]
        assert all(a is not None and b is not None and a.stop == b.start for a, b in pairwise(flat))

    @given(shapes(), st.data())
    def test_whole_rows_are_one_box(self, shape: Shape, data: st.DataObject) -> None:
        assume(shape and prod(shape))
        row = prod(shape[1:])
        first = data.draw(st.integers(0, shape[0] - 1))
        last = data.draw(st.integers(first + 1, shape[0]))
        assert list(flat_boxes(shape, first * row, last * row)) == [
            Box((first, *(0,) * (len(shape) - 1)), (last - first, *shape[1:]))
        ]

    def test_it_reads_like_a_slice(self) -> None:
        assert str(Box((0, 4), (2, 3))) == "[0:2, 4:7]"
        assert str(FlatRange(3, 9)) == "elements 3:9"


class TestExtents:
    @given(shapes(), st.data())
    def test_contiguous_is_what_numpy_says(self, shape: Shape, data: st.DataObject) -> None:
        strides = data.draw(
            st.one_of(
                st.just(contiguous_strides(shape)),
                st.tuples(*(st.integers(0, 30) for _ in shape)),
                st.permutations(contiguous_strides(shape)).map(tuple),
            )
        )
        array = np.lib.stride_tricks.as_strided(np.zeros(1, np.int8), shape, strides)
        assert is_contiguous(shape, strides) == array.flags.c_contiguous

    @given(shape_and_box(), st.data())
    def test_narrow_is_slicing(self, case: tuple[Shape, Box], data: st.DataObject) -> None:
        shape, box = case
        strides = tuple(data.draw(st.permutations(contiguous_strides(shape))))
        extent = Extent("file", 8, FLOAT32, shape, strides)
        window = tuple(slice(a, a + n) for a, n in zip(box.offsets, box.sizes, strict=True))
        part = extent.narrow(box)
        assert (positions(part) == positions(extent)[window]).all()
        if part.numel:
            assert part.end == (positions(part).max() + 1) * 4
            assert part.nbytes == box.numel * 4


class TestOverlay:
    @given(shapes(), st.data())
    def test_the_same_elements_are_paired_exactly_once(self, shape: Shape, data: st.DataObject) -> None:
        store: Store = {}
        values = np.arange(prod(shape)).reshape(shape)
        a, b = (data.draw(stored(values, name, store)) for name in "ab")
        count = np.zeros(prod(shape), int)
        for common in overlay(a, b, shape):
            where = indices(common.region, shape)
            assert where.size
            np.add.at(count, where.reshape(-1), 1)
            for side, rank, name in ((common.a, common.a_rank, "a"), (common.b, common.b_rank, "b")):
                assert (store[side.path][positions(side)] == where).all()
                assert side.path == f"{name}-{rank}"
        assert (count == 1).all()

    @given(shapes(), st.data())
    def test_one_side_may_be_a_part(self, shape: Shape, data: st.DataObject) -> None:
        store: Store = {}
        values = np.arange(prod(shape)).reshape(shape)
        a, b = (data.draw(stored(values, name, store)) for name in "ab")
        b = b[: data.draw(st.integers(0, len(b)))]
        held = {index for fragment in b for index in indices(fragment.region, shape).flat}
        met = [index for common in overlay(a, b, shape) for index in indices(common.region, shape).flat]
        assert sorted(met) == sorted(held)

    def test_flat_pieces_stay_flat(self) -> None:
        a = [Fragment(FlatRange(0, 7), Extent.contiguous("a", 0, FLOAT32, (7,)))]
        b = [Fragment(Box((1, 0), (1, 4)), Extent.contiguous("b", 0, FLOAT32, (1, 4)))]
        assert [str(common.region) for common in overlay(a, b, (2, 4))] == ["elements 4:7"]


class TestTiling:
    @given(shapes(), st.data())
    def test_every_true_tiling_is_accepted(self, shape: Shape, data: st.DataObject) -> None:
        regions = data.draw(tilings(shape))
        assert check_tiling(regions, shape) is None
        assert check_tiling(regions, shape, overlaps=True) is None

    @given(st.lists(st.integers(1, 4), min_size=1, max_size=3).map(tuple), st.data())
    def test_boxes_with_steps_tile_what_they_are_counted_to(self, shape: Shape, data: st.DataObject) -> None:
        """Compare any few boxes, and combs in one dim, with a count."""
        boxes = data.draw(st.lists(stepped_boxes(shape), max_size=2))
        dim, step = data.draw(st.integers(0, len(shape) - 1)), data.draw(st.integers(1, 4))
        for residue in range(min(step, shape[dim])):
            offsets, sizes = [0] * len(shape), list(shape)
            offsets[dim], sizes[dim] = residue, (shape[dim] - residue - 1) // step + 1
            steps = tuple(step if d == dim else 1 for d in range(len(shape)))
            boxes.append(stepped(tuple(offsets), tuple(sizes), steps))
        if data.draw(st.booleans()):
            boxes.pop(data.draw(st.integers(0, len(boxes) - 1)))
        count = np.zeros(prod(shape), int)
        for box in boxes:
            np.add.at(count, indices(box, shape).reshape(-1), 1)
        fault = check_tiling(boxes, shape)
        assert (fault is None) == bool((count == 1).all())
        if fault is not None:
            found = count[indices(fault.region, shape)]
            assert (found == 0).all() if fault.kind == "hole" else (found > 1).any()

    @given(shapes(min_size=1), st.data())
    def test_all_faults_are_all_that_is_wrong(self, shape: Shape, data: st.DataObject) -> None:
        """With random pieces missing or repeated, the faults must equal a count."""
        pieces = data.draw(tilings(shape))
        regions = [piece for piece in pieces for _ in range(data.draw(st.sampled_from([1, 1, 0, 2])))]
        count = np.zeros(prod(shape), int)
        for region in regions:
            np.add.at(count, indices(region, shape).reshape(-1), 1)
        found: dict[str, set[int]] = {"hole": set(), "overlap": set()}
        for fault in tiling_faults([*regions, FlatRange(prod(shape), prod(shape) + 1)], shape):
            if fault.kind != "outside":
                found[fault.kind] |= set(indices(fault.region, shape).flat)
        assert found == {"hole": {*np.flatnonzero(count == 0)}, "overlap": {*np.flatnonzero(count > 1)}}

    @given(shapes(min_size=1), st.data())
    def test_a_missing_piece_is_a_hole(self, shape: Shape, data: st.DataObject) -> None:
        regions = data.draw(tilings(shape))
        missing = regions.pop(data.draw(st.integers(0, len(regions) - 1)))
        assume(missing.numel)
        for overlaps in (False, True):
            fault = check_tiling(regions, shape, overlaps=overlaps)
            assert fault is not None and fault.kind == "hole"
            assert fault.region.numel
            assert set(indices(fault.region, shape).flat) <= set(indices(missing, shape).flat)

    @given(shapes(min_size=1), st.data())
    def test_a_piece_that_is_there_twice_is_an_overlap(self, shape: Shape, data: st.DataObject) -> None:
        regions = data.draw(tilings(shape))
        twice = data.draw(st.sampled_from(regions))
        assume(twice.numel)
        regions.insert(data.draw(st.integers(0, len(regions))), twice)
        fault = check_tiling(regions, shape)
        assert fault is not None and fault.kind == "overlap"
        assert set(indices(fault.region, shape).flat) <= set(indices(twice, shape).flat)
        assert check_tiling(regions, shape, overlaps=True) is None

    @given(shapes(min_size=1), st.data())
    def test_a_piece_that_is_moved_is_found(self, shape: Shape, data: st.DataObject) -> None:
        regions = data.draw(tilings(shape))
        index = data.draw(st.integers(0, len(regions) - 1))
        region, by = regions[index], data.draw(st.integers(-3, 3))
        assume(region.numel and by)
        if isinstance(region, FlatRange):
            regions[index] = FlatRange(region.start + by, region.stop + by)
        else:
            assume(shape)
            dim = data.draw(st.integers(0, len(shape) - 1))
            offsets = list(region.offsets)
            offsets[dim] += by
            regions[index] = Box(tuple(offsets), region.sizes)
        assert check_tiling(regions, shape) is not None

    @given(shapes(min_size=1), st.data())
    def test_a_piece_outside_is_found_whatever_else_is_there(self, shape: Shape, data: st.DataObject) -> None:
        regions = data.draw(tilings(shape))
        total = prod(shape)
        outside: list[Region] = [
            FlatRange(total, total + 1),
            FlatRange(-1, 0),
            FlatRange(0, total + 1),
            FlatRange(2, 1),
        ]
        for dim, size in enumerate(shape):
            for offset, length in ((size, 1), (-1, 1), (0, size + 1), (0, -1)):
                offsets, sizes = [0] * len(shape), list(shape)
                offsets[dim], sizes[dim] = offset, length
                outside.append(Box(tuple(offsets), tuple(sizes)))
        outside += [Box((*(0 for _ in shape), 0), (*shape, 1)), Box((), shape) if shape else Box((0,), ())]
        wrong = data.draw(st.sampled_from(outside))
        regions.insert(data.draw(st.integers(0, len(regions))), wrong)
        for overlaps in (False, True):
            fault = check_tiling(regions, shape, overlaps=overlaps)
            assert fault is not None and fault.kind == "outside" and fault.region == wrong

    def test_a_box_outside_behind_one_that_is_no_flat_range(self) -> None:
        columns = [Box((0, 0), (2, 1)), Box((0, 1), (2, 1))]
        fault = check_tiling([*columns, Box((2, 0), (1, 2))], (2, 2))
        assert fault is not None and fault.kind == "outside"
        fault = check_tiling([*columns, FlatRange(4, 6)], (2, 2))
        assert fault is not None and fault.kind == "outside"

    @pytest.mark.parametrize("shape", [(0,), (3, 0), (0, 0, 2)])
    def test_nothing_tiles_a_tensor_without_elements(self, shape: Shape) -> None:
        assert check_tiling([], shape) is None
        assert check_tiling([whole(shape), whole(shape), FlatRange(0, 0)], shape) is None

    def test_a_tensor_without_dims_has_one_element(self) -> None:
        assert check_tiling([], ()) is not None
        assert check_tiling([Box((), ())], ()) is None
        assert check_tiling([FlatRange(0, 1)], ()) is None
        assert check_tiling([Box((), ()), FlatRange(0, 1)], ()) is not None

    def test_a_grid_of_many_boxes_is_quick(self) -> None:
        grid: list[Region] = [Box((2 * i, 2 * j), (2, 2)) for i in range(60) for j in range(60)]
        assert check_tiling(grid, (120, 120)) is None
        fault = check_tiling(grid[:-1], (120, 120))
        assert fault is not None and fault.region == Box((118, 118), (2, 2))


class TestZeroRules:
    """ZeRO's rules against a plain model of deepspeed/runtime/zero: whole buffers, then cut."""

    @staticmethod
    def assert_holds(source: Source, values: np.ndarray, store: Store, world_size: int) -> None:
        tensor = Tensor("p", "master", FLOAT32, values.shape, source)
        check_source(tensor)
        fragments = list(tensor.fragments())
        assert (assembled(fragments, values.shape, store) == values).all()
        ranks = [fragment.rank for fragment in fragments]
        assert ranks == sorted(set(ranks)) and set(ranks) <= set(range(world_size))
        assert all(fragment.region.numel for fragment in fragments)

    @staticmethod
    def assert_all_told(sources: Sequence[InFlatGroup | InSlots], values: list[np.ndarray], store: Store) -> None:
        """Assert that padding is exactly the bytes outside every tensor."""
        told = {path: np.zeros(len(part), int) for path, part in store.items()}
        for source, value in zip(sources, values, strict=True):
            for fragment in source.fragments(value.shape):
                told[fragment.extent.path][positions(fragment.extent)] += 1
            behind = [fragment.region for fragment in source.padding(value.shape)]
            if behind:
                assert isinstance(behind[0], FlatRange) and behind[0].start >= value.size
            for fragment in source.padding(value.shape):
                told[fragment.extent.path][positions(fragment.extent)] += 1
                assert (store[fragment.extent.path][positions(fragment.extent)] == -1).all()
        assert all((count == 1).all() for count in told.values())

    @given(WORLD_SIZES, st.lists(shapes(3), min_size=1, max_size=5), st.sampled_from([1, 1, 4]), st.booleans())
    def test_stages_1_and_2(self, world_size: int, params: list[Shape], alignment: int, stripped: bool) -> None:
        """Parameters end to end, aligned, padded to a multiple of twice the world size, cut evenly."""
        buffer: list[int] = []
        starts, values = [], []
        for number, shape in enumerate(params):
            buffer += [-1] * (-len(buffer) % alignment)
            starts.append(len(buffer))
            values.append(1000 * number + np.arange(prod(shape)).reshape(shape))
            buffer += values[-1].reshape(-1).tolist()
        used = len(buffer)
        buffer += [-1] * (-used % (2 * world_size))
        assume(buffer)
        parts = np.split(np.array(buffer), world_size)
        partition = len(parts[0])
        if stripped:  # like stages 1 and 2, whose optimizer states end with the last parameter
            parts = [part[: max(0, used - rank * partition)] for rank, part in enumerate(parts)]
        store = {f"rank{rank}": part for rank, part in enumerate(parts)}
        extents = [Extent.contiguous(path, 0, FLOAT32, part.shape) for path, part in store.items()]
        group = FlatGroup(extents, partition)
        ends = [*starts, partition * world_size][1:]
        sources = [InFlatGroup(group, a, b - a - v.size) for a, b, v in zip(starts, ends, values, strict=True)]
        for source, value in zip(sources, values, strict=True):
            self.assert_holds(source, value, store, world_size)
        self.assert_all_told(sources, values, store)

    @given(WORLD_SIZES, st.lists(shapes(3), min_size=1, max_size=5))
    def test_stage_3(self, world_size: int, params: list[Shape]) -> None:
        """Each parameter padded to a multiple of the world size and cut evenly; a rank's slots end to end."""
        ranks: list[list[int]] = [[] for _ in range(world_size)]
        offsets, values = [], []
        for number, shape in enumerate(params):
            value = 1000 * number + np.arange(prod(shape)).reshape(shape)
            flat = np.concatenate([value.reshape(-1), np.full(-value.size % world_size, -1)])
            offsets.append(len(ranks[0]))
            values.append(value)
            for rank, part in zip(ranks, np.split(flat, world_size), strict=True):
                rank += part.tolist()
        store = {f"rank{rank}": np.array(part, np.int64) for rank, part in enumerate(ranks)}
        extents = [Extent.contiguous(path, 0, FLOAT32, part.shape) for path, part in store.items()]
        sources = [InSlots(extents, offset) for offset in offsets]
        for source, value in zip(sources, values, strict=True):
            self.assert_holds(source, value, store, world_size)
        self.assert_all_told(sources, values, store)

    @given(st.integers(0, 200), WORLD_SIZES)
    def test_slots_are_as_small_as_they_can_be(self, numel: int, world_size: int) -> None:
        slot = slot_size(numel, world_size)
        assert slot * world_size >= numel
        assert slot == 0 or (slot - 1) * world_size < numel

    def test_a_rank_whose_part_is_missing_is_a_hole(self) -> None:
        extents = [Extent.contiguous(f"rank{rank}", 0, FLOAT32, (4,)) for rank in range(3)]
        source = InFlatGroup(FlatGroup(extents[:2], 4), 1)
        fault = check_tiling([fragment.region for fragment in source.fragments((10,))], (10,))
        assert fault is not None and (fault.kind, fault.region) == ("hole", FlatRange(7, 10))
