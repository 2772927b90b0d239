"""The trainer's Megatron strategy: every layout trains one model, and megatron-core loads its files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.support.engines import Truth, launch_in_turn
from train.config import Config, UserError
from train.truth.pieces import Piece, Place, assemble

#: Another order of fp32 sums changes the last bits in each step. A misplaced slice changes the first digits.
BOUND = 2e-6
COMMON = {"strategy": "megatron", "model": "llama_wide", "dtype": "fp32", "truth": True, "accumulate": 2}
ALONE = {**COMMON, "tp": 1, "vocab_multiple": 8}
GRID = {**COMMON, "tp": 2, "pp": 2, "vocab_multiple": 4}  # the same padded vocabulary


def losses(run: Path) -> list[float]:
    return [json.loads(line)["loss"] for line in (run / "metrics.jsonl").read_text().splitlines()]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("megatron")

    def job(kind: dict[str, Any], output: str, **options: Any) -> dict[str, Any]:
        return {**kind, "output": str(folder / output), **options}

    grid = [
        job(GRID, "start-grid", steps=0),
        job(GRID, "torch", steps=3, save_every=2, save="torch"),
        job(GRID, "torch-on", steps=1, save="torch", resume=str(folder / "torch" / "iter_0000002")),
        job(GRID, "chunks", steps=3, vpp=2, save="torch_dist"),
    ]
    alone = [
        job(ALONE, "start-alone", steps=0),
        job(ALONE, "alone", steps=3, save="torch"),
        job(ALONE, "chunks-alone", steps=0, resume=str(folder / "chunks")),
    ]
    launch_in_turn([(4, grid), (1, alone)], folder)
    return folder


@pytest.mark.slow
def test_every_layout_starts_with_the_same_model(runs: Path) -> None:
    grid, alone = (Truth.load(runs / name / "truth/step-0.safetensors") for name in ("start-grid", "start-alone"))
    assert grid.tensors == alone.tensors
    assert ("embedding.word_embeddings.weight", "weight") in grid.tensors
    assert grid.tensors["output_layer.weight", "weight"][1] == (264, 40)


@pytest.mark.slow
def test_every_layout_learns_the_same(runs: Path) -> None:
    np.testing.assert_allclose(losses(runs / "torch"), losses(runs / "alone"), rtol=BOUND)
    np.testing.assert_allclose(losses(runs / "chunks"), losses(runs / "alone"), rtol=BOUND)
    assert losses(runs / "alone")[0] != pytest.approx(losses(runs / "alone")[2], rel=100 * BOUND)


@pytest.mark.slow
def test_megatron_loads_its_torch_files_and_goes_on_to_the_same_bits(runs: Path) -> None:
    straight, resumed = (Truth.load(runs / name / "truth/iter_0000003.safetensors") for name in ("torch", "torch-on"))
    assert straight.tensors == resumed.tensors
    assert losses(runs / "torch")[2:] == losses(runs / "torch-on")


@pytest.mark.slow
def test_megatron_loads_torch_dist_at_another_layout(runs: Path) -> None:
    saved = Truth.load(runs / "chunks/truth/iter_0000003.safetensors")
    loaded = Truth.load(runs / "chunks-alone/truth/step-3.safetensors")
    assert saved.tensors == loaded.tensors
    roles = {role for _, role in saved.tensors}
    assert roles == {"weight", "master", "exp_avg", "exp_avg_sq"}


@pytest.mark.slow
def test_files_hold_what_megatron_lm_writes(runs: Path) -> None:
    run = runs / "torch"
    assert (run / "latest_checkpointed_iteration.txt").read_text() == "3"
    ranks = sorted(path.name for path in (run / "iter_0000003").iterdir())
    assert ranks == ["mp_rank_00_000", "mp_rank_00_001", "mp_rank_01_000", "mp_rank_01_001"]
    for rank in ranks:
        names = {path.name for path in (run / "iter_0000003" / rank).iterdir()}
        assert names == {"model_optim_rng.pt", "distrib_optim.pt"}
    state = torch.load(run / "iter_0000003/mp_rank_01_001/model_optim_rng.pt", weights_only=False)
    assert set(state) == {
        "args",
        "checkpoint_version",
        "iteration",
        "model",
        "optimizer",
        "opt_param_scheduler",
        "rng_state",
        "num_floating_point_operations_so_far",
    }
    assert (state["checkpoint_version"], state["iteration"]) == (3.0, 3)
    assert state["args"].padded_vocab_size == 264
    assert state["args"].consumed_train_samples == 3 * state["args"].global_batch_size


def part(index: int, elements: torch.Tensor, start: int = 0, shape: tuple[int, ...] = (2, 3), stride: int = 1) -> Piece:
    return Piece("weight", Place("matrix", shape, 0, stride, index, 2), start, elements)


WHOLE = torch.arange(12.0).view(4, 3)


def test_parts_are_joined_block_by_block() -> None:
    assert torch.equal(assemble([part(0, WHOLE[:2].flatten()), part(1, WHOLE[2:].flatten())])["weight/matrix"], WHOLE)
    gated = [part(0, WHOLE[[0, 2]].flatten(), stride=2), part(1, WHOLE[[1, 3]].flatten(), stride=2)]
    assert torch.equal(assemble(gated)["weight/matrix"], WHOLE)
    assert torch.equal(gated[1].place.cut(WHOLE), WHOLE[[1, 3]])


def test_runs_of_elements_make_a_part() -> None:
    flat = WHOLE.flatten()
    pieces = [part(0, flat[:4]), part(0, flat[4:6], start=4), part(1, flat[6:])]
    assert torch.equal(assemble(pieces)["weight/matrix"], WHOLE)


@pytest.mark.parametrize(
    "pieces, complaint",
    [
        ([part(0, WHOLE[:2].flatten())], "on no rank"),
        ([part(0, WHOLE[:2].flatten()[:5]), part(1, WHOLE[2:].flatten())], "on no rank"),
        ([part(0, torch.zeros(6)), part(0, -torch.zeros(6)), part(1, torch.zeros(6))], "disagree on shared"),
        ([part(0, torch.zeros(6)), part(0, torch.zeros(6).half()), part(1, torch.zeros(6))], "disagree on shape"),
        ([part(0, torch.zeros(6)), part(0, torch.zeros(6), stride=2), part(1, torch.zeros(6))], "disagree on shape"),
    ],
    ids=["a part missing", "an element missing", "other bits", "other dtype", "other split"],
)
def test_the_truth_is_not_written_where_ranks_contradict(pieces: list[Piece], complaint: str) -> None:
    with pytest.raises(RuntimeError, match=complaint):
        assemble(pieces)


@pytest.mark.parametrize(
    "options, complaint",
    [
        ({"optimizer": "sgd"}, "under --no-distributed-optimizer"),
        ({"vpp": 2}, "at least two stages"),
        ({"vpp": 2, "pp": 2}, "multiple of --pp"),
        ({"schedule_steps": 3}, "warms up for 3 steps"),
        ({"save": "dcp"}, "takes only native, torch,"),
        ({"save": "fsdp_dtensor", "pp": 2}, "one stage"),
        ({"save": "fsdp_dtensor", "dtype": "fp16"}, "only --dtype bf16"),
        ({"save": "fsdp_dtensor", "resume": "run"}, "starts a new run"),
        ({"lora": 4}, "--lora"),
    ],
)
def test_what_megatron_cannot_do_is_refused(options: dict[str, Any], complaint: str) -> None:
    with pytest.raises(UserError, match=complaint):
        Config(strategy="megatron", model="llama_wide", **options)
