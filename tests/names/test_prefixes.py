"""`converters/names/transformers/tables.py`: path prefixes that transformers removes, by model type."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from tests.support.commands import ckpt

SIZES: dict[str, Any] = {
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 2,
    "vocab_size": 32,
    "head_dim": 8,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
}
CONFIGS: dict[str, dict[str, Any]] = {
    "qwen3_5_text": {
        "linear_num_value_heads": 2,
        "linear_num_key_heads": 2,
        "linear_key_head_dim": 8,
        "linear_value_head_dim": 8,
        "layer_types": ["linear_attention", "full_attention"],
    },
    "gemma3n_text": {
        "hidden_size_per_layer_input": 8,
        "vocab_size_per_layer_input": 32,
        "num_kv_shared_layers": 0,
        "laurel_rank": 4,
        "intermediate_size": [16, 16],
        "activation_sparsity_pattern": [0.0, 0.0],
        "altup_num_inputs": 2,
        "layer_types": ["sliding_attention", "full_attention"],
    },
}


@pytest.mark.parametrize("model_type", CONFIGS)
def test_files_with_the_prefix_load_and_are_proved(model_type: str, tmp_path: Path) -> None:
    from transformers import CONFIG_MAPPING, AutoModelForCausalLM

    config = CONFIG_MAPPING[model_type](**{**SIZES, **CONFIGS[model_type]})
    model = AutoModelForCausalLM.from_config(config).bfloat16()
    model.save_pretrained(tmp_path / "model")
    file = tmp_path / "model" / "model.safetensors"
    plain = load_file(file)
    for prefix in ("model.", "model.language_model.", "model.nobodys."):
        stored = {name.replace("model.", prefix, 1): tensor for name, tensor in plain.items()}
        save_file(stored, file, metadata={"format": "pt"})
        _, info = type(model).from_pretrained(tmp_path / "model", output_loading_info=True)
        done = ckpt("convert", "hf", "hf", tmp_path / "model", "-o", tmp_path / prefix)
        loads = not info["missing_keys"] and not info["unexpected_keys"]
        assert loads == (prefix != "model.nobodys.")
        assert (done.code == 0 and "from_pretrained can load this folder" in done.err) == loads, done.err
