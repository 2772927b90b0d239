"""`ckpt/runs/recorded_precision.py`: runs with float32 weights and 16-bit compute are written in 16 bits."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file
from transformers import LlamaConfig, LlamaForCausalLM, TrainingArguments

from ckpt import api
from ckpt.plan.dtypes import BFLOAT16, FLOAT16, FLOAT32, DType
from tests.support.commands import ckpt as run_ckpt
from tests.support.model_files import merge_json

BY_DTYPE = {BFLOAT16: torch.bfloat16, FLOAT16: torch.float16, FLOAT32: torch.float32}


@pytest.fixture
def model() -> LlamaForCausalLM:
    torch.manual_seed(1)
    sizes = {"vocab_size": 16, "hidden_size": 12, "intermediate_size": 8, "num_hidden_layers": 2}
    return LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=2, num_key_value_heads=2))


def run_of(model: LlamaForCausalLM, folder: Path, kind: str, dtype: str | None, **arguments: Any) -> Path:
    """Write a step like HF Trainer under FSDP: float32 weights, the config and the training arguments."""
    step = folder / "checkpoint-1"
    step.mkdir(parents=True)
    if kind == "dcp":
        dcp.save({"model": model.state_dict()}, checkpoint_id=step / "pytorch_model_fsdp_0")
    else:
        torch.save(model.state_dict(), step / "pytorch_model_fsdp.bin")
    model.config.save_pretrained(step)
    merge_json(step / "config.json", {"dtype": dtype})
    torch.save(TrainingArguments(str(folder), use_cpu=True, report_to=[], **arguments), step / "training_args.bin")
    return folder


def check(run: Path, out: Path, model: LlamaForCausalLM, expected: DType, options: list[str]) -> str:
    report = run_ckpt("convert", "auto", "hf", run, "-o", out, "-v", *options)
    assert report.code == 0, report.err
    written = load_file(out / "model.safetensors")
    truth = model.to(BY_DTYPE[expected]).state_dict()
    assert written.keys() == truth.keys()
    assert all(torch.equal(written[k].view(torch.uint8), truth[k].contiguous().view(torch.uint8)) for k in truth)
    assert json.loads((out / "config.json").read_text())["dtype"] == str(BY_DTYPE[expected]).removeprefix("torch.")
    return report.err


@pytest.mark.parametrize("kind", ["dcp", "full"])
@pytest.mark.parametrize(
    ("dtype", "arguments", "expected", "said"),
    [
        ("bfloat16", {}, BFLOAT16, "the run's compute dtype (the dtype in config.json)"),
        ("float32", {"bf16": True}, BFLOAT16, "the run's compute dtype (bf16 in training_args.bin)"),
        ("bfloat16", {"fp16": True}, FLOAT16, "the run's compute dtype (fp16 in training_args.bin)"),
        ("float32", {}, FLOAT32, None),
        (None, {}, FLOAT32, None),
    ],
)
def test_what_is_written_is_what_the_run_computes_in(
    model: LlamaForCausalLM, tmp_path: Path, kind: str, dtype: str, arguments: dict, expected: DType, said: str | None
) -> None:
    run = run_of(model, tmp_path / "run", kind, dtype, **arguments)
    told = check(run, tmp_path / "out", model, expected, [])
    assert said in told and "use --dtype fp32 for the unrounded" in told if said else "compute dtype" not in told
    report = run_ckpt("verify", run, tmp_path / "out")
    assert report.code == 0 and ("after rounding" in report.out) == (said is not None), report.out + report.err


def test_masters_are_still_to_be_had(model: LlamaForCausalLM, tmp_path: Path) -> None:
    run = run_of(model, tmp_path / "run", "dcp", "bfloat16", bf16=True)
    assert "compute dtype" not in check(run, tmp_path / "out", model, FLOAT32, ["--dtype", "fp32"])


def test_a_hugging_face_folder_keeps_its_dtype(model: LlamaForCausalLM, tmp_path: Path) -> None:
    """The chosen dtype stays, even if the config names another one."""
    model.save_pretrained(tmp_path / "hf")
    merge_json(tmp_path / "hf/config.json", {"dtype": "bfloat16"})
    assert api.open(tmp_path / "hf").computes_in is None
    check(tmp_path / "hf", tmp_path / "out", model, FLOAT32, [])


def test_deepspeeds_own_weights_are_what_it_computes_in(fixtures: Path, tmp_path: Path) -> None:
    """The config may come from anywhere."""
    for name, role in (("toy-zero0-fp32", "weight"), ("toy-zero0", "master")):
        run = Path(shutil.copytree(fixtures / name, tmp_path / name))
        (run / "config.json").write_text('{"dtype": "bfloat16"}')
        checkpoint = api.open(run)
        assert checkpoint.computes_in is None and checkpoint["a.weight", role].dtype == "float32"


def test_damaged_training_arguments_tell_nothing_and_it_is_said(model: LlamaForCausalLM, tmp_path: Path) -> None:
    run = run_of(model, tmp_path / "run", "dcp", "float32", bf16=True)
    (run / "checkpoint-1" / "training_args.bin").write_bytes(b"\x80\x02no pickle")
    checkpoint = api.open(run)
    assert checkpoint.computes_in is None
    assert any("training_args.bin is damaged and was not read" in note for note in checkpoint.notes)


@pytest.mark.parametrize(("arguments", "said"), [(True, False), (False, True)])
def test_what_is_recorded_nowhere_is_said(model: LlamaForCausalLM, tmp_path: Path, arguments: bool, said: bool) -> None:
    """HF Trainer's sharded FSDP checkpoints have neither training arguments nor a config."""
    run = run_of(model, tmp_path / "run", "dcp", "float32")
    (run / "checkpoint-1" / "trainer_state.json").write_text('{"global_step": 1}')
    if not arguments:
        (run / "checkpoint-1" / "training_args.bin").unlink()
    told = check(run, tmp_path / "out", model, FLOAT32, [])
    assert ("the compute dtype is not recorded, so use --dtype bf16" in " ".join(told.split())) == said
    assert "compute dtype is not recorded" not in check(run, tmp_path / "bf16", model, BFLOAT16, ["--dtype", "bf16"])


def test_training_arguments_beside_a_given_config_are_another_runs(model: LlamaForCausalLM, tmp_path: Path) -> None:
    run = run_of(model, tmp_path / "run", "dcp", "float32")
    for name in ("config.json", "training_args.bin"):
        (run / "checkpoint-1" / name).unlink()
    other = run_of(model, tmp_path / "other", "dcp", "float32", bf16=True) / "checkpoint-1"
    shutil.copy(other / "training_args.bin", other.parent)
    said = check(run, tmp_path / "out", model, FLOAT32, ["--config", str(other)])
    assert "training_args.bin" not in said
    shutil.copy(other / "training_args.bin", run)  # the run folder itself may be given, too
    shutil.copy(other / "config.json", run)
    own = check(run / "checkpoint-1", tmp_path / "again", model, BFLOAT16, ["--config", str(run)])
    assert "bf16 in training_args.bin" in own and "files of the run training_args.bin" in own
