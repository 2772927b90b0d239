"""`ckpt/commands/merge_lora/command.py`, `ckpt/views/without_torch.py`: commands with only the base package."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
from pathlib import Path

import pytest
import torch
from transformers import Qwen3Config, Qwen3MoeConfig, Qwen3MoeForCausalLM

import ckpt
from tests.cli.environments import environment
from tests.support.pages import commands
from tests.support.places import REPOSITORY
from tests.support.sampling import sample

pytestmark = pytest.mark.slow

README = (REPOSITORY / "README.md").read_text()
COMMANDS = [
    *(one.text for one in commands(README) if one.text.startswith("ckpt ")),
    *(
        command
        for cell in re.findall(r"^\|.*\| (`ckpt [^|]+`) \|$", README, re.MULTILINE)
        for command in re.findall("`([^`]+)`", cell)
    ),
    "ckpt verify --loads outputs-merged",
]
#: Each environment's extra distributions, and the commands that need more.
INSTALLED = {"base": (), "torch": ("torch",)}
NEEDS_TORCH, NEEDS_TRANSFORMERS = r"ckpt merge-lora", r"ckpt verify --loads"
LACKING = {"base": (NEEDS_TORCH, NEEDS_TRANSFORMERS), "torch": (NEEDS_TRANSFORMERS,)}
#: Each environment's commands. The sample has every command without torch, and not every format with it.
OF_KIND = {
    "base": COMMANDS,
    "torch": sample(COMMANDS, lambda one: [one if "convert" not in one or " hf " in one[:21] else "another format"]),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Make the paths in the commands: runs, a model and its Megatron run."""
    place = tmp_path_factory.mktemp("readme")
    for name in ("outputs", "demo-outputs", "fixtures/moe-zero3"):
        shutil.copytree(REPOSITORY / "fixtures" / "moe-zero3", place / name)
    shutil.copytree(REPOSITORY / "fixtures" / "lora-zero3", place / "lora" / "outputs")
    torch.manual_seed(3)
    sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 16, "num_hidden_layers": 4, "head_dim": 8}
    heads = {"num_attention_heads": 8, "num_key_value_heads": 4}
    config = Qwen3MoeConfig(**sizes, **heads, moe_intermediate_size=8, num_experts=4, num_experts_per_tok=2)
    Qwen3MoeForCausalLM(config).to(torch.bfloat16).save_pretrained(place / "Qwen/Qwen3-30B-A3B")
    ckpt.plan(ckpt.open(place / "Qwen/Qwen3-30B-A3B"), "megatron").run(place / "megatron-run")
    Qwen3Config().save_pretrained(place / "Qwen/Qwen3-8B")
    return place


@pytest.fixture(scope="module", params=INSTALLED)
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def python(tmp_path_factory: pytest.TempPathFactory, kind: str) -> Path:
    return environment(tmp_path_factory.mktemp("venv") / "venv", *INSTALLED[kind])


def test_every_command_of_the_readme(folder: Path, python: Path, tmp_path: Path, kind: str) -> None:
    place = Path(shutil.copytree(folder, tmp_path / "here"))
    assert len(OF_KIND[kind]) > 12
    for command in OF_KIND[kind]:
        words = shlex.split(command.replace("hf://", ""))  # this folder stands for the Hub
        home = place / "lora" if re.match("ckpt merge-lora|ckpt verify --loads", command) else place
        before = sorted(os.listdir(home))
        done = subprocess.run(
            [python, "-m", *words],
            cwd=home,
            env={"PATH": os.environ["PATH"]},
            capture_output=True,
            text=True,
            timeout=300,
        )
        assert "Traceback" not in done.stderr, command + done.stderr
        if any(re.match(needs, command) for needs in LACKING[kind]):
            assert (done.returncode, done.stdout) == (2, ""), command + done.stderr
            first, *_, hint = done.stderr.strip().splitlines()
            assert re.match("error: .*(torch|transformers)", first) and re.match("hint: pip install ", hint)
            assert sorted(os.listdir(home)) == before
        else:
            assert done.returncode == 0, f"{command}\n{done.stderr}"


def test_the_environment_is_what_it_says(python: Path, tmp_path: Path, kind: str) -> None:
    found = "import importlib.util as u; print(*[n for n in ('torch', 'transformers', 'peft') if u.find_spec(n)])"
    printed = subprocess.run([python, "-c", found], capture_output=True, text=True, check=True, env={}, cwd=tmp_path)
    assert tuple(printed.stdout.split()) == INSTALLED[kind]
