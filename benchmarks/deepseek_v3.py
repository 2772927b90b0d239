"""Sparse checkpoint with DeepSeek-V3's size in the Hub's layout in bf16: all names and shapes, no data.

The config is the published one without `quantization_config`. Multi-token prediction is layer 61. With `tiny`, all
sizes are small and the bytes random. A number stands for as many layers.

    python -m benchmarks.deepseek_v3 FOLDER [tiny|NUMBER]
"""

from __future__ import annotations

import json
import os
import struct
import sys
from collections.abc import Iterator
from math import prod
from pathlib import Path
from typing import Any

import numpy as np

CONFIG: dict[str, Any] = {
    "architectures": ["DeepseekV3ForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "ep_size": 1,
    "first_k_dense_replace": 3,
    "hidden_act": "silu",
    "hidden_size": 7168,
    "initializer_range": 0.02,
    "intermediate_size": 18432,
    "kv_lora_rank": 512,
    "max_position_embeddings": 163840,
    "model_type": "deepseek_v3",
    "moe_intermediate_size": 2048,
    "moe_layer_freq": 1,
    "n_group": 8,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "norm_topk_prob": True,
    "num_attention_heads": 128,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 61,
    "num_key_value_heads": 128,
    "num_nextn_predict_layers": 1,
    "q_lora_rank": 1536,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "rms_norm_eps": 1e-06,
    "rope_scaling": {
        "beta_fast": 32,
        "beta_slow": 1,
        "factor": 40,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
        "original_max_position_embeddings": 4096,
        "type": "yarn",
    },
    "rope_theta": 10000,
    "routed_scaling_factor": 2.5,
    "scoring_func": "sigmoid",
    "tie_word_embeddings": False,
    "topk_group": 4,
    "topk_method": "noaux_tc",
    "torch_dtype": "bfloat16",
    "transformers_version": "4.33.1",
    "use_cache": True,
    "v_head_dim": 128,
    "vocab_size": 129280,
}
_TINY = {
    "hidden_size": 128,
    "intermediate_size": 64,
    "kv_lora_rank": 32,
    "moe_intermediate_size": 16,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
    "q_lora_rank": 32,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 8,
    "v_head_dim": 8,
    "vocab_size": 512,
}
#: 16 stages: the embedding first, multi-token prediction last.
PIPELINE = "Et*4|(t*4|)*14tmL"

_SHARD = 8_600_000_000  # the published checkpoint has 163 files

Shape = tuple[int, ...]


def shapes() -> Iterator[tuple[str, Shape]]:
    """Yield names and shapes in file order."""
    hidden, vocab = CONFIG["hidden_size"], CONFIG["vocab_size"]
    yield "model.embed_tokens.weight", (vocab, hidden)
    num_layers = CONFIG["num_hidden_layers"]
    for i in range(num_layers + CONFIG["num_nextn_predict_layers"]):
        layer = f"model.layers.{i}"
        if i >= num_layers:
            yield f"{layer}.embed_tokens.weight", (vocab, hidden)
            yield f"{layer}.enorm.weight", (hidden,)
            yield f"{layer}.hnorm.weight", (hidden,)
            yield f"{layer}.eh_proj.weight", (hidden, 2 * hidden)
            yield f"{layer}.shared_head.norm.weight", (hidden,)
            yield f"{layer}.shared_head.head.weight", (vocab, hidden)
        for name, shape in _layer(dense=i < CONFIG["first_k_dense_replace"]):
            yield f"{layer}.{name}", shape
    yield "model.norm.weight", (hidden,)
    yield "lm_head.weight", (vocab, hidden)


def _layer(*, dense: bool) -> Iterator[tuple[str, Shape]]:
    c = CONFIG
    hidden, heads, rank = c["hidden_size"], c["num_attention_heads"], c["kv_lora_rank"]
    yield "self_attn.q_a_proj.weight", (c["q_lora_rank"], hidden)
    yield "self_attn.q_a_layernorm.weight", (c["q_lora_rank"],)
    yield "self_attn.q_b_proj.weight", (heads * (c["qk_nope_head_dim"] + c["qk_rope_head_dim"]), c["q_lora_rank"])
    yield "self_attn.kv_a_proj_with_mqa.weight", (rank + c["qk_rope_head_dim"], hidden)
    yield "self_attn.kv_a_layernorm.weight", (rank,)
    yield "self_attn.kv_b_proj.weight", (heads * (c["qk_nope_head_dim"] + c["v_head_dim"]), rank)
    yield "self_attn.o_proj.weight", (hidden, heads * c["v_head_dim"])
    yield "input_layernorm.weight", (hidden,)
    yield "post_attention_layernorm.weight", (hidden,)
    if dense:
        yield from _mlp("mlp", c["intermediate_size"])
        return
    yield "mlp.gate.weight", (c["n_routed_experts"], hidden)
    yield "mlp.gate.e_score_correction_bias", (c["n_routed_experts"],)
    for expert in range(c["n_routed_experts"]):
        yield from _mlp(f"mlp.experts.{expert}", c["moe_intermediate_size"])
    yield from _mlp("mlp.shared_experts", c["n_shared_experts"] * c["moe_intermediate_size"])


def _mlp(name: str, size: int) -> Iterator[tuple[str, Shape]]:
    hidden = CONFIG["hidden_size"]
    yield f"{name}.gate_proj.weight", (size, hidden)
    yield f"{name}.up_proj.weight", (size, hidden)
    yield f"{name}.down_proj.weight", (hidden, size)


def write(folder: Path, kind: str = "") -> None:
    CONFIG.update(_TINY if kind == "tiny" else {"num_hidden_layers": int(kind)} if kind else {})
    shard = _SHARD // 10_000 if kind == "tiny" else _SHARD
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(CONFIG, indent=2))
    shards: list[dict[str, Any]] = [{}]
    end = 0
    for name, shape in shapes():
        dtype, itemsize = ("F32", 4) if name.endswith("e_score_correction_bias") else ("BF16", 2)
        size = prod(shape) * itemsize
        if end + size > shard:
            shards.append({})
            end = 0
        shards[-1][name] = {"dtype": dtype, "shape": shape, "data_offsets": (end, end + size)}
        end += size
    weight_map, total = {}, 0
    for number, entries in enumerate(shards, 1):
        file = f"model-{number:05d}-of-{len(shards):06d}.safetensors"
        header = json.dumps(entries).encode()
        header += b" " * (-len(header) % 8)
        size = max(entry["data_offsets"][1] for entry in entries.values())
        (folder / file).write_bytes(struct.pack("<Q", len(header)) + header)
        if kind == "tiny":
            with (folder / file).open("ab") as weights:
                weights.write(np.random.default_rng(number).bytes(size))
        os.truncate(folder / file, 8 + len(header) + size)
        weight_map |= dict.fromkeys(entries, file)
        total += size
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    print(f"{len(weight_map)} tensors, {total} bytes in {len(shards)} files")


if __name__ == "__main__":
    write(Path(sys.argv[1]), *sys.argv[2:])
