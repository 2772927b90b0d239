"""A plan's copies, one by one."""

from __future__ import annotations

import numpy as np

from ckpt.plan.checkpoint import TargetFile
from ckpt.plan.planner import Copy, Plan
from ckpt.plan.tensors import Extent


def all_copies(plan: Plan, file: TargetFile) -> list[Copy]:
    """Return every copy to a target file, including copies stored as arrays."""
    copies = [copy for _, filling in plan.copies(file) for copy in filling]
    for spans in plan.spans(file):
        assert (np.diff(spans.target) > 0).all()
        for path, source, target, numel in zip(spans.path, spans.source, spans.target, spans.numel, strict=True):
            shape = (int(numel),)
            read = Extent.contiguous(spans.paths[path], int(source), spans.source_dtype, shape)
            copies.append(Copy(read, Extent.contiguous(file.name, int(target), spans.target_dtype, shape)))
    return copies
