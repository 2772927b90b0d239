"""Public models: sizes from their config.json, and their numbers of parameters."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

#: Parameters, and the config.
PUBLIC: dict[str, tuple[int, dict[str, Any]]] = {
    name: (count, config)
    for name, (count, config) in json.loads(Path(__file__).with_name("models.json").read_text()).items()
}

#: Sizes from the model card llm-jp/llm-jp-13b-v1.0-mdsfmt.
LLM_JP_13B = {
    "model_type": "gpt2",
    "n_embd": 5120,
    "n_head": 40,
    "n_layer": 40,
    "n_positions": 2048,
    "vocab_size": 50570,
}
#: From llm-jp/Megatron-DeepSpeed scripts/abci/175B/49node/, with the 13B model's tokenizer.
LLM_JP_175B = {
    "model_type": "gpt_neox",
    "hidden_size": 12288,
    "intermediate_size": 49152,
    "num_attention_heads": 96,
    "num_hidden_layers": 96,
    "rotary_pct": 0.25,
    "vocab_size": 50570,
    "tie_word_embeddings": True,
    "use_parallel_residual": False,
}
