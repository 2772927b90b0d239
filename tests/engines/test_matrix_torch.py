"""`converters/pytorch/dcp.py`, `full.py`, `fsdp_ranks.py`: torch's checkpoints, converted into every format."""

from __future__ import annotations

from typing import Any

import pytest

from tests.support.matrix import Cell, Matrix, build_matrix, cells_from, check

CELLS = cells_from(("dcp", "full", "fsdp-ranks", "hf"))
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def matrix(tmp_path_factory: pytest.TempPathFactory) -> Matrix:
    return build_matrix(tmp_path_factory.mktemp("matrix"), CELLS)


@pytest.mark.parametrize("cell", CELLS, ids=lambda cell: cell.name)
def test_equals_the_live_engine(matrix: Matrix, cell: Cell, tables: Any) -> None:
    check(matrix, cell, tables)
