"""`converters/quantized/original.py`: a gpt-oss in MXFP4, fine-tuned by TRL and released like the original."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.quantized.test_like import cached
from tests.quantized.test_quantize import SIZES, quantize
from tests.quantized.trl_worker import ATTENTION, EXPERTS, FROZEN_EXPERT, TOKENS
from tests.support.adapters import differing, same, weights
from tests.support.commands import ckpt
from tests.support.kept import make_once
from tests.support.model_files import merge_json
from tests.support.places import FIXTURES, REPOSITORY

pytestmark = pytest.mark.slow
WORKER = "tests.quantized.trl_worker"
PLAIN_MODULES = ["model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head"]


def save_released(folder: Path) -> Path:
    """Save a tiny gpt-oss in the layout of openai/gpt-oss-20b, with random bits in its experts."""
    from transformers import GptOssConfig, GptOssForCausalLM

    torch.manual_seed(7)
    sizes = {**SIZES, "vocab_size": 276, "hidden_size": 64, "intermediate_size": 96}
    model = GptOssForCausalLM(GptOssConfig(**sizes, num_local_experts=3, num_experts_per_tok=2))
    model.to(SIZES["dtype"]).save_pretrained(folder)
    tensors = {}
    for name, tensor in weights(folder).items():
        if name.endswith("_proj"):
            num_experts, num_in, num_out = tensor.shape
            shape = (num_experts, num_out, num_in // 32)
            tensors[f"{name}_blocks"] = torch.randint(0, 256, (*shape, 16), dtype=torch.uint8)
            tensors[f"{name}_scales"] = torch.randint(118, 122, shape, dtype=torch.uint8)
        else:
            tensors[name] = tensor
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    entry = {"modules_to_not_convert": PLAIN_MODULES, "quant_method": "mxfp4"}
    merge_json(folder / "config.json", {"quantization_config": entry})
    for file in (FIXTURES / "gguf/gpt_oss").glob("*token*"):
        shutil.copy(file, folder)
    shutil.copy(FIXTURES / "gguf/gpt_oss/chat_template.jinja", folder)
    return folder


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with `released`, `plain`, and both fine-tuned by TRL."""
    folder = tmp_path_factory.mktemp("models")
    source = save_released(folder / "released")
    done = ckpt("convert", "hf", "hf", source, "-o", folder / "plain", "--dequantize", "--no-manifest")
    assert done.code == 0, done.err
    command = [sys.executable, "-m", WORKER, str(folder)]

    def train() -> None:
        done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, timeout=600)
        assert done.returncode == 0, done.stderr[-6000:]

    make_once(folder, (WORKER,), "", train)
    return folder


@pytest.mark.parametrize("name", ["released", "plain"], ids=["dequantized by transformers", "dequantized by ckpt"])
def test_fine_tune_by_trl_is_released_like_the_original(
    name: str, models: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from transformers import AutoModelForCausalLM

    original, tuned = models / "released", models / f"{name}-tuned"
    hub = cached(Path(shutil.copytree(original, tmp_path / "released")), monkeypatch)
    again = quantize(tuned, tmp_path / "again", "mxfp4", "--like", hub, "--verify")
    before, after, plain = weights(original), weights(again), weights(tuned)
    parts = [f"{EXPERTS}_blocks", f"{EXPERTS}_scales"]
    assert before.keys() == after.keys()
    assert set(differing(before, after)) == {*parts, ATTENTION}
    assert same(after[ATTENTION], plain[ATTENTION])
    changed = torch.stack([(before[part] != after[part]).flatten(1).any(-1) for part in parts]).any(0)
    assert [number for number, is_changed in enumerate(changed) if not is_changed] == [FROZEN_EXPERT]
    configs = [json.loads((folder / "config.json").read_text()) for folder in (original, again)]
    assert configs[0]["quantization_config"] == configs[1]["quantization_config"]
    assert ckpt("verify", tuned, again, "--quantized").code == 0
    assert ckpt("verify", tuned, original, "--quantized").code == 1
    loaded = [AutoModelForCausalLM.from_pretrained(folder, dtype=SIZES["dtype"]) for folder in (original, again)]
    expected = load_file(models / f"{name}-logits.safetensors")["logits"]
    with torch.no_grad():
        errors = [(one.float().eval()(torch.tensor(TOKENS)).logits - expected).abs() for one in loaded]
    # Not the maximum: for one token, a router may choose another expert.
    assert errors[1].mean() < 0.1 * expected.std() and 4 * errors[1].mean() < errors[0].mean()


def test_both_ways_to_dequantize_train_the_same_model(models: Path, tmp_path: Path) -> None:
    like = ("--like", str(models / "released"))
    files = [
        quantize(models / f"{name}-tuned", tmp_path / name, "mxfp4", *like) / "model.safetensors"
        for name in ("released", "plain")
    ]
    assert files[0].read_bytes() == files[1].read_bytes()
