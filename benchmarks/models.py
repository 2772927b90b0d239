"""Benchmark model: an untied llama with grouped-query attention."""

from __future__ import annotations

import json
from math import prod
from pathlib import Path

HIDDEN, FFN, VOCAB = 1024, 3584, 32000
STEP = 100
NUM_RANKS = 8
LORA_RANK = 16
GROUP = {"lr": 1e-4, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.1}


def shapes(num_layers: int) -> dict[str, tuple[int, ...]]:
    found: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (VOCAB, HIDDEN)}
    for i in range(num_layers):
        layer = f"model.layers.{i}"
        for name, shape in {
            "self_attn.q_proj": (HIDDEN, HIDDEN),
            "self_attn.k_proj": (HIDDEN // 4, HIDDEN),
            "self_attn.v_proj": (HIDDEN // 4, HIDDEN),
            "self_attn.o_proj": (HIDDEN, HIDDEN),
            "mlp.gate_proj": (FFN, HIDDEN),
            "mlp.up_proj": (FFN, HIDDEN),
            "mlp.down_proj": (HIDDEN, FFN),
            "input_layernorm": (HIDDEN,),
            "post_attention_layernorm": (HIDDEN,),
        }.items():
            found[f"{layer}.{name}.weight"] = shape
    found["model.norm.weight"] = (HIDDEN,)
    found["lm_head.weight"] = (VOCAB, HIDDEN)
    return found


def num_params(num_layers: int) -> int:
    return sum(prod(shape) for shape in shapes(num_layers).values())


def write_config(folder: Path, num_layers: int, dtype: str = "float32") -> None:
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "num_hidden_layers": num_layers,
        "hidden_size": HIDDEN,
        "intermediate_size": FFN,
        "num_attention_heads": HIDDEN // 64,
        "num_key_value_heads": HIDDEN // 256,
        "vocab_size": VOCAB,
        "max_position_embeddings": 4096,
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": False,
        "dtype": dtype,
    }
    (folder / "config.json").write_text(json.dumps(config))
