"""`converters/megatron/optimizer.py`, `dist/optimizer.py`: Muon and Lion, plain and layer-wise."""

from __future__ import annotations

from dataclasses import dataclass, replace
from importlib import metadata
from pathlib import Path

import pytest
from packaging.version import Version

from tests.frameworks.runs import Held, Job, run
from tests.support.commands import ckpt

pytestmark = pytest.mark.slow

MUON = "--optimizer muon --muon-momentum 0.9"
LAYER_WISE = "--use-distributed-optimizer --overlap-grad-reduce"
#: Runs on one rank, as gloo can't gather their parts of unequal lengths.
NO_LAYOUT = f"{MUON} {LAYER_WISE} --no-use-layer-wise-param-layout"
GATHERED = "--moe-token-dispatcher-type allgather"
COUNTED = "--account-for-embedding-in-pipeline-split --account-for-loss-in-pipeline-split"
PP4 = f"--world-size 4 --tp 1 --pp 4 --vpp 3 {COUNTED}"
PLAIN, WISE = Job("plain", 2, MUON), Job("wise", 4, f"{MUON} {LAYER_WISE}", ep=2)


@dataclass(frozen=True)
class Move:
    """A run, the job to resume it on, and ckpt's options."""

    source: Job
    target: Job
    options: str


MOVES = [
    Move(PLAIN, Job("plain-ep2", 4, MUON, ep=2), "--world-size 4 --ep 2"),
    Move(Job("plain-pp2", 4, MUON, pp=2, ep=2, vpp=2), Job("plain-pp1", 2, MUON), "--world-size 2 --pp 1 --ep 1"),
    Move(Job("plain-tp2", 2, f"{MUON} {GATHERED}", tp=2), Job("plain-pp4", 4, MUON, pp=4, vpp=3), PP4),
    Move(WISE, Job("wise-dp2", 2, f"{MUON} {LAYER_WISE}", ep=2), "--world-size 2"),
    Move(
        WISE, Job("wise-pp2", 4, f"{MUON} {LAYER_WISE}", pp=2, ep=2, vpp=2), "--world-size 4 --pp 2 --vpp 2 " + COUNTED
    ),
    Move(Job("no-layout", 1, NO_LAYOUT), Job("no-layout-again", 1, NO_LAYOUT), ""),
    Move(Job("lion", 2, "--optimizer lion", ep=2), Job("lion-dp4", 4, "--optimizer lion", ep=2), "--world-size 4"),
]
#: megatron-core 0.18 without EP: each layer's `allreduce` covers EP only, but expert gradients are summed over ranks
#: that share dense weights. Copies of an expert diverge in the first step, with any optimizer.
LACKING = MOVES[2:3] if Version(metadata.version("megatron-core")) < Version("0.19") else []
PARAMETERS = [
    pytest.param(
        move,
        id=f"{move.source.name} to {move.target.name}",
        marks=pytest.mark.skipif(
            move in LACKING, reason="megatron-core before 0.19 trains no ETP 1 under TP 2 and EP 1"
        ),
    )
    for move in MOVES
]
REFUSED = [
    Job("torch", 2, f"{MUON} --ckpt-format torch", ep=2),
    Job("torch-wise", 1, f"{NO_LAYOUT} --ckpt-format torch"),
    Job("torch-soap", 2, "--optimizer soap --ckpt-format torch", ep=2),
]


@pytest.fixture(scope="session")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("muon")


@pytest.fixture(scope="session")
def trained(home: Path) -> dict[str, Held]:
    jobs = dict.fromkeys([*(move.source for move in MOVES if move not in LACKING), *REFUSED])
    return run([replace(job, steps=2, save=home / f"{job.name} run") for job in jobs], home / "trained")


@pytest.fixture(scope="session")
def moved(home: Path, trained: dict[str, Held]) -> dict[str, Held]:
    jobs = []
    for move in (move for move in MOVES if move not in LACKING):
        source, output = home / f"{move.source.name} run", home / move.target.name
        result = ckpt("convert", "megatron-dist", "megatron-dist", source, *move.options.split(), "-o", output)
        assert result.code == 0, result.err
        jobs += [
            replace(move.target, load=output),
            replace(move.source, name=f"{move.source.name} goes on", load=home / f"{move.source.name} run", steps=1),
            replace(move.target, name=f"{move.target.name} goes on", load=output, steps=1),
        ]
    return run(jobs, home / "moved")


@pytest.mark.parametrize("move", PARAMETERS)
def test_every_bit_is_there_on_the_other_ranks(move: Move, trained: dict[str, Held], moved: dict[str, Held]) -> None:
    known, found = trained[move.source.name], moved[move.target.name]
    matrices = "exp_avg" if "lion" in move.source.arguments else "momentum_buffer"
    assert {role for _, role in known.tensors} == {"weight", "master", matrices, "exp_avg", "exp_avg_sq"}
    assert found.tensors.keys() == known.tensors.keys()
    assert [key for key in known.tensors if found.tensors[key] != known.tensors[key]] == []
    assert [found.facts[name] for name in ("scheduler", "steps")] == [
        known.facts[name] for name in ("scheduler", "steps")
    ]
    if (move.source.tp, move.source.ep) == (move.target.tp, move.target.ep):
        assert found.facts["groups"] == known.facts["groups"]
    known, found = moved[f"{move.source.name} goes on"], moved[f"{move.target.name} goes on"]
    assert found.facts["losses"] == pytest.approx(known.facts["losses"], rel=2e-3)


@pytest.mark.parametrize("move", PARAMETERS)
def test_groups_have_the_parameters_that_they_had(move: Move, home: Path, trained: dict[str, Held]) -> None:
    import ckpt as library

    read = library.open(home / f"{move.source.name} run")
    found = {(str(group.options.get("optimizer")), frozenset(group.fqns)) for group in read.state.param_groups}
    assert len(found) == len(trained[move.source.name].facts["groups"])
    assert {members for _, members in found} == {
        frozenset(members) for _, members in trained[move.source.name].facts["groups"]
    }


@pytest.mark.parametrize("job", REFUSED, ids=lambda job: job.name)
def test_what_is_not_read_is_refused_by_name(job: Job, home: Path, trained: dict[str, Held]) -> None:
    folder = home / f"{job.name} run"
    kind = job.arguments.split()[1]
    for words in (("check", folder), ("convert", "megatron", "megatron", folder, "--tp", "2", "-o", home / "never")):
        result = ckpt(*words)
        assert result.code == 3 and f"Megatron's optimizer '{kind}'" in result.err
    assert not (home / "never").exists()
