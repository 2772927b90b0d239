"""Whole models quantized by libraries: `--dequantize` writes a model with the logits of the quantized one.

`fixtures/make_whole_models.py` recorded the logits on a CPU. Other CPUs add in another order.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

import ckpt
from tests.support.places import REPOSITORY

MODELS = sorted((REPOSITORY / "fixtures/whole-quantized").glob("*.safetensors"))


@pytest.mark.parametrize("path", MODELS, ids=[path.stem for path in MODELS])
def test_the_plain_model_has_the_quantized_models_logits(path: Path, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    with safe_open(path, "pt") as file:
        metadata = dict(file.metadata())
    tensors, config = load_file(path), metadata.pop("config")
    inputs, logits = tensors.pop("inputs"), tensors.pop("logits")
    source, out = tmp_path / "model", tmp_path / "plain"
    source.mkdir()
    save_file(tensors, source / "model.safetensors", {"format": "pt", **metadata})
    (source / "config.json").write_text(config)
    assert ckpt.check(source, values=True).whole
    ckpt.convert(source, "hf", out, dequantize=True)
    dtype = getattr(torch, json.loads(config)["dtype"])
    model, info = AutoModelForCausalLM.from_pretrained(out, dtype=dtype, output_loading_info=True)
    assert not any(info.values()), info
    with torch.no_grad():
        found = model.eval()(inputs).logits.float()
    assert (found - logits).abs().max() <= 2**-5 * logits.abs().max()
    assert ckpt.verify(out, source, quantized=True).rounded
