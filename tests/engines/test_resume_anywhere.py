"""`ckpt/commands/resume/resuming.py`: one run moves through many engines and numbers of ranks.

After each move the loaded state equals the saved state, except for parameters fused by Megatron.
"""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.engines import DEEPSPEED, RESUMING, Truth, fork, launch_in_turn, raw
from tests.support.places import REPOSITORY
from tests.support.resuming import losses

pytestmark = pytest.mark.slow

TITLE = "ckpt.resume, two steps on each: loss of each step, and of the unbroken run"
COMMON = {"model": "llama_wide", "vocab": 512, "dtype": "fp32", "scheduler": "torch", "schedule_steps": 24, "lr": 2e-3}
GRID = {"tp": 2, "pp": 2, "transformer_impl": "local"}
#: Strategy, ranks, ckpt.resume's options not recorded by this trainer, and the trainer's options.
CHAIN: list[tuple[str, int, dict[str, Any], dict[str, Any]]] = [
    ("zero3", 4, {}, {}),
    ("zero2", 3, {"format": "zero2"}, {}),
    ("fsdp2", 2, {"format": "dcp"}, {}),
    ("zero3", 4, {"format": "zero3", "dtype": "fp32"}, {}),
    ("megatron", 4, {"format": "megatron"} | GRID, {"tp": 2, "pp": 2, "save": "torch", "vocab_multiple": 128}),
    ("zero1", 2, {"format": "zero1"}, {}),
]


@pytest.fixture(scope="module")
def chain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder with each run of the chain, named by number, and the unbroken run."""
    folder = tmp_path_factory.mktemp("anywhere")
    starts: list[tuple[int, list[dict[str, Any]]]] = []
    for number, (strategy, ranks, told, options) in enumerate(CHAIN):
        job = {"strategy": strategy, "output": str(folder / str(number)), "steps": 2, "truth": True} | COMMON | options
        if number:
            job |= {"anywhere": {"path": str(folder / str(number - 1))} | told, "loaded": True}
        starts.append((ranks, [job]))
    steps = 2 * len(CHAIN)
    unbroken = {"strategy": "zero3", "output": str(folder / "unbroken"), "steps": steps, "save_at": 0} | COMMON
    starts[0][1].append(unbroken)
    launch_in_turn(starts, folder, "tests.support.resume_worker")
    return folder


def gathered(truth: Path) -> dict[tuple[str, str], Any]:
    """Return all tensors of a truth file from fp32 training: the optimizer's weights and its states."""
    tensors = Truth.load(truth).tensors
    masters = {(fqn, "weight"): one for (fqn, role), one in tensors.items() if role == "master"}
    return {key: one for key, one in tensors.items() if key[1] != "master"} | masters


CHANGES = [n for n in range(1, len(CHAIN)) if "megatron" not in (CHAIN[n - 1][0], CHAIN[n][0])]


@pytest.mark.parametrize("number", CHANGES, ids=lambda n: f"{CHAIN[n - 1][0]}-to-{CHAIN[n][0]}")
def test_what_is_loaded_is_what_was_saved(number: int, chain: Path) -> None:
    (saved,) = (path for path in (chain / str(number - 1) / "truth").glob("*.safetensors") if is_of_a_step(path))
    before, after = gathered(saved), gathered(chain / str(number) / "truth" / "loaded.safetensors")
    assert {role for _, role in before} >= {"weight", "exp_avg", "exp_avg_sq"}
    assert before.keys() == after.keys()
    assert [key for key in before if before[key] != after[key]] == []


def is_of_a_step(path: Path) -> bool:
    return path.stem != "loaded" and not path.stem.endswith("-logits")


def test_losses_are_those_of_the_unbroken_run(chain: Path, tables: Any) -> None:
    unbroken = losses(chain / "unbroken")
    for number, (strategy, ranks, _, _) in enumerate(CHAIN):
        steps = losses(chain / str(number))
        assert list(steps) == [2 * number + 1, 2 * number + 2]
        cells = {f"step {1 + step % 2}": f"{loss:.6f} {unbroken[step]:.6f}" for step, loss in steps.items()}
        tables[TITLE][f"{number}: {strategy} on {ranks}"] = cells
        for step, loss in steps.items():
            assert math.isclose(loss, unbroken[step], rel_tol=1e-6), (strategy, step)


def test_the_script_of_the_document(tmp_path: Path, tables: Any) -> None:
    """HF Trainer resumes in one folder: ZeRO-3 on 4 ranks, ZeRO-2 on 3, FSDP2 on 2, ZeRO-3 on 4."""
    shutil.copy(REPOSITORY / "examples" / "trainer" / "resume_anywhere.py", tmp_path)
    parts = [("zero3", 4), ("zero2", 3), ("fsdp2", 2), ("zero3", 4)]
    starts: list[tuple[int, str, list[str]]] = []
    for folder in ("outputs", "unbroken"):
        (tmp_path / folder).mkdir()
    worker = "tests.support.user_script"
    for number, (engine, ranks) in enumerate(parts, 1):
        starts.append((ranks, worker, [str(2 * number), str(tmp_path), "resume_anywhere.py", engine, "outputs"]))
    starts.append((4, worker, ["0", str(tmp_path), "resume_anywhere.py", "zero3", "unbroken"]))
    fork(starts, ["tests.support.hf_trainer", *DEEPSPEED, *RESUMING])
    history, unbroken = (
        {
            line["step"]: line
            for line in json.loads((tmp_path / of / "checkpoint-8" / "trainer_state.json").read_text())["log_history"]
        }
        for of in ("outputs", "unbroken")
    )
    assert list(history) == list(unbroken) == list(range(1, 9))
    assert {folder.name for folder in (tmp_path / "outputs").glob("checkpoint-*")} == {
        f"checkpoint-{n}" for n in (2, 4, 6, 8)
    }
    for step, line in history.items():
        assert (line["learning_rate"], line["epoch"]) == (unbroken[step]["learning_rate"], unbroken[step]["epoch"])
        in_bf16 = parts[(step - 1) // 2][0] == "fsdp2"  # with FSDP2 the model's own loss is bf16
        assert math.isclose(line["loss"], unbroken[step]["loss"], rel_tol=2**-8 if in_bf16 else 5e-4), step
    for name, lines in (("HF Trainer, from engine to engine", history), ("HF Trainer, unbroken", unbroken)):
        tables[f"{TITLE}, HF Trainer"][name] = {str(step): f"{line['loss']:.6f}" for step, line in lines.items()}


@pytest.fixture(scope="module")
def libraries(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Run TRL's and Accelerate's scripts. Return the folder with their loaded states and losses."""
    folder = tmp_path_factory.mktemp("libraries")
    shutil.copytree(REPOSITORY / "fixtures" / "trl-zero2" / "outputs" / "llama-sft", folder / "sft")
    starts = [
        (2, ["sft", "2", str(folder / "sft"), str(folder / "sft as it is")]),
        (3, ["sft", "3", str(folder / "sft"), str(folder / "sft converted")]),
        (2, ["save", "2", str(folder / "run"), str(folder / "accelerate")]),
        (3, ["load", "3", str(folder / "run"), str(folder / "accelerate converted")]),
    ]
    worker = "tests.engines.resuming_scripts"
    fork([(ranks, worker, words) for ranks, words in starts], ["train.engines.zero", "trl", "datasets", *RESUMING])
    return folder


@pytest.mark.parametrize("name", ["sft", "accelerate"])
def test_scripts_of_trl_and_accelerate(name: str, libraries: Path, tables: Any) -> None:
    """SFTTrainer resumes its own ZeRO-2 run from 2 ranks, and `load_state` resumes from `save_state`."""
    unbroken, converted = libraries / (name if name != "sft" else "sft as it is"), libraries / f"{name} converted"
    before, after = (torch.load(folder / "loaded.pt") for folder in (unbroken, converted))
    assert before.keys() == after.keys() and {key.partition("/")[0] for key in before} >= {"master", "exp_avg_sq"}
    assert [key for key in before if raw(before[key]) != raw(after[key])] == []
    steps, others = (json.loads((folder / "losses.json").read_text()) for folder in (unbroken, converted))
    assert len(steps) == len(others) == 2
    for one, other in zip(steps, others, strict=True):
        assert math.isclose(one, other, rel_tol=5e-4)
    tables[f"{TITLE}, TRL and Accelerate"][name] = {
        f"step {number}": f"{other:.6f} {one:.6f}"
        for number, (one, other) in enumerate(zip(steps, others, strict=True), 3)
    }
