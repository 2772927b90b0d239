"""`ckpt/runs/data_loaders.py`: torchtitan's loaders on other ranks, compared with their own next samples."""

from __future__ import annotations

import copy
import json
import pickle
import shutil
from collections.abc import Callable
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
from torch.utils.data import DistributedSampler

import ckpt
from ckpt import api
from ckpt.plan.checkpoint import Checkpoint
from ckpt.runs.data_loaders import loader_states, with_data_positions
from tests.support.commands import ckpt as run_ckpt
from tests.support.places import FIXTURES

RUN = FIXTURES / "torchtitan-loader"
TRUTH = json.loads((RUN / "truth" / "samples.json").read_text())
SAMPLES, SEED = 403, 5


def loaders_of(path: Path | str) -> dict[str, Any]:
    return dict(api.open(path).state.private["torch"]["dataloader"])


def next_samples(loaders: dict[str, Any]) -> list[int]:
    """Return the samples as `StatefulDistributedSampler` continues them: it skips `yielded` of torch's sampler."""
    ranks, rest = loaders["world_size"], []
    for rank in range(ranks):
        state = pickle.loads(loaders[f"dp_rank_{rank}"])
        main = state["_snapshot"]["_main_snapshot"] if "_snapshot" in state else state
        yielded = main["_sampler_iter_state"]["sampler_state"]["yielded"]
        sampler = DistributedSampler(range(SAMPLES), ranks, rank, seed=SEED)  # type: ignore[arg-type]
        rest.append(list(islice(iter(sampler), yielded, None)))
    return [sample for dealt in zip(*rest, strict=False) for sample in dealt][:100]


@pytest.mark.parametrize(("step", "ranks"), [("step-4", 1), ("step-4", 4), ("step-6", 1), ("step-6", 3), ("step-6", 4)])
def test_other_ranks_read_the_same_samples(step: str, ranks: int, tmp_path: Path) -> None:
    before = loaders_of(RUN / step)
    assert next_samples(before) == TRUTH[step] and len(TRUTH[step]) == 100
    done = run_ckpt("convert", "auto", "dcp", RUN / step, "--world-size", ranks, "-o", tmp_path / "out")
    total = 2 * 4 * int(step[-1])
    assert done.code == 0 and f"data position: {total} samples, so {total // ranks} on each of" in done.err, done.err
    after = loaders_of(tmp_path / "out")
    assert after.keys() == {"world_size", *(f"dp_rank_{rank}" for rank in range(ranks))}
    assert next_samples(after) == TRUTH[step]
    kept, given = (pickle.loads(one["dp_rank_0"]) for one in (after, before))
    assert kept.keys() == given.keys() and kept != given


@pytest.mark.parametrize(
    ("step", "ranks", "told"),
    [
        ("step-4", 3, "not carried from 2 ranks to 3: 32 samples are no multiple"),
        ("step-8", 1, "(rank 0 has read 8 of its batches, rank 1 has read 8 of its batches)"),
    ],
)
def test_an_unproved_position_is_left_out(step: str, ranks: int, told: str, tmp_path: Path) -> None:
    done = run_ckpt("convert", "auto", "dcp", RUN / step, "--world-size", ranks, "-o", tmp_path / "out")
    assert done.code == 0 and told in done.err, done.err
    assert "dataloader" not in api.open(tmp_path / "out").state.private["torch"]


def test_the_same_ranks_keep_their_states(tmp_path: Path) -> None:
    for step in TRUTH:
        done = run_ckpt("convert", "auto", "dcp", RUN / step, "--world-size", 2, "-o", tmp_path / step)
        assert done.code == 0 and "data position" not in done.err
        assert loaders_of(tmp_path / step) == loaders_of(RUN / step)


def test_resume_converts_the_position(tmp_path: Path) -> None:
    run = Path(shutil.copytree(RUN, tmp_path / "run"))
    notes: list[str] = []
    assert ckpt.resume(run, tag="step-6", world_size=2, say=notes.append) == str(run / "step-6")
    assert not any("data position" in note for note in notes)
    place = ckpt.resume(run, tag="step-6", world_size=4, say=notes.append)
    assert next_samples(loaders_of(place)) == TRUTH["step-6"]
    assert ckpt.resume(run, tag="step-8", world_size=4, say=notes.append) == str(run / "step-8")
    assert any("rank 1 has read 8 of its batches" in note for note in notes)


def changed(rank: int, change: Callable[[dict[str, Any]], object]) -> Checkpoint:
    checkpoint = api.open(RUN / "step-4")
    entry = loaders_of(RUN / "step-4")
    state = copy.deepcopy(pickle.loads(entry[f"dp_rank_{rank}"]))
    change(state)
    entry[f"dp_rank_{rank}"] = pickle.dumps(state)
    return replace(checkpoint, state=replace(checkpoint.state, private={"torch": {"dataloader": entry}}))


@pytest.mark.parametrize(
    "change",
    [
        {"_iterator_finished": True},
        {"_num_yielded": 5},
        {"_sampler_iter_yielded": 5, "_num_yielded": 5},
        {"_sampler_iter_state": {"samples_yielded": 16}},
        {"_sampler_iter_state": {"samples_yielded": 16, "sampler_state": {"yielded": 20}}},
        {"_sampler_iter_state": {"samples_yielded": 20, "sampler_state": {"yielded": 20}}, "_sampler_iter_yielded": 5},
        {"_sampler_iter_state": None},
        {"dataset_state": {"sample_idx": 1}},
        {"fetcher_state": {"fetcher_ended": False}},
        {"_steps_since_snapshot": 1},
        {"_snapshot": {"_main_snapshot": None}},
    ],
)
def test_only_equal_counts_of_a_distributed_sampler_prove_a_position(change: dict[str, Any]) -> None:
    assert (states := loader_states(changed(1, lambda state: None), 4)) is not None and states.on(4)
    states = loader_states(changed(1, lambda state: state.update(change)), 4)
    assert states is not None and states.on(4) is None and "not carried" in states.note(4)


def test_model_parallel_ranks_keep_their_states() -> None:
    """4 ranks with 2 loaders don't tell the number of loaders on 8 ranks."""
    checkpoint = replace(api.open(RUN / "step-4"), world_size=4)
    assert with_data_positions(checkpoint, 8) == (checkpoint, ())


@pytest.mark.parametrize("value", [b"", b"\x80\x04N.", b"cos\nsystem\n."])
def test_an_unreadable_state_proves_nothing(value: bytes) -> None:
    checkpoint = api.open(RUN / "step-4")
    entry = {"dp_rank_0": value, "dp_rank_1": value, "world_size": 2}
    changed = replace(checkpoint, state=replace(checkpoint.state, private={"torch": {"dataloader": entry}}))
    left, (note,) = with_data_positions(changed, 4)
    assert "rank 0 has read an unknown number" in note and left.state.private == {"torch": {}}
