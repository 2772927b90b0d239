"""`ckpt/plan/planner.py`, `precision.py`: proofs about a plan before anything is written."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from math import prod

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckpt.errors import CorruptError, LossError, UsageError
from ckpt.plan.checkpoint import Checkpoint, Slot, Target, TargetFile
from ckpt.plan.dtypes import BFLOAT16, BOOL, BY_NAME, FLOAT16, FLOAT32, FLOAT64, INT64, DType
from ckpt.plan.planner import Cast, check_source, choose_replica, first_index, make_plan
from ckpt.plan.tensors import (
    Box,
    Extent,
    FlatRange,
    Fragment,
    Pieces,
    Region,
    Shape,
    Tensor,
    TiedCopy,
    Whole,
    region_boxes,
    whole,
)
from tests.support.pieces import all_copies
from tests.support.strategies import Store, indices, positions, shapes, stored, tensor_of, tilings


def fragment(region: Region, path: str = "part.bin", rank: int | None = 3, dtype: DType = FLOAT32) -> Fragment:
    shape = region.sizes if isinstance(region, Box) else (region.numel,)
    return Fragment(region, Extent.contiguous(path, 0, dtype, shape), rank)


def tensor(shape: Shape = (4,), regions: Sequence[Region] | None = None, dtype: DType = FLOAT32) -> Tensor:
    regions = [whole(shape)] if regions is None else regions
    return Tensor("w", "weight", dtype, shape, Pieces(tuple(fragment(region, dtype=dtype) for region in regions)))


def checkpoint(*tensors: Tensor) -> Checkpoint:
    return Checkpoint("run", "test", {(t.fqn, t.role): t for t in tensors}, ())


def written(*tensors: Tensor, dtype: DType | None = None) -> Target:
    """Lay out all tensors whole, one after the other, in one file."""
    slots, at = [], 0
    for one in tensors:
        extent = Extent.contiguous("out.bin", at, dtype or one.dtype, one.shape)
        slots.append(Slot((one.fqn, one.role), whole(one.shape), extent))
        at = extent.end
    return Target((TargetFile("out.bin", at, (), tuple(slots)),))


class TestTheSource:
    @pytest.mark.parametrize(
        ("kind", "what", "regions"),
        [
            ("hole at elements 2:3", "nowhere", [FlatRange(0, 2), FlatRange(3, 4)]),
            ("overlap at elements 1:2", "twice", [FlatRange(0, 2), FlatRange(1, 4)]),
            ("outside at [2:5]", "outside", [Box((0,), (2,)), Box((2,), (3,))]),
            ("hole at elements 0:4", "nowhere", []),
        ],
    )
    def test_fragments_that_do_not_tile(self, kind: str, what: str, regions: list[Region]) -> None:
        wrong = tensor((4,), regions)
        with pytest.raises(CorruptError, match=what) as caught:
            make_plan(checkpoint(wrong), written(wrong))
        assert (caught.value.exit_code, caught.value.fqn, caught.value.found) == (4, "w", kind)
        assert caught.value.path == ("part.bin" if regions else None)

    def test_the_file_of_the_wrong_fragment_is_named(self) -> None:
        pieces = (fragment(Box((0,), (4,)), "a.bin"), fragment(Box((4,), (1,)), "b.bin"))
        with pytest.raises(CorruptError) as caught:
            check_source(Tensor("w", "weight", FLOAT32, (4,), Pieces(pieces)))
        assert caught.value.path == "b.bin"

    @pytest.mark.parametrize(
        "extent",
        [
            Extent.contiguous("part.bin", 0, FLOAT32, (3,)),
            Extent.contiguous("part.bin", 0, FLOAT32, (2, 2)),
            Extent.contiguous("part.bin", 0, FLOAT16, (4,)),
        ],
    )
    @pytest.mark.parametrize("region", [whole((4,)), FlatRange(0, 4)])
    def test_an_extent_that_is_not_of_its_region(self, extent: Extent, region: Region) -> None:
        with pytest.raises(CorruptError, match="does not fit") as caught:
            check_source(Tensor("w", "weight", FLOAT32, (4,), Pieces((Fragment(region, extent, 5),))))
        assert (caught.value.rank, caught.value.path) == (5, "part.bin")

    def test_a_flat_range_with_gaps(self) -> None:
        gaps = Extent("part.bin", 0, FLOAT32, (4,), (2,))
        with pytest.raises(CorruptError, match="does not fit"):
            check_source(Tensor("w", "weight", FLOAT32, (4,), Pieces((Fragment(FlatRange(0, 4), gaps),))))
        check_source(Tensor("w", "weight", FLOAT32, (4,), Pieces((Fragment(whole((4,)), gaps),))))

    def test_what_is_left_out_is_not_looked_at(self) -> None:
        broken = tensor((4,), [])._replace(role="exp_avg")
        good = tensor()
        target = replace(written(good), left_out={("w", "exp_avg"): "it is broken"})
        assert make_plan(checkpoint(good, broken), target).moved_bytes == 16


class TestTheTarget:
    def test_a_tensor_that_goes_nowhere(self) -> None:
        extra = tensor()._replace(fqn="extra")
        with pytest.raises(LossError, match="goes nowhere") as caught:
            make_plan(checkpoint(tensor(), extra), written(tensor()))
        assert (caught.value.exit_code, caught.value.fqn) == (6, "extra")

    def test_a_tensor_that_is_not_there(self) -> None:
        extra = tensor()._replace(fqn="extra")
        with pytest.raises(LossError, match="the source lacks") as caught:
            make_plan(checkpoint(tensor()), written(tensor(), extra))
        assert (caught.value.fqn, caught.value.path) == ("extra", "out.bin")

    @pytest.mark.parametrize("region", [Box((0,), (3,)), FlatRange(1, 4)])
    def test_a_part_that_goes_nowhere(self, region: Region) -> None:
        slot = Slot(("w", "weight"), region, Extent.contiguous("out.bin", 0, FLOAT32, (3,)))
        with pytest.raises(LossError, match="would not be written") as caught:
            make_plan(checkpoint(tensor()), Target((TargetFile("out.bin", 12, (), (slot,)),)))
        assert caught.value.found is not None and "hole" in str(caught.value.found)

    @pytest.mark.parametrize("region", [Box((2,), (4,)), FlatRange(2, 6)])
    def test_a_slot_that_nothing_fills(self, region: Region) -> None:
        first = Slot(("w", "weight"), whole((4,)), Extent.contiguous("out.bin", 0, FLOAT32, (4,)))
        slot = Slot(("w", "weight"), region, Extent.contiguous("out.bin", 16, FLOAT32, (4,)))
        with pytest.raises(LossError, match="nothing fills") as caught:
            make_plan(checkpoint(tensor()), Target((TargetFile("out.bin", 32, (), (first, slot)),)))
        assert (caught.value.expected, caught.value.found) == ("4 elements", "2 elements")

    def test_a_tensor_may_be_written_twice(self) -> None:
        """A tensor may be a master and, rounded, a weight; or be cut in two ways."""
        halves = [
            Slot(("w", "weight"), Box((at,), (2,)), Extent.contiguous("out.bin", 16 + 2 * at, BFLOAT16, (2,)))
            for at in (0, 2)
        ]
        once = Slot(("w", "weight"), whole((4,)), Extent.contiguous("out.bin", 0, FLOAT32, (4,)))
        plan = make_plan(checkpoint(tensor()), Target((TargetFile("out.bin", 24, (), (once, *halves)),)))
        assert (plan.span_bytes, plan.buffered_bytes, plan.num_copies) == (16, 8, 3)
        assert plan.casts == (Cast(FLOAT32, BFLOAT16, 1, 8),)

    @pytest.mark.parametrize(
        "file",
        [
            TargetFile("out.bin", 5, ((0, b"1234"),)),  # nothing fills one byte
            TargetFile("out.bin", 4, ((0, b"12"), (1, b"34"))),  # two constants overlap
            TargetFile("out.bin", 4, ((0, b"12"), (3, b"34"))),  # one behind the end
            TargetFile("out.bin", 4, ((-1, b"1234"),)),  # one before the start
            TargetFile("out.bin", 4, ((0, b"12"),), (), ((1, 2),)),  # zeros overlap a constant
        ],
    )
    def test_a_writer_that_does_not_cover_its_file_is_a_bug(self, file: TargetFile) -> None:
        with pytest.raises(AssertionError, match=r"out\.bin: literals and slots cover"):
            make_plan(checkpoint(), Target((file,)))

    def test_slots_count_for_the_cover(self) -> None:
        gaps = Slot(("w", "weight"), whole((2,)), Extent("out.bin", 0, FLOAT32, (2,), (2,)))
        other = tensor((2,))._replace(fqn="v")
        between = Slot(("v", "weight"), whole((2,)), Extent("out.bin", 4, FLOAT32, (2,), (2,)))
        file = TargetFile("out.bin", 16, (), (gaps, between))
        plan = make_plan(checkpoint(tensor((2,)), other), Target((file,)))
        assert (plan.span_bytes, plan.buffered_bytes) == (0, 16)
        moved = between._replace(extent=between.extent._replace(offset=8))
        with pytest.raises(AssertionError, match="cover"):
            make_plan(checkpoint(tensor((2,)), other), Target((replace(file, slots=(gaps, moved)),)))

    def test_zeros_are_padding(self) -> None:
        file = TargetFile("out.bin", 8, ((0, b"12"),), (), ((2, 6),))
        assert make_plan(checkpoint(), Target((file,))).total_bytes == 8

    def test_a_slot_of_another_shape_is_a_bug(self) -> None:
        slot = Slot(("w", "weight"), whole((4,)), Extent.contiguous("out.bin", 0, FLOAT32, (2, 2)))
        with pytest.raises(AssertionError, match="another shape"):
            make_plan(checkpoint(tensor()), Target((TargetFile("out.bin", 16, (), (slot,)),)))


class TestCasts:
    @pytest.mark.parametrize("target", [FLOAT64, FLOAT32, FLOAT16, BFLOAT16])
    @pytest.mark.parametrize("source", [FLOAT64, FLOAT32, FLOAT16, BFLOAT16])
    def test_between_the_dtypes_of_models(self, source: DType, target: DType) -> None:
        one = tensor((4,), dtype=source)
        plan = make_plan(checkpoint(one), written(one, dtype=target))
        casts = () if source == target else (Cast(source, target, 1, 4 * target.itemsize),)
        assert plan.casts == casts
        assert (plan.span_bytes == 0) == bool(casts)

    @pytest.mark.parametrize("other", [INT64, BOOL, BY_NAME["float8_e4m3fn"], BY_NAME["complex64"]])
    def test_no_other_cast_is_ever_made(self, other: DType) -> None:
        for a, b in ((other, FLOAT32), (FLOAT32, other)):
            one = tensor((4,), dtype=a)
            with pytest.raises(LossError, match=f"casting {a} to {b} is not supported") as caught:
                make_plan(checkpoint(one), written(one, dtype=b))
            assert caught.value.fqn == "w"


class TestThePlan:
    @given(shapes(), st.data())
    def test_its_copies_fill_each_slot_with_what_belongs_there(self, shape: Shape, data: st.DataObject) -> None:
        """For any pieces and slots, numpy copies give the target the tensor's elements."""
        store: Store = {}
        values = np.arange(prod(shape)).reshape(shape)
        source = tensor_of("w", values, data.draw(stored(values, "in", store)))
        slots, at = [], 0
        for region in data.draw(tilings(shape)):
            sizes = region.sizes if isinstance(region, Box) else (region.numel,)
            extent = Extent.contiguous("out", at, FLOAT32, sizes)
            slots.append(Slot(("w", "weight"), region, extent))
            at = extent.end
        file = TargetFile("out", at, (), tuple(slots))
        plan = make_plan(checkpoint(source), Target((file,)))
        output = np.full(at // 4, -1)
        copies = all_copies(plan, file)
        for copy in copies:
            assert copy.source.shape == copy.target.shape
            output[positions(copy.target)] = store[copy.source.path][positions(copy.source)]
        expected = [indices(slot.region, shape).reshape(-1) for slot in slots]
        assert (output == np.concatenate(expected)).all()
        assert plan.num_copies == len(copies)
        assert plan.moved_bytes == plan.total_bytes == at
        assert plan.span_bytes == sum(copy.target.nbytes for copy in copies if copy.is_span)

    @given(shapes(min_size=1), st.data())
    def test_positions_in_a_region_have_an_index(self, shape: Shape, data: st.DataObject) -> None:
        region = data.draw(st.sampled_from(data.draw(tilings(shape))))
        for position, element in enumerate(indices(region, shape).flat):
            assert first_index(region, shape, position) == np.unravel_index(element, shape)
        found = [index for box in region_boxes(region, shape) for index in indices(box, shape).flat]
        assert found == list(indices(region, shape).flat)


class TestReplicas:
    def test_a_rank_is_chosen(self) -> None:
        sources = [Whole(Extent.contiguous(f"rank{rank}.bin", 0, FLOAT32, (4,)), rank) for rank in range(3)]
        replicated = Tensor("w", "weight", FLOAT32, (4,), sources[0], replicas=tuple(sources[1:]))
        alone = tensor()._replace(fqn="v")
        for rank in range(3):
            chosen = choose_replica(checkpoint(replicated, alone), rank)
            assert chosen.tensors["w", "weight"].source == sources[rank]
            assert not chosen.tensors["w", "weight"].replicas
            assert chosen.tensors["v", "weight"] == alone
        with pytest.raises(LossError, match="rank 3 holds no replica") as caught:
            choose_replica(checkpoint(replicated), 3)
        assert caught.value.fqn == "w"

    def test_what_no_rank_holds_is_still_compared(self) -> None:
        sources = [Whole(Extent.contiguous(f"rank{rank}.bin", 0, FLOAT32, (4,)), rank) for rank in range(3)]
        again = TiedCopy(sources[2])
        tied = Tensor("w", "weight", FLOAT32, (4,), sources[0], replicas=(sources[1], again))
        assert choose_replica(checkpoint(tied), 1).tensors["w", "weight"] == tied._replace(
            source=sources[1], replicas=(again,)
        )
        with pytest.raises(UsageError, match="no tensor is stored by several ranks"):
            choose_replica(checkpoint(tied._replace(replicas=(again,))), 0)
