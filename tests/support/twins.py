"""Released models whose classes no transformers has, by classes of transformers that compute the same.

A twin's tensors get the release's names, and its config the release's words; and back again, for what ckpt wrote.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from converters.names.families.tables import FAMILIES

_PARTS = "qkv"


@dataclass(frozen=True)
class Twin:
    """The class of `model_type`; the release's words in config.json by the twin's, what else that states, and parts of
    names: the twin's and the release's, replaced in turn.  `#q`, `#k` and `#v` are one behind the other in one tensor.
    """

    model_type: str
    words: Mapping[str, str] = field(default_factory=dict)
    stated: Mapping[str, Any] = field(default_factory=dict)
    names: tuple[tuple[str, str], ...] = ()

    def config(self, own: str, config: Mapping[str, Any]) -> dict[str, Any]:
        """The release's config.json for a config of the twin's."""
        words = {self.words.get(name, name): value for name, value in config.items()}
        cls = f"{FAMILIES[own].stem}{FAMILIES[own].causal}"
        return {**words, **self.stated, "model_type": own, "architectures": [cls]}


_FUSED = tuple((f"self_attn.{part}_proj.", f"self_attn.query_key_value.#{part}.") for part in _PARTS)
_LING = Twin(
    "glm4_moe",
    {"n_routed_experts": "num_experts", "n_shared_experts": "num_shared_experts"},
    {"score_function": "sigmoid", "moe_router_enable_expert_bias": True},
    (
        *_FUSED,
        ("self_attn.o_proj.", "self_attn.dense."),
        ("self_attn.q_norm.", "self_attn.query_layernorm."),
        ("self_attn.k_norm.", "self_attn.key_layernorm."),
        ("self_attn.", "attention."),
        ("gate.e_score_correction_bias", "gate.expert_bias"),
        ("model.embed_tokens.", "model.word_embeddings."),
    ),
)
TWINS: Mapping[str, Twin] = {
    "kimi_k2": Twin("deepseek_v3"),
    "mimo": Twin("qwen2"),
    "bailing_moe": _LING,
    "bailing_moe_v2": _LING,
    "chatglm": Twin(
        "glm",
        {
            "vocab_size": "padded_vocab_size",
            "num_hidden_layers": "num_layers",
            "head_dim": "kv_channels",
            "intermediate_size": "ffn_hidden_size",
            "num_key_value_heads": "multi_query_group_num",
            "rms_norm_eps": "layernorm_epsilon",
            "max_position_embeddings": "seq_length",
            "attention_bias": "add_qkv_bias",
        },
        {"rope_ratio": 1},
        (
            *_FUSED,
            ("self_attn.o_proj.", "self_attn.dense."),
            (".self_attn.", ".self_attention."),
            ("mlp.gate_up_proj.", "mlp.dense_h_to_4h."),
            ("mlp.down_proj.", "mlp.dense_4h_to_h."),
            ("model.layers.", "transformer.encoder.layers."),
            ("model.norm.", "transformer.encoder.final_layernorm."),
            ("model.embed_tokens.", "transformer.embedding.word_embeddings."),
            ("lm_head.", "transformer.output_layer."),
        ),
    ),
}
#: Twins whose tensors have the release's names.
SAME_NAMES = [name for name, twin in TWINS.items() if not twin.names]


def twin_of(architecture: str) -> str:
    """The model type of the class in transformers."""
    return TWINS[architecture].model_type if architecture in TWINS else architecture


def to_release(folder: Path, architecture: str) -> None:
    """What a twin saved, as the release has it."""
    twin, path = TWINS[architecture], folder / "config.json"
    config = twin.config(architecture, json.loads(path.read_text()))
    path.write_text(json.dumps(config))
    renamed = {}
    for name, tensor in load_file(folder / "model.safetensors").items():
        for theirs, own in twin.names:
            name = name.replace(theirs, own)
        renamed[name] = tensor
    for name in [name for name in renamed if "#q." in name]:
        renamed[name.replace("#q.", "")] = torch.cat([renamed.pop(name.replace("#q", f"#{part}")) for part in _PARTS])
    save_file(renamed, folder / "model.safetensors", {"format": "pt"})


def to_twin(folder: Path, architecture: str, config: Any) -> None:
    """What ckpt wrote for a release, as the twin's class loads it; `config` is the twin's."""
    twin, renamed = TWINS[architecture], {}
    heads, groups = config.num_attention_heads, config.num_key_value_heads
    for name, tensor in load_file(folder / "model.safetensors").items():
        parts = {name: tensor}
        if "query_key_value." in name and twin.names:
            head = len(tensor) // (heads + 2 * groups)
            split = tensor.split([heads * head, groups * head, groups * head])
            place = "query_key_value."
            parts = {name.replace(place, f"{place}#{part}."): one for part, one in zip(_PARTS, split, strict=True)}
        for one, value in parts.items():
            for theirs, own in reversed(twin.names):
                one = one.replace(own, theirs)
            renamed[one] = value.contiguous()
    save_file(renamed, folder / "model.safetensors", {"format": "pt"})
    (folder / "config.json").write_text(json.dumps(config.to_dict(), default=str))
