"""`converters/quantized/quantize.py`, `converters/gguf/quantize.py`: the same bytes from any processes and workers."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

import ckpt
from converters.quantized._packed_weight import ELEMENTS
from tests.quantized.test_quantize import METHODS, saved
from tests.support.commands import contents
from tests.support.engines import fork
from tests.support.places import FIXTURES

SIZES: dict[str, Any] = {
    "vocab_size": 276,
    "hidden_size": 256,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "head_dim": 64,
}
CASES = [
    *(("llama", "hf", method) for method in METHODS),
    *(("llama", "gguf", "q8_0"), ("gpt_oss", "hf", "mxfp4"), ("gpt_oss", "gguf", "mxfp4")),
]
WORKER = "tests.quantized.processes_worker"
PRELOADED = ["ckpt.api", "converters.huggingface.hf", "converters.quantized.quantize", "converters.gguf.write"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Quantize weights of several blocks by two and by three processes, and return the folder with all outputs."""
    pytest.importorskip("gguf", reason="gguf is not installed")
    from transformers import GptOssConfig, GptOssForCausalLM, LlamaConfig, LlamaForCausalLM

    folder = tmp_path_factory.mktemp("processes")
    torch.manual_seed(4)
    experts = GptOssConfig(**SIZES, intermediate_size=3072, num_local_experts=2, num_experts_per_tok=2)
    for name, model in (
        ("llama", LlamaForCausalLM(LlamaConfig(**SIZES, intermediate_size=10240))),
        ("gpt_oss", GptOssForCausalLM(experts)),
    ):
        assert max(one.numel() for one in model.parameters()) > ELEMENTS
        saved(model, folder / name)
        for file in (FIXTURES / "gguf" / name).glob("*token*"):
            shutil.copy(file, folder / name)
    fork([(ranks, WORKER, [json.dumps(CASES), str(folder)]) for ranks in (2, 3)], PRELOADED)
    return folder


@pytest.mark.parametrize("case", CASES, ids=" ".join)
def test_workers_and_processes_do_not_change_the_bytes(
    case: tuple[str, str, str], folder: Path, tmp_path: Path
) -> None:
    (model, to, method), name = case, "-".join(case)
    for workers in (1, 2, 3, 4):
        ckpt.convert(folder / model, to, tmp_path / f"{workers}", quantize=method, workers=workers)
    alone = contents(tmp_path / "1")
    assert any(file.endswith((".safetensors", ".gguf")) for file in alone)
    others = [*(tmp_path / f"{workers}" for workers in (2, 3, 4)), *(folder / f"{ranks}/{name}" for ranks in (2, 3))]
    assert [other for other in others if contents(other) != alone] == []
