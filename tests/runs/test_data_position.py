"""`ckpt/runs/data_position.py`: notes on other numbers of ranks, compared with Accelerate's own shards of a sampler."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from ckpt.runs.data_position import position_notes
from tests.support.commands import ckpt
from tests.support.places import FIXTURES

STEPS, BATCH, ACCUMULATED, RANKS = 3, 2, 2, 2
TOTAL = BATCH * ACCUMULATED * RANKS


def step_of(folder: Path, **arguments: Any) -> Path:
    (folder / "trainer_state.json").write_text(json.dumps({"global_step": STEPS, "train_batch_size": BATCH}))
    torch.save({"gradient_accumulation_steps": ACCUMULATED} | arguments, folder / "training_args.bin")
    return folder


def notes(step: Path, ranks: int | None) -> list[str]:
    return list(position_notes(step, [one.name for one in step.iterdir()], RANKS, ranks))


def next_samples(ranks: int, batch: int, accumulated: int) -> list[list[int]]:
    """Return the samples of each step after HF Trainer has skipped `STEPS` steps."""
    from accelerate.data_loader import BatchSamplerShard, SeedableRandomSampler
    from torch.utils.data import BatchSampler

    shards = []
    for rank in range(ranks):
        sampler = SeedableRandomSampler(range(200), generator=torch.Generator(), data_seed=7)
        shards.append(list(BatchSamplerShard(BatchSampler(sampler, batch, drop_last=False), ranks, rank)))
    batches = list(zip(*shards, strict=True))
    starts = range(STEPS * accumulated, len(batches), accumulated)
    return [sorted(n for ranks in batches[at : at + accumulated] for batch in ranks for n in batch) for at in starts]


@pytest.mark.parametrize(("ranks", "batch", "accumulated"), [(4, 2, 1), (1, 4, 2), (8, 1, 1), (4, 1, 2)])
def test_the_told_batch_takes_the_same_samples(ranks: int, batch: int, accumulated: int, tmp_path: Path) -> None:
    (note,) = notes(step_of(tmp_path), ranks)
    told = re.search(r"= 24; HF Trainer goes on there with .* = (\d+) on", note)
    assert told is not None and int(told[1]) == batch * accumulated
    expected = next_samples(RANKS, BATCH, ACCUMULATED)
    assert sum(map(len, expected)) > 100
    assert next_samples(ranks, batch, accumulated) == expected
    assert next_samples(ranks, 2 * batch, accumulated) != expected


def test_no_batch_fits(tmp_path: Path) -> None:
    (note,) = notes(step_of(tmp_path), 3)
    assert "can't continue on 3 ranks: 8 is not a multiple" in note


@pytest.mark.parametrize("ranks", [None, RANKS])
def test_same_ranks_need_no_note(ranks: int | None, tmp_path: Path) -> None:
    assert notes(step_of(tmp_path), ranks) == []


@pytest.mark.parametrize(
    "arguments",
    [
        {"gradient_accumulation_steps": None},
        {"group_by_length": True},
        {"train_sampling_strategy": "group_by_length"},
        {"accelerator_config": {"split_batches": True}},
    ],
)
def test_unproved_position(arguments: dict[str, Any], tmp_path: Path) -> None:
    (note,) = notes(step_of(tmp_path, **arguments), 4)
    assert "the files don't prove the sequences per step" in note


def test_accelerates_loader_counts_the_old_ranks(tmp_path: Path) -> None:
    (tmp_path / "dl_state_dict.bin").touch()
    (note,) = notes(tmp_path, 4)
    assert "dl_state_dict.bin counts the batches of each of 2 ranks" in note


def test_commands_tell_it(tmp_path: Path) -> None:
    run = FIXTURES / "trl-zero2/outputs/llama-sft"
    done = ckpt("convert", "zero2", "zero2", run, "--world-size", "1", "-o", tmp_path / "out")
    assert "2 steps of 2 sequences = 4; HF Trainer goes on there" in done.err
    done = ckpt("resume", FIXTURES / "trl-fsdp2/outputs/llama-sft", "--world-size", "4")
    assert "data position" in done.err
