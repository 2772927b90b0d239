"""All Python blocks in docs/api.md, run in order on TRL's output."""

from __future__ import annotations

import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

import ckpt
from ckpt.commands.push import push as hub
from tests.support.mounting import no_fuse
from tests.support.places import FIXTURES, REPOSITORY

PAGE = (REPOSITORY / "docs/api.md").read_text()


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_the_blocks_of_the_page_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers import AutoConfig, AutoModelForCausalLM

    shutil.copytree(FIXTURES / "trl-zero3/outputs/qwen3-sft", tmp_path / "outputs")
    shutil.copytree(FIXTURES / "trl-lora-zero3/outputs/qwen3-lora", tmp_path / "lora")
    shutil.copytree(FIXTURES / "trl-lora-zero3/Qwen", tmp_path / "Qwen")
    monkeypatch.chdir(tmp_path)
    pushed: list[tuple[Path, Any]] = []

    def push(folder: Path, to: Any, **_: object) -> hub.Pushed:
        pushed.append((folder, to))
        return hub.Pushed(to.repo_id, "https://huggingface.co/org/name", 1, 1)

    monkeypatch.setattr(hub, "push", push)
    config = AutoConfig.from_pretrained("outputs/checkpoint-2")
    names: dict[str, Any] = {"model": AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)}
    blocks = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    for block in blocks:
        if "ckpt.mount(" in block and no_fuse():
            continue  # tests/views/test_mount.py skips it with a reason
        exec(compile(block, "docs/api.md", "exec"), names)
    assert ckpt.verify("outputs-bf16", "outputs-hf", cast=True).equal
    assert pushed[0][0] == Path("outputs-hf") and pushed[0][1].private
    norm = names["model"].state_dict()["model.norm.weight"]
    assert torch.equal(norm, torch.as_tensor(ckpt.open("outputs")["model.norm.weight"]).to(norm.dtype))


def test_each_function_is_described_once_with_an_example() -> None:
    parts = re.split(r"^::: ", PAGE, flags=re.MULTILINE)
    described = {found[1]: part for part in parts if (found := re.search(r'heading: "ckpt\.(\w+)"', part))}
    assert described.keys() == set(ckpt.__all__) - {"__version__"}
    for name, part in described.items():
        assert f"ckpt.{name}(" in part or name == "CkptError"
