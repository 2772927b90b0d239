"""`ckpt/runs/data_position.py`: notes on other numbers of ranks, compared with Accelerate's own shards of a sampler."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from ckpt.runs.data_position import position_notes
from tests.support.commands import ckpt
from tests.support.places import FIXTURES

STEPS, BATCH, ACCUMULATED, RANKS = 3, 2, 2, 2


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


ACCELERATE = FIXTURES / "accelerate-loader"


@pytest.mark.parametrize(("ranks", "split"), [(1, False), (4, False), (1, True), (4, True)])
def test_accelerate_continues_after_the_told_batches(ranks: int, split: bool) -> None:
    """Accelerate's own loaders skip them, and read the samples that the run on 2 ranks read next."""
    from accelerate import PartialState
    from accelerate.data_loader import prepare_data_loader, skip_first_batches
    from torch.utils.data import DataLoader

    PartialState(cpu=True)
    told = re.compile(r"\(loader, (\d+)\) with split_batches" if split else r"skip_first_batches\(loader, (\d+)\) on")
    step = ACCELERATE / "step_4"
    (note,) = position_notes(step, [one.name for one in step.iterdir()], None, ranks)
    found = told.search(note)
    assert found is not None
    rest = []
    for rank in range(ranks):
        data = DataLoader(list(range(403)), batch_size=8 if split else 4)  # type: ignore[arg-type]
        own = {"num_processes": ranks, "process_index": rank, "put_on_device": False, "split_batches": split}
        rest.append([one.tolist() for one in skip_first_batches(prepare_data_loader(data, **own), int(found[1]))])
    read = [sample for batches in zip(*rest, strict=False) for one in batches for sample in one]
    assert sorted(read[:100]) == json.loads((ACCELERATE / "truth" / "samples.json").read_text())


def test_no_number_of_accelerates_batches_fits() -> None:
    (note,) = notes(ACCELERATE / "step_4", 3)
    assert "the data starts again: 8 batches in all are no multiple of 3" in note


@pytest.mark.parametrize("ranks", [2, 4])
def test_accelerates_count_is_left_out_for_other_ranks(ranks: int, tmp_path: Path) -> None:
    run = Path(shutil.copytree(FIXTURES / "trl-fsdp2/outputs/llama-sft", tmp_path / "run"))
    shutil.copy(ACCELERATE / "step_4" / "dl_state_dict.bin", run / "checkpoint-2")
    done = ckpt("convert", "dcp", "dcp", run, "--world-size", ranks, "-o", tmp_path / "out")
    assert done.code == 0 and ("dl_state_dict.bin fits 2 ranks only, after 4 batches" in done.err) == (ranks != 2)
    assert (tmp_path / "out" / "dl_state_dict.bin").exists() == (ranks == 2)


@pytest.mark.parametrize("content", [b"", b"x", {"_num_yielded": None}, {}])
def test_an_unreadable_count_is_told(content: bytes | dict[str, Any], tmp_path: Path) -> None:
    path = tmp_path / "dl_state_dict.bin"
    torch.save(content, path) if isinstance(content, dict) else path.write_bytes(content)
    (note,) = notes(tmp_path, 4)
    assert "dl_state_dict.bin fits 2 ranks only, and records no number of batches" in note
