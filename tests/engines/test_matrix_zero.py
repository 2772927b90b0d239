"""`converters/deepspeed/zero.py`, `universal.py`, `write.py`: DeepSpeed's checkpoints, converted into every format."""

from __future__ import annotations

from typing import Any

import pytest

from tests.support.matrix import DAMAGES, Cell, Damage, Matrix, build_matrix, cells_from, check, check_that_it_is_seen

CELLS = cells_from(("zero1", "zero2", "zero3", "universal"))
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def matrix(tmp_path_factory: pytest.TempPathFactory) -> Matrix:
    return build_matrix(tmp_path_factory.mktemp("matrix"), CELLS, DAMAGES)


@pytest.mark.parametrize("cell", CELLS, ids=lambda cell: cell.name)
def test_equals_the_live_engine(matrix: Matrix, cell: Cell, tables: Any) -> None:
    check(matrix, cell, tables)


@pytest.mark.parametrize("damage", DAMAGES, ids=lambda damage: damage.name)
def test_one_bit_and_two_tensors_in_each_others_place_are_seen(matrix: Matrix, damage: Damage) -> None:
    check_that_it_is_seen(matrix, damage)
