"""`ckpt/containers/dcp/write.py`: ranks get the same shards as in torch."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from ckpt.containers.dcp.write import dim0_boxes
from ckpt.plan.tensors import Box


@given(st.lists(st.integers(0, 9), max_size=3).map(tuple), st.integers(1, 17))
def test_tensors_are_cut_as_torch_chunks_them(shape: tuple[int, ...], num_ranks: int) -> None:
    import torch

    boxes = list(dim0_boxes(shape, num_ranks))
    if not shape or 0 in shape:
        assert boxes == [Box((0,) * len(shape), shape)]
        return
    start = 0
    for box, piece in zip(boxes, torch.empty(shape).chunk(num_ranks), strict=True):
        assert (box.offsets[0], box.sizes) == (start, tuple(piece.shape))
        start += box.sizes[0]
