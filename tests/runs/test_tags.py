"""`ckpt/runs/steps.py`, `finding.py`: a step's tag has the same meaning for every command."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import ckpt
from ckpt import api
from ckpt.errors import CkptError, NotFoundError
from ckpt.plan.checkpoint import Checkpoint
from ckpt.runs.steps import ANY_STEP, run_at
from tests.support.commands import Result
from tests.support.commands import ckpt as run_ckpt
from tests.support.places import FIXTURES
from tests.support.sampling import sample


def steps() -> Iterator[Path]:
    """Return every step folder in the fixtures, in a run's folder or within another step."""
    for folder, inside, _ in os.walk(FIXTURES):
        yield from (Path(folder, name) for name in inside if ANY_STEP.fullmatch(name) and "hostile" not in folder)


def kinds(step: Path) -> Iterator[tuple[str, str]]:
    """Yield the step's engine with the form of its name, and the kind of a run of Megatron-Bridge, such as DoRA."""
    engine, _, rest = str(step.relative_to(FIXTURES)).partition("-")
    yield engine, step.name.rstrip("0123456789")
    if rest.startswith("bridge"):
        yield "bridge", step.parent.name


EVERY_STEP = sorted(steps(), key=lambda step: ("zero0" in str(step), step))  # stage 0 has no parts
STEPS = sample(EVERY_STEP, kinds)
NAMES = [str(step.relative_to(FIXTURES)) for step in STEPS]
#: Steps that take every path through the commands, by kind.
FOR_ALL_COMMANDS = {
    "experts of ZeRO": ("experts-zero2/global_step2", "experts-zero1/global_step2", "autoep-zero1/global_step2"),
    "ZeRO": (
        *("toy-zero3/global_step2", "toy-zero1/global_step2", "autotp-zero3/global_step2", "lora-zero3/global_step2"),
        *("quantized-zero2/ao8/global_step3", "neox-zero1/global_step2"),
    ),
    "ZeRO in a trainer's step": (
        *("trainer-zero2/checkpoint-1/global_step1", "trl-lora-zero3/outputs/qwen3-lora/checkpoint-2"),
        "diffusers-zero3/checkpoint-2",
    ),
    "FSDP in a trainer's step": (
        *("trl-fsdp2/outputs/llama-sft/checkpoint-2", "axolotl-fsdp2/outputs/gpt-oss-out/checkpoint-2"),
    ),
    "an adapter": ("diffusers-lora/checkpoint-2",),
    "an adapter under FSDP": (
        "axolotl-lora-fsdp2/outputs/gpt-oss-lora/checkpoint-2",
        "axolotl-lora-fsdp2-ac/outputs/gpt-oss-lora-ac/checkpoint-2",
    ),
    "torch's shards": ("dcp-fsdp2/step-2", "composer-fsdp2/ep1-ba2"),
    "shards of TorchTitan": (
        *("torchtitan-llama3-0.3/step-2", "torchtitan-loader/step-4", "torchtitan-loader/step-6"),
        "torchtitan-qwen3-moe/step-2",
    ),
    "shards of OLMo-core": ("olmo-core/step2",),
    "torch_checkpointing": ("torch-checkpointing/step-2", "torch-checkpointing/step-3"),
    "files of ranks": ("verl-fsdp1/global_step_3", "verl-fsdp2/global_step_3", "local-flat/checkpoint-2"),
    "Megatron Bridge": ("megatron-bridge/experts-etp2/iter_0000002", "megatron-bridge-multi/experts-ep1/iter_0000002"),
    "Megatron's shards": (
        *("ms-swift/experts-tp2-ep2/checkpoint-2", "megatron-dist-flattened/iter_0000002"),
        "megatron-0.17-dp/iter_0000002",
    ),
    "Megatron-LM": ("megatron-lm-muon/iter_0000002",),
    "a whole model": ("trainer-plain/checkpoint-2", "sentence-transformers/checkpoint-2", "accelerate-loader/step_4"),
    "one file": ("lightning/checkpoints/epoch=0-step=4.ckpt",),
}
COMMANDED = sample([(kind, name) for kind, names in FOR_ALL_COMMANDS.items() for name in names], lambda case: case[:1])


def facts(checkpoint: Checkpoint) -> dict[str, Any]:
    digests = api.digests(checkpoint)
    return {
        "format": checkpoint.format,
        "path": checkpoint.path,
        "states": checkpoint.optimizer_states,
        "step": checkpoint.state.step,
        "entries": sorted(checkpoint.state.entries()),
        "ranks": checkpoint.world_size,
        "config": checkpoint.config,
        "digests": digests.whole,
    }


def outcome(*words: str | Path) -> Result:
    """Run `ckpt` and drop notes about the chosen step from the output."""
    result = run_ckpt(*words)
    lines = [line for line in result.err.splitlines() if "taking " not in line and "there is also" not in line]
    return replace(result, err="\n".join(lines))


@pytest.mark.parametrize("step", STEPS, ids=NAMES)
def test_a_tag_opens_what_the_folder_of_the_step_is(step: Path) -> None:
    try:
        expected = facts(ckpt.open(step))
    except CkptError as error:
        with pytest.raises(type(error)) as same:
            facts(ckpt.open(step.parent, tag=step.name))
        assert same.value.what == error.what
        return
    assert facts(ckpt.open(step.parent, tag=step.name)) == expected
    is_alone = sum(other.parent == step.parent for other in EVERY_STEP) == 1 and not run_at(step.parent).last
    if is_alone and not any(name in str(step) for name in ("axolotl", "diffusers-lora")):
        assert facts(ckpt.open(step.parent)) == expected, "it is the run's only step"
    around = step.parent.parent
    if around.name == "outputs":  # with one run in it
        assert facts(ckpt.open(around, tag=step.name)) == expected


@pytest.mark.parametrize("name", [name for _, name in COMMANDED])
def test_every_command_takes_the_same(name: str, tmp_path: Path) -> None:
    step, run = FIXTURES / name, tmp_path / "run"
    shutil.copytree(step.parent, run, ignore=lambda folder, _: {"truth"} if folder == str(step.parent) else set())
    (tmp_path / "out").mkdir()
    tag, place = ("--tag", step.name), run / step.name
    if "several runs" in (refused := outcome("hash", place)).err:  # the hints name folders
        assert refused.code == outcome("hash", run, *tag).code == outcome("inspect", run, *tag).code
        return
    assert outcome("hash", run, *tag) == refused
    assert outcome("convert", "auto", "full", run, *tag, "--dry-run", "-o", tmp_path / "out/full") == outcome(
        "convert", "auto", "full", place, "--dry-run", "-o", tmp_path / "out/full"
    )
    shown = [run_ckpt("inspect", *words, "--json") for words in ((run, *tag), (place,))]
    assert shown[0].code == shown[1].code
    if shown[0].code == 0:
        assert described(shown[0]) == described(shown[1])
        assert run_ckpt("verify", run, place, "--tag-a", step.name, "-q").code == 0
    checked = [run_ckpt("check", *words, "--json") for words in ((run, *tag), (place,))]
    assert checked[0].code == checked[1].code
    if checked[0].out:
        for one, other in zip(*(json.loads(result.out)["checkpoints"] for result in checked), strict=True):
            assert one | {"path": ""} == other | {"path": ""}
    resumed = [run_ckpt("resume", *words, "--world-size", "3") for words in ((run, *tag), (place,))]
    assert (resumed[0].code, resumed[0].out) == (resumed[1].code, resumed[1].out)


def described(result: Result) -> dict[str, Any]:
    content: dict[str, Any] = json.loads(result.out)
    content["notes"] = [note for note in content["notes"] if "taking " not in note and "there is also" not in note]
    return content


def test_the_hint_after_a_damaged_step_leads_to_a_training_checkpoint(tmp_path: Path) -> None:
    """A LoRA run's `checkpoint-N` has the adapter beside the optimizer."""
    run = tmp_path / "run"
    for name in ("checkpoint-2", "checkpoint-4"):
        shutil.copytree(FIXTURES / "trl-lora-zero3/outputs/qwen3-lora/checkpoint-2", run / name)
    damaged = next((run / "checkpoint-4/global_step2").glob("*rank_1*optim_states.pt"))
    content = bytearray(damaged.read_bytes())
    content[400] ^= 1
    damaged.write_bytes(content)
    result = run_ckpt("convert", "auto", "zero3", run, "--world-size", "1", "-o", tmp_path / "out")
    assert result.code == 4 and "--tag checkpoint-2 takes the checkpoint before checkpoint-4" in result.err
    result = run_ckpt(
        "convert", "auto", "zero3", run, "--world-size", "1", "-o", tmp_path / "out", "--tag", "checkpoint-2"
    )
    assert result.code == 0, result.err
    assert set(ckpt.open(tmp_path / "out").optimizer_states) >= {"exp_avg", "exp_avg_sq", "step"}


def test_a_model_beside_the_optimizer_is_not_what_a_step_is(tmp_path: Path) -> None:
    """HF Trainer saves `pytorch_model.bin` there with save_safetensors=False, and the run has a `latest`."""
    run = Path(shutil.copytree(FIXTURES / "trainer-zero2", tmp_path / "run"))
    ckpt.plan(ckpt.open(run), "hf").run(tmp_path / "hf")
    for step in ("checkpoint-1", "checkpoint-2"):
        torch.save(load_file(tmp_path / "hf/model.safetensors"), run / step / "pytorch_model.bin")
    assert ckpt.open(run).format == ckpt.open(run, tag="checkpoint-1").format == "zero2"
    assert ckpt.open(run, "full").path == str(run / "checkpoint-2")
    for step in ("1", "2"):  # DeepSpeed's own steps, with numeric names
        shutil.rmtree(run / f"checkpoint-{step}")
        shutil.copytree(FIXTURES / f"trainer-zero2/checkpoint-{step}/global_step{step}", run / f"checkpoint-{step}")
    (run / "latest").write_text("checkpoint-1")
    assert ckpt.open(run).path == str(run / "checkpoint-1"), "the record is a rollback that somebody wanted"
    assert ckpt.resume(run) == str(run)


def test_offered_tags_can_be_opened(fixtures: Path, tmp_path: Path) -> None:
    """A folder named like a step, but without a checkpoint, is rejected by every command."""
    shutil.copytree(fixtures / "trainer-plain/checkpoint-2", tmp_path / "checkpoint-1")
    (tmp_path / "checkpoint-2").mkdir()
    (tmp_path / "checkpoint-2/notes.txt").write_text("mine")
    for tag in ("checkpoint-2", "checkpoint-9"):
        with pytest.raises(NotFoundError, match=f"with the tag '{tag}'") as caught:
            ckpt.open(tmp_path, tag=tag)
        assert caught.value.hint == "--tag checkpoint-1"
    ckpt.open(tmp_path, tag="checkpoint-1")
    shutil.rmtree(tmp_path / "checkpoint-1")
    with pytest.raises(NotFoundError) as caught:
        ckpt.open(tmp_path, tag="checkpoint-2")
    assert caught.value.hint is None
