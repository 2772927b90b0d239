"""`converters/deepspeed/zero.py`: stages, world sizes, dtypes and models match the live engine."""

from __future__ import annotations

import contextlib
import functools
import io
from pathlib import Path
from typing import Any

import pytest
from safetensors import safe_open

from ckpt import api
from ckpt.plan.checkpoint import Checkpoint, Layout
from ckpt.plan.dtypes import FLOAT32
from tests.support.describing import assert_equals_truth, expected_weights
from tests.support.engines import Truth, launch, raw
from tests.support.stored import stored

STAGES = (1, 2, 3)
WORLD_SIZES = (1, 2, 3, 4)
DTYPES = ("bf16", "fp16", "fp32")
MODELS = ("llama", "qwen2", "qwen3", "qwen3_moe", "gpt2", "gpt_oss", "toy")
STEPS = 2

pytestmark = pytest.mark.slow


def run_name(stage: int, model: str, dtype: str) -> str:
    return f"{model}-zero{stage}-{dtype}"


@pytest.fixture(scope="session", params=WORLD_SIZES, ids=lambda w: f"w{w}")
def runs(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[int, Path]:
    """Launch the trainer once per world size. Return the world size and the folder with all runs."""
    folder = tmp_path_factory.mktemp(f"world{request.param}")
    jobs = [
        {
            "strategy": f"zero{stage}",
            "model": model,
            "dtype": dtype,
            "steps": STEPS,
            "truth": True,
            "output": str(folder / run_name(stage, model, dtype)),
        }
        for stage in STAGES
        for model in MODELS
        for dtype in DTYPES
    ]
    launch(jobs, request.param, folder)
    return request.param, folder


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("stage", STAGES)
def test_equals_the_live_engine(
    runs: tuple[int, Path], stage: int, dtype: str, model: str, tmp_path: Path, tables: Any
) -> None:
    world_size, folder = runs
    run = folder / run_name(stage, model, dtype)
    truth = Truth.load(run / "truth" / f"global_step{STEPS}.safetensors")
    checkpoint = api.open(run, f"zero{stage}")

    described = assert_equals_truth(checkpoint, truth)
    assert checkpoint.world_size == world_size
    assert checkpoint.state.step == STEPS
    assert checkpoint.ties == truth.ties
    assert_same_param_groups(checkpoint, truth)

    api.plan(checkpoint, "hf", Layout(dtype=FLOAT32)).run(tmp_path / "fp32")
    masters = expected_weights(truth, fp32=True)
    written = 0
    for output, expected in ((in_hf(run), expected_weights(truth, fp32=False)), (tmp_path / "fp32", masters)):
        found = loaded_by_transformers(output, truth) if model == "qwen3_moe" else stored(output)
        assert found == expected
        written += len(found)

    peer = zero_to_fp32(run, truth)
    assert peer == {fqn: masters[fqn] for fqn in peer}
    column = f"zero{stage} w{world_size}"
    tables["ZeRO: tensors bit for bit equal to the live engine: read + written to hf, and to zero_to_fp32.py"][
        f"{model} {dtype}"
    ][column] = f"{described}+{written}/{len(peer)}"


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


@pytest.mark.parametrize("model", [m for m in MODELS if m != "toy"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("stage", STAGES)
def test_transformers_loads_it_and_computes_the_same_logits(
    runs: tuple[int, Path], stage: int, dtype: str, model: str, tables: Any
) -> None:
    """No key is missing, unexpected or mismatched, and the logits match the live engine."""
    import torch
    from transformers import AutoModelForCausalLM

    world_size, folder = runs
    run = folder / run_name(stage, model, dtype)
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
    tables["Logits of converted folders in transformers against the live engine"][f"{model} {dtype}"][
        f"zero{stage} w{world_size}"
    ] = "equal" if equal else f"{largest:.1e}"
    assert equal
