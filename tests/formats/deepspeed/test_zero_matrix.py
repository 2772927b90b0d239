"""`converters/deepspeed/zero.py`: stages, world sizes, dtypes and models match the live engine."""

from __future__ import annotations

import contextlib
import functools
import io
from dataclasses import astuple, dataclass
from itertools import combinations, product
from pathlib import Path
from typing import Any

import pytest
from safetensors import safe_open

from ckpt import api
from ckpt.plan.checkpoint import Checkpoint, Layout
from ckpt.plan.dtypes import FLOAT32
from tests.support.describing import assert_equals_truth, expected_weights
from tests.support.engines import Truth, launch_in_turn, raw
from tests.support.sampling import sample
from tests.support.stored import stored

STAGES = (1, 2, 3)
WORLD_SIZES = (1, 2, 3, 4)
DTYPES = ("bf16", "fp16", "fp32")
MODELS = ("llama", "qwen2", "qwen3", "qwen3_moe", "gpt2", "gpt_oss", "toy")
FACTORS = (STAGES, WORLD_SIZES, DTYPES, MODELS)
STEPS = 2

pytestmark = pytest.mark.slow


@dataclass(frozen=True)
class Cell:
    """A run: stage, number of ranks, dtype and model."""

    stage: int
    world_size: int
    dtype: str
    model: str

    @property
    def name(self) -> str:
        return f"w{self.world_size}-{self.stage}-{self.dtype}-{self.model}"

    @property
    def column(self) -> str:
        return f"zero{self.stage} w{self.world_size}"

    def job(self, folder: Path) -> dict[str, Any]:
        job = {"strategy": f"zero{self.stage}", "model": self.model, "dtype": self.dtype, "steps": STEPS}
        return job | {"truth": True, "output": str(folder / self.name)}


#: A third of all combinations, in which any three factors meet in every combination.
ALL_CELLS = [
    Cell(*(levels[index] for levels, index in zip(FACTORS, indexes, strict=True)))
    for indexes in product(*(range(len(levels)) for levels in FACTORS))
    if sum(indexes) % 3 == 0
]


def turn(cell: Cell) -> int:
    """Sort key with which the sample needs the fewest runs."""
    return (2 * cell.world_size + 5 * DTYPES.index(cell.dtype) + 3 * MODELS.index(cell.model)) % 7


#: Any two factors meet in every combination.
CELLS = sample(sorted(ALL_CELLS, key=turn), lambda cell: combinations(enumerate(astuple(cell)), 2))


@pytest.mark.parametrize(("cells", "number"), [(ALL_CELLS, 3), (CELLS, 2)], ids=["all", "sample"])
def test_some_factors_meet_in_every_combination(cells: list[Cell], number: int) -> None:
    chosen = [astuple(cell) for cell in cells]
    for some in combinations(range(len(FACTORS)), number):
        assert {tuple(cell[one] for one in some) for cell in chosen} == set(product(*(FACTORS[one] for one in some)))


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Train all runs in one launch and return their folder."""
    folder = tmp_path_factory.mktemp("zero")
    jobs = [(ranks, [cell.job(folder) for cell in CELLS if cell.world_size == ranks]) for ranks in WORLD_SIZES]
    launch_in_turn(jobs, folder)
    return folder


@pytest.mark.parametrize("cell", CELLS, ids=lambda cell: cell.name)
def test_equals_the_live_engine(runs: Path, cell: Cell, tmp_path: Path, tables: Any) -> None:
    run = runs / cell.name
    truth = Truth.load(run / "truth" / f"global_step{STEPS}.safetensors")
    checkpoint = api.open(run, f"zero{cell.stage}")

    described = assert_equals_truth(checkpoint, truth)
    assert checkpoint.world_size == cell.world_size
    assert checkpoint.state.step == STEPS
    assert checkpoint.ties == truth.ties
    assert_same_param_groups(checkpoint, truth)

    api.plan(checkpoint, "hf", Layout(dtype=FLOAT32)).run(tmp_path / "fp32")
    masters = expected_weights(truth, fp32=True)
    written = 0
    for output, expected in ((in_hf(run), expected_weights(truth, fp32=False)), (tmp_path / "fp32", masters)):
        found = loaded_by_transformers(output, truth) if cell.model == "qwen3_moe" else stored(output)
        assert found == expected
        written += len(found)

    peer = zero_to_fp32(run, truth)
    assert peer == {fqn: masters[fqn] for fqn in peer}
    tables["ZeRO: tensors bit for bit equal to the live engine: read + written to hf, and to zero_to_fp32.py"][
        f"{cell.model} {cell.dtype}"
    ][cell.column] = f"{described}+{written}/{len(peer)}"


@functools.cache
def in_hf(run: Path) -> Path:
    """Convert a run from any stage to hf, once for all tests."""
    output = run.with_name(f"{run.name}-in-hf")
    api.plan(api.open(run), "hf").run(output)
    return output


def assert_same_param_groups(checkpoint: Checkpoint, truth: Truth) -> None:
    groups = truth.metadata["param_groups"]
    assert [sorted(g.fqns) for g in checkpoint.state.param_groups] == [sorted(g["names"]) for g in groups]
    for ours, theirs in zip(checkpoint.state.param_groups, groups, strict=True):
        assert ours.options["lr"] == theirs["lr"]
        assert ours.options["weight_decay"] == theirs["weight_decay"]
    steps = set(checkpoint.state.scalars["step"].values())
    assert steps == {float(truth.metadata["adam_step"])}


def loaded_by_transformers(folder: Path, truth: Truth) -> dict[str, tuple[str, tuple[int, ...], bytes]]:
    """Return all tensors as loaded by transformers, with their names in memory."""
    from transformers import AutoModelForCausalLM

    model, info = AutoModelForCausalLM.from_pretrained(folder, dtype="auto", output_loading_info=True)
    assert not any(info.values()), info
    return {fqn: raw(tensor) for fqn, tensor in model.state_dict().items() if fqn not in truth.ties}


def zero_to_fp32(run: Path, truth: Truth) -> dict[str, tuple[str, tuple[int, ...], bytes]]:
    """Return the output of DeepSpeed's converter, without buffers and frozen weights, because it copies those."""
    from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint

    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        state = get_fp32_state_dict_from_zero_checkpoint(str(run), exclude_frozen_parameters=True)
    buffers = {fqn for fqn, role in truth.tensors if role == "buffer"}
    return {fqn: raw(t.contiguous()) for fqn, t in state.items() if fqn not in truth.ties and fqn not in buffers}


@pytest.mark.parametrize("cell", [cell for cell in CELLS if cell.model != "toy"], ids=lambda cell: cell.name)
def test_transformers_loads_it_and_computes_the_same_logits(runs: Path, cell: Cell, tables: Any) -> None:
    """No key is missing, unexpected or mismatched, and the logits match the live engine."""
    import torch
    from transformers import AutoModelForCausalLM

    run = runs / cell.name
    loaded, info = AutoModelForCausalLM.from_pretrained(
        in_hf(run),
        dtype="auto",
        output_loading_info=True,
        attn_implementation="eager",  # like the trainer's models: other kernels round differently
        experts_implementation="eager",
    )
    assert not any(info.values()), info
    with safe_open(run / "truth" / f"global_step{STEPS}-logits.safetensors", "pt") as file:
        input_ids, expected = file.get_tensor("input_ids"), file.get_tensor("logits")
    with torch.no_grad():
        logits = loaded.eval()(input_ids).logits
    assert logits.dtype == expected.dtype
    equal = torch.equal(logits.view(torch.uint8), expected.view(torch.uint8))
    largest = (logits.double() - expected.double()).abs().max().item()
    tables["Logits of converted folders in transformers against the live engine"][f"{cell.model} {cell.dtype}"][
        cell.column
    ] = "equal" if equal else f"{largest:.1e}"
    assert equal
