"""Scripts in examples/: each runs on TRL's files, and its result must match TRL's own."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from ckpt.plan.checkpoint import MASTER
from tests.support.adapters import differing, load_base, same, weights
from tests.support.engines import Truth
from tests.support.places import FIXTURES, REPOSITORY


@pytest.fixture
def here(tmp_path: Path) -> Path:
    """Create `run`, a TRL run, and `lora`, a TRL run with an adapter."""
    shutil.copytree(FIXTURES / "trl-zero3/outputs/qwen3-sft", tmp_path / "run")
    shutil.copytree(FIXTURES / "trl-lora-zero3/outputs/qwen3-lora", tmp_path / "lora")
    shutil.copytree(FIXTURES / "trl-lora-zero3/Qwen", tmp_path / "Qwen")
    return tmp_path


def example(name: str, *words: str, folder: Path, code: int = 0) -> list[str]:
    """Return the lines printed by an example script."""
    env = os.environ | {"PYTHONPATH": str(REPOSITORY)}
    command = [sys.executable, str(REPOSITORY / "examples" / f"{name}.py"), *words]
    done = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, timeout=120)
    assert done.returncode == code, done.stderr
    return done.stdout.splitlines()


def test_every_example_is_run_here() -> None:
    scripts = {path.stem for path in (REPOSITORY / "examples").glob("*.py")}
    assert scripts == {name.removeprefix("test_") for name in globals() if name.removeprefix("test_") in scripts}


def test_reshard_and_resume(here: Path) -> None:
    before, after, outcome = example("reshard_and_resume", "run", "3", folder=here)
    assert before == "run was written by 2 ranks at step 2"
    folder, _, rest = after.partition(" is for ")
    assert rest == "3 ranks" and outcome.startswith("equal: 75 tensors ")
    assert len(list(Path(folder).glob("global_step2/*_optim_states.pt"))) == 3


def test_inspect_checkpoint(here: Path) -> None:
    lines = example("inspect_checkpoint", "run", folder=here)
    truth = Truth.load(FIXTURES / "trl-zero3/truth/checkpoint-2.safetensors").tensors
    shown = {line.split()[0]: line.split(maxsplit=2)[2] for line in lines if line.endswith("]")}
    assert shown == {fqn: str(list(shape)) for (fqn, role), (_, shape, _) in truth.items() if role == MASTER}
    name = next(iter(shown))
    weight, mean = (np.frombuffer(truth[name, role][2], np.float32) for role in (MASTER, "exp_avg"))
    rows = weight.reshape(truth[name, MASTER][1])[:2]
    assert f"{name}: the first rows reach from {rows.min():.6f} to {rows.max():.6f}" in lines
    assert f"{name}: exp_avg has the mean {mean.mean():.3e}" in lines


def test_verify_two_runs(here: Path) -> None:
    shutil.copytree(here / "run", here / "other")
    assert example("verify_two_runs", "run", "other", folder=here)[-1].startswith("equal: 75 tensors ")
    file = next((here / "other").glob("checkpoint-2/global_step2/*_rank_1_*_optim_states.pt"))
    content = file.read_bytes()
    middle = len(content) // 2
    file.write_bytes(content[:middle] + bytes([content[middle] ^ 1]) + content[middle + 1 :])
    *lines, outcome = example("verify_two_runs", "run", "other", folder=here, code=1)
    assert "1 of " in lines[0] and "(rank 1)" not in lines[0] and outcome.startswith("different: 1 differ, ")


def test_merge_lora(here: Path) -> None:
    """The result matches PEFT's merge saved by transformers."""
    from peft import PeftModel

    lines = example("merge_lora", "lora", "merged", folder=here)
    base = here / "Qwen/Qwen3-30B-A3B"
    model = PeftModel.from_pretrained(load_base(base), here / "lora/checkpoint-2")
    model.merge_and_unload().save_pretrained(here / "peft")
    merged, before, expected = (weights(folder) for folder in (here / "merged", base, here / "peft"))
    assert differing(merged, expected) == []
    changed = {name for name in merged if not same(merged[name], before[name])}
    assert changed == {line.strip() for line in lines[1:]} and lines[0].startswith(f"{len(changed)} tensors of ")


def test_the_batch_script_of_trl_says_how_it_is_used() -> None:
    """tests/train/test_slurm.py runs the script on a real cluster."""
    script = REPOSITORY / "examples/trl/sft.sbatch"
    assert subprocess.run(["bash", "-n", script]).returncode == 0
    done = subprocess.run(["bash", script, "run"], capture_output=True, text=True)
    assert done.returncode == 2 and "RUN_FOLDER ACCELERATE_CONFIG [options of sft.py]" in done.stderr
