"""Groups of 32 numbers in rows."""

from __future__ import annotations

import numpy as np

from ckpt.move import groups


def test_rows_keep_each_groups_maximum_and_order() -> None:
    numbers = np.random.default_rng(0).integers(0, 1 << 15, (999, groups.SIZE)).astype(np.uint16)
    numbers[: groups.SIZE] = np.eye(groups.SIZE, dtype=np.uint16)  # a maximum at each place
    rows, largest = groups.in_rows(numbers), numbers.max(axis=1)
    assert (groups.largest_in_rows(rows) == largest).all()
    found = np.empty(numbers.shape, np.uint8)
    groups.in_groups((rows >= groups.for_rows(largest)).view(np.uint8), found)
    assert (found == (numbers >= largest[:, None])).all()
