"""`ckpt/runs/trainer_files.py`, `file_checks.py`: config and tokenizer are copied to every target."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

import ckpt
from ckpt.plan import registry
from ckpt.plan.checkpoint import Checkpoint, Layout
from ckpt.plan.dtypes import FLOAT32, DType
from tests.support.commands import ckpt as process
from tests.support.model_files import merge_json

#: Adapter folders and GGUF have no model config, and HF Trainer's format needs an optimizer.
TARGETS = [name for name in registry.names() if registry.get(name).writes and name not in ("peft", "trainer", "gguf")]


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Save a bf16 model with the config of an fp32 model, under both config keys."""
    folder = tmp_path_factory.mktemp("model")
    sizes = {"vocab_size": 16, "hidden_size": 12, "intermediate_size": 8, "num_hidden_layers": 2}
    config = LlamaConfig(**sizes, num_attention_heads=2, num_key_value_heads=2)
    LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)
    write(folder, dtype="float32", torch_dtype="float32")
    (folder / "tokenizer.json").write_text("{}")
    return folder


def write(folder: Path, **entries: Any) -> None:
    merge_json(folder / "config.json", entries)


def config_of(checkpoint: Checkpoint, target: str, dtype: DType | None, out: Path) -> dict[str, Any]:
    layout = Layout(
        dtype=dtype, world_size=2 if target.startswith(("zero", "fsdp-ranks", "torch-checkpointing")) else None
    )
    ckpt.plan(checkpoint, target, layout).run(out)
    folder = next(out.rglob("huggingface"), out)  # verl's place for them
    assert (folder / "tokenizer.json").read_text() == "{}"
    return dict(json.loads((folder / "config.json").read_text()))


@pytest.mark.parametrize(("dtype", "true"), [(None, "bfloat16"), (FLOAT32, "float32")])
@pytest.mark.parametrize("target", TARGETS)
def test_the_dtype_in_the_config_is_that_of_the_model(
    saved: Path, tmp_path: Path, target: str, dtype: DType | None, true: str
) -> None:
    config = config_of(ckpt.open(saved), target, dtype, tmp_path / "out")
    assert (config["dtype"], config["torch_dtype"]) == (true, true)
    untouched = json.loads((saved / "config.json").read_text()) | {"dtype": true, "torch_dtype": true}
    assert config == untouched


@pytest.mark.parametrize("target", ["dcp", "full"])
def test_a_run_that_keeps_masters_alone_says_in_what_it_computes(fixtures: Path, tmp_path: Path, target: str) -> None:
    """Its weights are fp32 on disk, so only `bfloat16` in the config tells a later engine the compute dtype."""
    run = tmp_path / "run"
    shutil.copytree(fixtures / "toy-zero2", run)
    (run / "config.json").write_text(json.dumps({"architectures": ["Toy"], "dtype": "float32"}))
    (run / "tokenizer.json").write_text("{}")
    once = ckpt.open(run)
    assert config_of(once, target, None, tmp_path / "one")["dtype"] == "bfloat16"
    again = ckpt.open(tmp_path / "one")
    assert not list(again.with_role("master"))
    assert config_of(again, target, None, tmp_path / "two")["dtype"] == "bfloat16"


@pytest.mark.parametrize("name", ["rng_state.pth", "scheduler.pt", "training_args.bin", "generation_config.json"])
@pytest.mark.parametrize("size", [0, 100])
def test_damaged_files_of_a_run_are_refused(name: str, size: int, fixtures: Path, tmp_path: Path) -> None:
    """No command may advise to train from a step with files `ckpt check` calls damaged."""
    step = Path(shutil.copytree(fixtures / "trainer-plain/checkpoint-2", tmp_path / "run/checkpoint-2"))
    file = step / name
    file.chmod(0o644)
    convert = ("convert", "auto", "dcp", tmp_path / "run", "--world-size", 3, "-o", tmp_path / "out")
    with file.open("r+b") as content:
        content.truncate(size)
    commands = [convert, ("check", tmp_path / "run")]
    if name != "generation_config.json":  # Trainer does not load it
        commands.append(("resume", tmp_path / "run"))
    for words in commands:
        done = process(*words)
        said = done.out + done.err
        assert done.code == 4 and name in said and "to go on" not in said and "as it is" not in said, said
    if name != "scheduler.pt":  # the step's own reader reads the schedule
        assert f"to convert without {name}, move it out of {step}" in process(*convert).err
        file.unlink()
        assert "to continue with HF Trainer" in process(*convert).err


def test_damaged_random_states_of_accelerate_are_refused(fixtures: Path, tmp_path: Path) -> None:
    step = Path(shutil.copytree(fixtures / "trainer-plain/checkpoint-2", tmp_path / "run/checkpoint-2"))
    states = step / "random_states_0.pkl"
    torch.save({"step": 2}, states)
    convert = ("convert", "auto", "dcp", tmp_path / "run", "--world-size", 1, "-o", tmp_path / "out", "--overwrite")
    assert process(*convert).code == 0 and process("check", tmp_path / "run").code == 0
    states.write_bytes(b"\x80\x04}q\x00.")  # another program's pickle
    assert process(*convert).code == 0 and process("check", tmp_path / "run").code == 0
    for content in (b"", b"PK\x03\x04"):
        states.write_bytes(content)
        assert process(*convert).code == 4 and process("check", tmp_path / "run").code == 4
