"""`converters/names/megatron/architectures`, `converters/megatron/chunks.py`: tables on megatron-core's ranks.

`make test` takes tables with every kind of row. tests/names/test_megatron.py compares all of them in one process.
"""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.engines.megatron_ranks import RANKS
from tests.names import test_megatron as tables
from tests.support.engines import fork
from tests.support.sampling import sample
from tests.support.tiny_sizes import even_sizes

pytestmark = pytest.mark.slow

#: Other orders of fp32 sums differ by a few units in the last place, relative to the largest logit.
TOLERANCE = 3e-6

ARCHITECTURES = sample(
    tables.ARCHITECTURES, lambda name: [(row.megatron, row.kind) for row in tables.table_of(name).rows]
)


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """Return the outcomes by architecture."""
    folder = tmp_path_factory.mktemp("tables")
    cases = [(name, even_sizes(name, tables.CASES[name][1])) for name in ARCHITECTURES]
    worker = "tests.engines.megatron_ranks"
    fork([(RANKS, worker, [str(folder), json.dumps(cases)])], ["tests.support.megatron_imports"])
    return dict(json.loads((folder / "outcomes.json").read_text()))


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_logits_of_ranks_are_transformers(loaded: dict[str, dict[str, Any]], architecture: str) -> None:
    """Each rank also loaded its file strictly."""
    largest = loaded[architecture]["largest"]
    assert largest > 0.5
    assert loaded[architecture]["apart"] < TOLERANCE * max(1, largest)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_each_rank_takes_the_same_from_torch_dist(loaded: dict[str, dict[str, Any]], architecture: str) -> None:
    assert loaded[architecture]["unlike"] == []


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_what_ranks_save_is_the_hubs_bit_for_bit(loaded: dict[str, dict[str, Any]], architecture: str) -> None:
    assert loaded[architecture]["changed"] == []
