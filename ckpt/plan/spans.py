"""Contiguous copies side by side in arrays: what a plan of many small pieces consists of."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ckpt.plan.dtypes import DType


@dataclass(frozen=True, slots=True, eq=False)
class Spans:
    """Copies of contiguous elements to one target file, rising in `target`: one row each.

    Row i takes `numel[i]` elements of `source_dtype` from byte `source[i]` of the file `paths[path[i]]` on to byte
    `target[i]` of the target file, as elements of `target_dtype`.
    """

    source_dtype: DType
    target_dtype: DType
    paths: Sequence[str]
    path: NDArray[np.int32]
    source: NDArray[np.int64]
    target: NDArray[np.int64]
    numel: NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.numel)

    @property
    def nbytes(self) -> int:
        """Bytes that are written."""
        return int(self.numel.sum()) * self.target_dtype.itemsize
