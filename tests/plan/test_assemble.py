"""`ckpt/plan/assemble.py`: tensors assembled from ranks' parts, with replicas."""

from __future__ import annotations

import pytest

from ckpt.errors import CorruptError
from ckpt.plan.assemble import assemble, whole_copies
from ckpt.plan.dtypes import BFLOAT16, FLOAT32, DType
from ckpt.plan.tensors import Box, Extent, Fragment


def part(start: int, rows: int, rank: int, dtype: DType = FLOAT32) -> tuple[tuple[int, int], Fragment]:
    box = Box((start, 0), (rows, 3))
    return (4, 3), Fragment(box, Extent.contiguous(f"{rank}.pt", 0, dtype, box.sizes), rank)


def test_a_region_that_several_ranks_hold_has_replicas() -> None:
    tensor = assemble("w", "weight", [part(0, 2, 0), part(2, 2, 1), part(0, 2, 2), part(4, 0, 3)], BFLOAT16)
    copies = [[f.rank for f in source.fragments(tensor.shape)] for source in (tensor.source, *tensor.replicas)]
    assert copies == [[0, 1], [2, 1]]
    assert (tensor.shape, tensor.dtype, tensor.native) == ((4, 3), FLOAT32, BFLOAT16)
    assert assemble("w", "weight", [part(0, 4, 0)], FLOAT32).native is None


def test_a_tensor_without_elements_has_no_part() -> None:
    assert list(assemble("w", "weight", [part(0, 0, 0)]).source.fragments((0, 3))) == []


@pytest.mark.parametrize("other", [part(2, 2, 1, BFLOAT16), ((5, 3), part(2, 2, 1)[1])], ids=["dtype", "shape"])
def test_parts_of_different_tensors_are_refused(other: tuple[tuple[int, int], Fragment]) -> None:
    with pytest.raises(CorruptError, match="store different tensors") as caught:
        assemble("w", "exp_avg", [part(0, 2, 0), other])
    assert (caught.value.rank, caught.value.fqn, str(caught.value.path)) == (1, "w", "1.pt")


def test_each_copy_is_whole() -> None:
    assert whole_copies([]) == []
    assert whole_copies([("a", 1), ("b", 2), ("a", 3), ("a", 4), ("b", 5)]) == [[1, 2], [3, 5], [4, 5]]
