"""DeepSpeed's AutoEP: the state dict of a run at autoep_size 1, as the hint at its checkpoints asks for it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import Qwen3MoeForCausalLM

import ckpt
from tests.support import commands
from tests.support.engines import raw

NAME = "autoep-full"
LAYER = "model.layers.{}.mlp."
#: Names of the Hub's by those in AutoEP's files of experts.
NAMES = {"w1": "gate_proj", "w2": "down_proj", "w3": "up_proj"}


@pytest.fixture
def converted(fixtures: Path, tmp_path: Path) -> Path:
    done = commands.ckpt("convert", "full", "hf", fixtures / NAME / "pytorch_model.bin", "-o", tmp_path / "out")
    assert done.code == 0 and "AutoEP's names" in done.err and "from_pretrained finds every tensor" in done.err
    return tmp_path / "out"


def test_weights_are_those_of_the_run(fixtures: Path, converted: Path) -> None:
    saved = load_file(fixtures / NAME / "truth/experts.safetensors")
    written = load_file(converted / "model.safetensors")
    stored = torch.load(fixtures / NAME / "pytorch_model.bin", weights_only=True)
    for layer in range(2):
        for expert in range(4):
            for own, hub in NAMES.items():
                name = LAYER.format(layer) + f"experts.{expert}.{hub}.weight"
                assert raw(written.pop(name)) == raw(saved[LAYER.format(layer) + f"experts.{own}.{expert}"])
        router = stored[LAYER.format(layer) + "router.gate.weight"]
        assert raw(written.pop(LAYER.format(layer) + "gate.weight")) == raw(router)
    assert {fqn: raw(tensor) for fqn, tensor in written.items()} == {
        fqn: raw(tensor) for fqn, tensor in stored.items() if ".mlp." not in fqn
    }


def test_the_model_computes_what_the_engine_computed(fixtures: Path, converted: Path) -> None:
    """Within bf16's rounding, and not with gates and ups exchanged."""
    truth = load_file(fixtures / NAME / "truth/experts.safetensors")
    model = Qwen3MoeForCausalLM.from_pretrained(converted, dtype=torch.bfloat16).eval()

    def difference() -> float:
        with torch.no_grad():
            return float((model(input_ids=truth["input_ids"]).logits.float() - truth["logits"].float()).abs().max())

    assert difference() < 0.1
    for layer in model.model.layers:
        both = layer.mlp.experts.gate_up_proj
        both.data = both.data.roll(both.shape[1] // 2, 1)
    assert difference() > 1


def test_another_architecture_is_not_guessed(fixtures: Path, tmp_path: Path) -> None:
    checkpoint = ckpt.open(fixtures / NAME / "pytorch_model.bin")
    assert checkpoint.ties == {
        LAYER.format(n) + "gate.gate.weight": LAYER.format(n) + "router.gate.weight" for n in (0, 1)
    }
    config = (fixtures / NAME / "config.json").read_text().replace('"qwen3_moe"', '"mixtral"')
    (tmp_path / "config.json").write_text(config.replace("Qwen3MoeForCausalLM", "MixtralForCausalLM"))
    done = commands.ckpt(
        *("convert", "full", "hf", fixtures / NAME / "pytorch_model.bin"),
        *("--config", tmp_path, "-o", tmp_path / "out"),
    )
    assert done.code == 6 and not (tmp_path / "out").exists()
