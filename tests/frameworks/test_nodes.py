"""`converters/megatron/dist/write.py`, `optimizer.py`: runs with LLM-jp v4's layout resume on other nodes."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from tests.frameworks.runs import Held, Job, run
from tests.support.commands import ckpt

pytestmark = pytest.mark.slow

DP4 = Job("dp4", 4, ep=2, steps=2)
PP2 = Job("pp2", 4, pp=2, ep=2, vpp=2, steps=2)


@dataclass(frozen=True)
class Move:
    """A run, the job to resume it on, ckpt's options, and Megatron-LM's error without ckpt."""

    source: Job
    target: Job
    options: str
    says: str


MOVES = [
    Move(DP4, Job("dp2", 2, ep=2), "--world-size 2", "Global shape mismatch"),
    Move(DP4, Job("dp6", 6, ep=2), "--world-size 6", "Global shape mismatch"),
    Move(DP4, Job("dp3", 3), "--world-size 3 --ep 1", "from model not in state dict"),
    Move(PP2, Job("pp3", 6, pp=3, ep=2, vpp=2), "--world-size 6 --pp 3", "not supported for DistributedOptimizer"),
]


@pytest.fixture(scope="session")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("nodes")


@pytest.fixture(scope="session")
def trained(home: Path) -> dict[str, Held]:
    """Return both runs, their uninterrupted continuations, and Megatron-LM's errors on other ranks."""
    jobs = [replace(source, save=home / f"{source.name} run") for source in (DP4, PP2)]
    jobs += [replace(source, name=f"{source.name} goes on", load=home / f"{source.name} run") for source in (DP4, PP2)]
    jobs += [
        replace(move.target, name=f"stock {move.target.name}", load=home / f"{move.source.name} run", fails=True)
        for move in MOVES
    ]
    return run(jobs, home / "trained")


@pytest.fixture(scope="session")
def moved(home: Path, trained: dict[str, Held]) -> dict[str, Held]:
    """Return what Megatron-LM's ranks hold after they load ckpt's output, and two steps later."""
    jobs = []
    for move in MOVES:
        output = home / move.target.name
        words = [
            "megatron-dist",
            "megatron-dist",
            home / f"{move.source.name} run",
            *move.options.split(),
            "-o",
            output,
        ]
        result = ckpt("convert", *words)
        assert result.code == 0, result.err
        jobs.append(replace(move.target, load=output))
        jobs.append(replace(move.target, name=f"{move.target.name} goes on", load=output, steps=2))
    return run(jobs, home / "moved")


@pytest.mark.parametrize("move", MOVES, ids=lambda move: move.target.name)
def test_megatron_lm_alone_does_not_load_it(move: Move, trained: dict[str, Held]) -> None:
    assert move.says in trained[f"stock {move.target.name}"].facts["error"]


@pytest.mark.parametrize("move", MOVES, ids=lambda move: move.target.name)
def test_every_bit_is_there_on_the_other_ranks(move: Move, trained: dict[str, Held], moved: dict[str, Held]) -> None:
    known, found = trained[move.source.name], moved[move.target.name]
    assert {role for _, role in known.tensors} == {"weight", "master", "exp_avg", "exp_avg_sq"}
    assert found.tensors.keys() == known.tensors.keys()
    assert [key for key in known.tensors if found.tensors[key] != known.tensors[key]] == []
    for name in ("iteration", "consumed", "scheduler", "steps"):
        assert found.facts[name] == known.facts[name] or name == "iteration", name
    assert found.facts["iteration"] == 2
    if move.source.ep == move.target.ep:
        assert found.facts["groups"] == known.facts["groups"]


@pytest.mark.parametrize("move", MOVES, ids=lambda move: move.target.name)
def test_the_next_losses_are_those_of_the_run(move: Move, trained: dict[str, Held], moved: dict[str, Held]) -> None:
    known = trained[f"{move.source.name} goes on"].facts["losses"]
    assert moved[f"{move.target.name} goes on"].facts["losses"] == pytest.approx(known, rel=2e-3)


def test_random_states_are_loaded_where_stages_are_the_same(trained: dict[str, Held], moved: dict[str, Held]) -> None:
    assert set(moved["dp2"].facts["random"]) == {trained["dp4"].facts["random"][0]}
