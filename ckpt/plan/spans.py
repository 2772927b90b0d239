"""Contiguous copies in arrays, for plans with many small pieces."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from ckpt.plan.dtypes import DType

#: Offset and length in bytes.
Piece = tuple[int, int]


@dataclass(frozen=True, slots=True, eq=False)
class Spans:
    """Contiguous copies to one target file in ascending `target` order, one row each.

    Row i copies `numel[i]` elements from byte `source[i]` in the file `paths[path[i]]` to byte `target[i]`.
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

    def take(self, which: NDArray[np.int64] | slice) -> Spans:
        columns = self.path[which], self.source[which], self.target[which], self.numel[which]
        return Spans(self.source_dtype, self.target_dtype, self.paths, *columns)

    @property
    def nbytes(self) -> int:
        return int(self.numel.sum()) * self.target_dtype.itemsize


@dataclass(slots=True)
class Rows:
    """Collector for a target file's contiguous copies, in any order."""

    _paths: dict[str, int] = field(default_factory=dict)
    _rows: dict[tuple[DType, DType], array[int]] = field(default_factory=dict)

    def of(self, source_dtype: DType, target_dtype: DType) -> array[int]:
        """Add four numbers for each copy: target offset, path, source offset, elements."""
        key = source_dtype, target_dtype
        found = self._rows.get(key)
        if found is None:
            found = self._rows[key] = array("q")
        return found

    def path(self, path: str) -> int:
        return self._paths.setdefault(path, len(self._paths))

    def spans(self) -> tuple[Spans, ...]:
        found, paths = [], tuple(self._paths)
        for dtypes, numbers in self._rows.items():
            rows = np.frombuffer(numbers, np.int64).reshape(-1, 4)
            target, path, source, numel = rows[np.argsort(rows[:, 0])].T
            columns = (np.ascontiguousarray(column) for column in (source, target, numel))
            found.append(Spans(*dtypes, paths, path.astype(np.int32), *columns))
        return tuple(found)
