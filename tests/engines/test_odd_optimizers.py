"""`converters/deepspeed/flat_groups.py`: DeepSpeed's engine loads optimizers of its own suite on other ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from ckpt import api
from ckpt.plan.checkpoint import Layout
from tests.engines.odd_optimizers import KINDS, STEPS
from tests.support.engines import DEEPSPEED, fork_once

pytestmark = pytest.mark.slow

RANKS = {"save": 3, "load": 2}
#: Elements of the two groups. The rest of the flat buffers is padding.
NUMELS = (40, 18)


@pytest.fixture(scope="session")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return each engine's state when it saved, and the state on other ranks after loading."""
    folder = tmp_path_factory.mktemp("odd")
    for what, ranks in RANKS.items():
        starts = [(ranks, "tests.engines.odd_optimizers", [what, str(folder)])]
        fork_once(folder, starts, DEEPSPEED)
        for name, kind in KINDS.items() if what == "save" else ():
            plan = api.plan(api.open(folder / name), f"zero{kind.stage}", Layout(world_size=RANKS["load"]))
            plan.run(folder / f"{name}-converted")
    return folder


def held(folder: Path, name: str, what: str) -> list[dict[str, Any]]:
    return [torch.load(folder / f"{name}-{what}-{rank}.pt", weights_only=False) for rank in range(RANKS[what])]


def whole(ranks: list[dict[str, Any]], group: int, role: str) -> torch.Tensor:
    parts = [rank["masters"][group] if role == "masters" else rank["states"][group][role] for rank in ranks]
    return torch.cat(parts)[: NUMELS[group]]


@pytest.mark.parametrize("name", [name for name in KINDS if name.startswith("hybrid")])
def test_a_step_that_is_an_int_and_one_that_is_a_tensor(loaded: Path, name: str) -> None:
    for what in RANKS:
        for rank in held(loaded, name, what):
            for state in rank["states"]:
                assert state["integer_step"] == STEPS and type(state["integer_step"]) is int
                assert torch.equal(state["tensor_step"], torch.full((1,), float(STEPS)))
                assert state.keys() == {"integer_step", "tensor_step"}


@pytest.mark.parametrize("name", [name for name in KINDS if name.startswith("step")])
def test_a_step_that_is_in_the_groups(loaded: Path, name: str) -> None:
    before, after = held(loaded, name, "save"), held(loaded, name, "load")
    assert all(rank["steps"] == [STEPS, STEPS] for rank in (*before, *after))
    for group in range(len(NUMELS)):
        for role in ("exp_avg", "exp_avg_sq"):
            assert torch.equal(whole(before, group, role), whole(after, group, role)), (group, role)


@pytest.mark.parametrize("name", [name for name, kind in KINDS.items() if kind.stage < 3])
def test_masters(loaded: Path, name: str) -> None:
    before, after = held(loaded, name, "save"), held(loaded, name, "load")
    for group in range(len(NUMELS)):
        assert torch.equal(whole(before, group, "masters"), whole(after, group, "masters"))
