"""Layers of openai/gpt-oss-20b in the released layout, with random bits: names, shapes, dtypes and files of its index.

python -m benchmarks.gpt_oss_source FOLDER NUM_LAYERS

The vocabulary is cut. The first file ends inside the last layer, between the biases and the weights.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path

import torch
from safetensors.torch import save_file

from benchmarks.cards.models import models

VOCAB = 2432
NUM_EXPONENTS = 253  # larger ones make infinite numbers
_PLAIN = ["model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head"]


def _config(num_layers: int) -> dict:
    config = models()["gpt-oss-20b"].config
    changed = {"num_hidden_layers": num_layers, "layer_types": config["layer_types"][:num_layers], "vocab_size": VOCAB}
    return {**config, **changed, "quantization_config": {"modules_to_not_convert": _PLAIN, "quant_method": "mxfp4"}}


def _layer(config: dict, generator: torch.Generator) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield a layer's tensors in the order of the index."""
    hidden, ffn, experts = (config[key] for key in ("hidden_size", "intermediate_size", "num_local_experts"))
    heads, groups = (config[key] * config["head_dim"] for key in ("num_attention_heads", "num_key_value_heads"))

    def plain(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator).bfloat16()

    def packed(top: int, *shape: int) -> torch.Tensor:
        return torch.randint(0, top, shape, generator=generator, dtype=torch.uint8)

    yield "input_layernorm.weight", plain(hidden)
    projections = {"o": (hidden, heads), "q": (heads, hidden), "k": (groups, hidden), "v": (groups, hidden)}
    for kind in ("bias", "weight"):
        for name, shape in projections.items():
            yield f"self_attn.{name}_proj.{kind}", plain(*(shape if kind == "weight" else shape[:1]))
    yield "self_attn.sinks", plain(config["num_attention_heads"])
    yield "mlp.router.bias", plain(experts)
    yield "mlp.router.weight", plain(experts, hidden)
    for name, num_out, num_in in (("gate_up_proj", 2 * ffn, hidden), ("down_proj", hidden, ffn)):
        yield f"mlp.experts.{name}_bias", plain(experts, num_out)
        yield f"mlp.experts.{name}_blocks", packed(256, experts, num_out, num_in // 32, 16)
        yield f"mlp.experts.{name}_scales", packed(NUM_EXPONENTS, experts, num_out, num_in // 32)
    yield "post_attention_layernorm.weight", plain(hidden)


def write(folder: Path, num_layers: int) -> None:
    config, generator = _config(num_layers), torch.Generator().manual_seed(0)
    (folder / "config.json").write_text(json.dumps(config))
    files: list[dict[str, torch.Tensor]] = [{}, {}, {}]
    for number in range(num_layers):
        for name, tensor in _layer(config, generator):
            is_late = number == num_layers - 1 and not name.startswith("input_") and not name.endswith("_proj.bias")
            files[is_late][f"model.layers.{number}.{name}"] = tensor
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        files[2][name] = torch.randn((VOCAB, config["hidden_size"]), generator=generator).bfloat16()
    files[2]["model.norm.weight"] = torch.randn(config["hidden_size"], generator=generator).bfloat16()
    places: dict[str, str] = {}
    for number, tensors in enumerate(files):
        file = f"model-{number:05d}-of-{len(files) - 1:05d}.safetensors"
        save_file(tensors, folder / file, metadata={"format": "pt"})
        places |= dict.fromkeys(tensors, file)
    size = sum(tensor.nbytes for tensors in files for tensor in tensors.values())
    index = {"metadata": {"total_size": size}, "weight_map": places}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


if __name__ == "__main__":
    write(Path(sys.argv[1]), int(sys.argv[2]))
