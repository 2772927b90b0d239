"""Checkpoints with Qwen3-235B-A22B's structure: 36,945 tensors on the Hub, 1,037 in memory.

`tiny` is in bf16 like on the Hub, with small sizes and random values. `real` has the published sizes in sparse files. A
number gives the ranks of a ZeRO-3 run with the small sizes and Adam's states. `30b` has the 18,867 tensors of
Qwen3-30B-A3B in 1.5 GB.

    python -m benchmarks.moe_source FOLDER tiny|real|30b|NUMBER
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

NUM_EXPERTS = 128
SIZES = {
    "tiny": {"hidden_size": 64, "moe_intermediate_size": 16, "head_dim": 16, "vocab_size": 512},
    "real": {"hidden_size": 4096, "moe_intermediate_size": 1536, "head_dim": 128, "vocab_size": 151936},
    "30b": {
        "hidden_size": 256,
        "moe_intermediate_size": 152,
        "head_dim": 16,
        "vocab_size": 8192,
        "num_hidden_layers": 48,
    },
}
_SHARD = 8_000_000_000  # bytes per file

Shape = tuple[int, ...]


def config(kind: str) -> dict[str, Any]:
    return {
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "num_hidden_layers": 94,
        "num_experts": NUM_EXPERTS,
        "num_experts_per_tok": 8,
        "num_attention_heads": 64,
        "num_key_value_heads": 4,
        "intermediate_size": 128,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "tie_word_embeddings": False,
        "dtype": "bfloat16",
        **SIZES[kind],
    }


def shapes(kind: str) -> Iterator[tuple[str, Shape]]:
    """Yield names and shapes in file order."""
    c = config(kind)
    hidden, head, inner = c["hidden_size"], c["head_dim"], c["moe_intermediate_size"]
    queries, keys = c["num_attention_heads"] * head, c["num_key_value_heads"] * head
    yield "model.embed_tokens.weight", (c["vocab_size"], hidden)
    for i in range(c["num_hidden_layers"]):
        layer = f"model.layers.{i}"
        yield f"{layer}.self_attn.q_proj.weight", (queries, hidden)
        yield f"{layer}.self_attn.k_proj.weight", (keys, hidden)
        yield f"{layer}.self_attn.v_proj.weight", (keys, hidden)
        yield f"{layer}.self_attn.o_proj.weight", (hidden, queries)
        yield f"{layer}.self_attn.q_norm.weight", (head,)
        yield f"{layer}.self_attn.k_norm.weight", (head,)
        yield f"{layer}.mlp.gate.weight", (NUM_EXPERTS, hidden)
        for expert in range(NUM_EXPERTS):
            yield f"{layer}.mlp.experts.{expert}.gate_proj.weight", (inner, hidden)
            yield f"{layer}.mlp.experts.{expert}.up_proj.weight", (inner, hidden)
            yield f"{layer}.mlp.experts.{expert}.down_proj.weight", (hidden, inner)
        yield f"{layer}.input_layernorm.weight", (hidden,)
        yield f"{layer}.post_attention_layernorm.weight", (hidden,)
    yield "model.norm.weight", (hidden,)
    yield "lm_head.weight", (c["vocab_size"], hidden)


def in_memory() -> dict[str, Shape]:
    """Return the small sizes in transformers 5's memory: a layer's experts are two tensors."""
    c, found = config("tiny"), {}
    hidden, inner = c["hidden_size"], c["moe_intermediate_size"]
    for name, shape in shapes("tiny"):
        layer, is_expert, _ = name.partition(".experts.")
        if is_expert:
            found[f"{layer}.experts.gate_up_proj"] = (NUM_EXPERTS, 2 * inner, hidden)
            found[f"{layer}.experts.down_proj"] = (NUM_EXPERTS, hidden, inner)
        else:
            found[name] = shape
    return found


def write(folder: Path, kind: str) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config("tiny" if kind.isdecimal() else kind)))
    if kind.isdecimal():
        from benchmarks.zero_source import write_ranks

        write_ranks(folder, in_memory(), int(kind))
        return
    shards: list[dict[str, Any]] = [{}]
    end = 0
    for name, shape in shapes(kind):
        size = prod(shape) * 2
        if end + size > _SHARD:
            shards.append({})
            end = 0
        shards[-1][name] = {"dtype": "BF16", "shape": shape, "data_offsets": (end, end + size)}
        end += size
    weight_map = {}
    for number, entries in enumerate(shards, 1):
        file = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        header = json.dumps(entries, separators=(",", ":")).encode()
        header += b" " * (-len(header) % 8)
        size = max(entry["data_offsets"][1] for entry in entries.values())
        with (folder / file).open("wb") as written:
            written.write(struct.pack("<Q", len(header)) + header)
            if kind != "real":
                # from 0.0078 to 0.0312 with either sign
                low, high = os.urandom(size // 2), os.urandom(size // 2).translate(bytes([0x3C, 0xBC] * 128))
                data = bytearray(size)
                data[::2], data[1::2] = low, high
                written.write(data)
        os.truncate(folder / file, 8 + len(header) + size)
        weight_map |= dict.fromkeys(entries, file)
    index = {"metadata": {}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


if __name__ == "__main__":
    write(Path(sys.argv[1]), sys.argv[2])
