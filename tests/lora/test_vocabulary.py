"""`ckpt/commands/merge_lora/merge.py`: adapters trained after a resize of the vocabulary."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from ckpt.errors import LossError
from tests.support.adapters import differing, perturb, weights
from tests.support.commands import ckpt

BEFORE, AFTER = 37, 40
BOTH = ["embed_tokens", "lm_head"]
#: Options of adapters trained after tokens were added, by the embeddings they save.
CASES: dict[str, dict[str, Any]] = {
    "saved beside it": {},
    "the head, as a copy": {"modules_to_save": ["lm_head"]},
    "the embedding, as a copy": {"modules_to_save": ["embed_tokens"]},
    "both, as copies": {"modules_to_save": BOTH},
    "both, kept tied": {"modules_to_save": BOTH, "ensure_weight_tying": True},
    "trained tokens": {"trainable_token_indices": [36, 37, 39]},
    "LoRA on both": {"target_modules": ["q_proj", *BOTH]},
}


def save_base(folder: Path, *, tied: bool, rows: int = BEFORE) -> Path:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 20, "num_hidden_layers": 1, "num_attention_heads": 2}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=rows, tie_word_embeddings=tied, **sizes))
    model.to(torch.bfloat16).save_pretrained(folder)
    return folder


def resized(base: Path, seed: int) -> Any:
    """Return the base with random rows for new tokens."""
    from transformers import LlamaForCausalLM

    torch.manual_seed(seed)
    model = LlamaForCausalLM.from_pretrained(base, dtype="auto")
    model.resize_token_embeddings(AFTER)
    return model


def train(base: Path, folder: Path, options: dict[str, Any]) -> Path:
    from peft import LoraConfig, get_peft_model

    model = get_peft_model(resized(base, 1), LoraConfig(**{"r": 2, "target_modules": ["q_proj"], **options}))
    perturb(model)
    model.save_pretrained(folder)
    return folder


@pytest.mark.parametrize("tied", [False, True], ids=["two embeddings", "tied"])
@pytest.mark.parametrize("case", CASES)
def test_it_is_merged_as_peft_merges_it_into_the_resized_base(case: str, tied: bool, tmp_path: Path) -> None:
    from peft import PeftModel

    base = save_base(tmp_path / "base", tied=tied)
    adapter = train(base, tmp_path / "adapter", CASES[case])
    PeftModel.from_pretrained(resized(base, 2), adapter).merge_and_unload().save_pretrained(tmp_path / "peft")
    done = ckpt("merge-lora", adapter, "--base", base, "-o", tmp_path / "ours", "--as-peft")
    assert done.code == 0, done.err
    assert f"the vocabulary has {AFTER} rows, as in training; the base has {BEFORE}" in done.err
    theirs, ours = weights(tmp_path / "peft"), weights(tmp_path / "ours")
    assert differing(ours, theirs) == []
    configs = [json.loads((tmp_path / one / "config.json").read_text()) for one in ("peft", "ours")]
    assert [one["vocab_size"] for one in configs] == [AFTER, AFTER]
    assert configs[0]["tie_word_embeddings"] == configs[1]["tie_word_embeddings"]
    assert ckpt("verify", "--loads", tmp_path / "ours").code == 0
    assert ckpt("verify", base, tmp_path / "ours", "--adapter", adapter).code == 0


def test_rows_that_the_adapter_does_not_have_are_not_made_up(tmp_path: Path) -> None:
    base = save_base(tmp_path / "base", tied=False)
    adapter = train(base, tmp_path / "adapter", {})
    file = adapter / "adapter_model.safetensors"
    tensors = load_file(file)
    del tensors["base_model.model.lm_head.weight"]
    save_file(tensors, file, metadata={"format": "pt"})
    done = ckpt("merge-lora", adapter, "--base", base, "-o", tmp_path / "out")
    assert (done.code, (tmp_path / "out").exists()) == (LossError.exit_code, False)
    assert "tensor: lm_head.weight" in done.err and f"{AFTER} rows in the adapter" in done.err
    assert "save_embedding_layers=True" in done.err
