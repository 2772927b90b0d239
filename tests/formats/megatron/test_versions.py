"""`converters/megatron/dist/read.py`, `optimizer.py`, `write.py`: runs of megatron-core 0.15, 0.17 and 0.18."""

from __future__ import annotations

from pathlib import Path

import pytest

import ckpt
from ckpt.plan.checkpoint import Layout
from tests.support.describing import content
from tests.support.engines import Truth
from tests.support.megatron_runs import check_read

NAMES = [
    "megatron-0.15-fully",
    *(f"megatron-{version}-{form}" for version in ("0.17", "0.18") for form in ("fully", "dp")),
]


@pytest.fixture(params=NAMES)
def folder(request: pytest.FixtureRequest, fixtures: Path) -> Path:
    return fixtures / str(request.param)


def test_every_bit_is_what_the_ranks_held(folder: Path) -> None:
    check_read(ckpt.open(folder), Truth.load(folder / "truth" / "iter_0000002.safetensors"))


@pytest.mark.parametrize("layout", [{}, {"world_size": 6}, {"world_size": 1, "ep": 1}])
def test_every_bit_is_in_what_is_written_for_other_ranks(folder: Path, tmp_path: Path, layout: dict[str, int]) -> None:
    source = ckpt.open(folder)
    ckpt.plan(source, "megatron-dist", Layout(**layout)).run(tmp_path / "out")
    written = ckpt.open(tmp_path / "out", "megatron-dist")
    assert {key: content(one) for key, one in written.tensors.items()} == {
        key: content(one) for key, one in source.tensors.items()
    }
    assert written.state.scalars == source.state.scalars and written.state.step == 2
