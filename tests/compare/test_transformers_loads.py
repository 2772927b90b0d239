"""`ckpt/compare/transformers_loads.py`: `ckpt verify --loads` names every fault in a folder."""

from __future__ import annotations

import importlib.util
import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from ckpt.errors import NotFoundError, UsageError
from tests.support.adapters import BF16, save_base, weights
from tests.support.commands import ckpt
from tests.support.model_files import merge_json


def test_verify_loads_names_what_is_wrong(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bases = {model: save_base(model, BF16, tmp_path / model) for model in ("qwen3_moe", "llama")}
    (tmp_path / "empty").mkdir()
    good = ckpt("verify", "--loads", bases["qwen3_moe"])
    assert (good.code, good.out.splitlines()[-1].endswith("loads")) == (0, True)
    bad = tmp_path / "bad"
    shutil.copytree(bases["qwen3_moe"], bad)
    stored = weights(bad)
    del stored["model.norm.weight"]
    stored |= {"extra": torch.zeros(2), "model.layers.0.self_attn.q_proj.weight": torch.zeros(3, 5)}
    save_file(stored, bad / "model.safetensors", metadata={"format": "pt"})
    merge_json(bad / "generation_config.json", {"eos_token_id": 10**6})
    (bad / "tokenizer_config.json").write_text("{}")
    result = ckpt("verify", "--loads", bad, "--json")
    assert result.code == 1
    problems = "\n".join(json.loads(result.out)["problems"])
    for expected in (
        "missing: model.norm.weight",
        "unexpected: extra",
        "mismatched: model.layers.0.self_attn.q_proj.weight has shape [3, 5]",
        "eos_token_id 1000000 is outside the embedding",
        "tokenizer: ",
    ):
        assert expected in problems
    with monkeypatch.context() as patch:
        find = importlib.util.find_spec
        patch.setattr(importlib.util, "find_spec", lambda name: None if name == "accelerate" else find(name))
        lacking = ckpt("verify", "--loads", bases["qwen3_moe"])
    assert lacking.code == UsageError.exit_code and "loading a model needs accelerate" in lacking.err
    assert lacking.err.rstrip().endswith("hint: pip install 'transformers>=5' torch accelerate")
    assert ckpt("verify", "--loads", bases["llama"], bad).code == UsageError.exit_code
    assert ckpt("verify", "--loads", tmp_path / "empty").code == NotFoundError.exit_code


@pytest.mark.parametrize(
    ("entry", "problem"),
    [
        ({"quant_method": "frobnicate"}, "transformers does not know quantization method 'frobnicate'"),
        ({"bits": 4}, "has no `quant_method` attribute"),
    ],
)
def test_a_quantization_method_that_transformers_does_not_know_is_a_problem(
    entry: dict[str, object], problem: str, tmp_path: Path
) -> None:
    """Loaded with transformers, the weights look plain; it only warns."""
    base = save_base("llama", BF16, tmp_path / "base")
    assert ckpt("verify", base, "--loads").out.rstrip().endswith(": loads")
    merge_json(base / "config.json", {"quantization_config": entry})
    done = ckpt("verify", base, "--loads")
    assert done.code == 1 and problem in done.out and ": loads" not in done.out, done.out
