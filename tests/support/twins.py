"""Released models missing from transformers, built as twins: other classes with the release's names and words."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from converters.names.families.tables import FAMILIES

PARTS = "qkv"


@dataclass(frozen=True)
class Twin:
    """A transformers class to build a release's tiny model.

    `model_type` is its class. `words` maps the twin's config keys to the release's, `stated` holds the release's
    further config entries, and `names` are name parts in the twin and the release, replaced in turn. `#q`, `#k` and
    `#v` are concatenated in one tensor.
    """

    model_type: str
    words: Mapping[str, str] = field(default_factory=dict)
    stated: Mapping[str, Any] = field(default_factory=dict)
    names: tuple[tuple[str, str], ...] = ()

    def config(self, own: str, config: Mapping[str, Any]) -> dict[str, Any]:
        """Return the release's config.json for a twin's config."""
        words = {self.words.get(name, name): value for name, value in config.items()}
        cls = f"{FAMILIES[own].stem}{FAMILIES[own].causal}"
        return {**words, **self.stated, "model_type": own, "architectures": [cls]}


_FUSED = tuple((f"self_attn.{part}_proj.", f"self_attn.query_key_value.#{part}.") for part in PARTS)
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
    "baichuan": Twin("llama", names=tuple((f"self_attn.{part}_proj.", f"self_attn.W_pack.#{part}.") for part in PARTS)),
    "exaone": Twin(
        "llama",
        {"num_hidden_layers": "num_layers", "rms_norm_eps": "layer_norm_epsilon", "hidden_act": "activation_function"},
        names=(
            ("self_attn.o_proj.", "self_attn.out_proj."),
            ("self_attn.", "attn.attention."),
            ("mlp.gate_proj.", "mlp.c_fc_0."),
            ("mlp.up_proj.", "mlp.c_fc_1."),
            ("mlp.down_proj.", "mlp.c_proj."),
            ("input_layernorm.", "ln_1."),
            ("post_attention_layernorm.", "ln_2."),
            ("model.layers.", "transformer.h."),
            ("model.norm.", "transformer.ln_f."),
            ("model.embed_tokens.", "transformer.wte."),
        ),
    ),
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
#: Twins with the release's tensor names.
SAME_NAMES = [name for name, twin in TWINS.items() if not twin.names]


def twin_of(architecture: str) -> str:
    """Return the model type for the class in transformers."""
    return TWINS[architecture].model_type if architecture in TWINS else architecture
