"""Contiguous copies side by side in arrays: what a plan of many small pieces consists of."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from ckpt.plan.dtypes import DType

#: A piece of a target file that is hashed on its own, as offset and length in bytes.
Piece = tuple[int, int]


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

    def take(self, which: NDArray[np.int64] | slice) -> Spans:
        """These rows alone."""
        return replace(
            self,
            path=self.path[which],
            source=self.source[which],
            target=self.target[which],
            numel=self.numel[which],
        )

    @property
    def nbytes(self) -> int:
        """Bytes that are written."""
        return int(self.numel.sum()) * self.target_dtype.itemsize


@dataclass(slots=True)
class Rows:
    """The contiguous copies of a target file while they are being found, in any order."""

    _paths: dict[str, int] = field(default_factory=dict)
    _rows: dict[tuple[DType, DType], array[int]] = field(default_factory=dict)

    def of(self, source_dtype: DType, target_dtype: DType) -> array[int]:
        """The rows of one pair of dtypes, to which four numbers are added for each copy.

        They are byte offset in the target, number of the path, byte offset in the source, number of elements.
        """
        key = source_dtype, target_dtype
        found = self._rows.get(key)
        if found is None:
            found = self._rows[key] = array("q")
        return found

    def path(self, path: str) -> int:
        """The number of a path."""
        return self._paths.setdefault(path, len(self._paths))

    def spans(self) -> tuple[Spans, ...]:
        found, paths = [], tuple(self._paths)
        for dtypes, numbers in self._rows.items():
            rows = np.frombuffer(numbers, np.int64).reshape(-1, 4)
            target, path, source, numel = rows[np.argsort(rows[:, 0])].T
            columns = (np.ascontiguousarray(column) for column in (source, target, numel))
            found.append(Spans(*dtypes, paths, path.astype(np.int32), *columns))
        return tuple(found)
