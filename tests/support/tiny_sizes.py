"""Tiny model sizes for Megatron's architectures, including those the trainer does not train."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tests.support.twins import twin_of
from train.config import ARCHITECTURES
from train.data import VOCABULARY
from train.models import sizes_of

_COMMON: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 40,
    "intermediate_size": 53,
    "num_hidden_layers": 2,
    "num_attention_heads": 5,
    "num_key_value_heads": 1,
    "max_position_embeddings": 128,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
#: A head width other than hidden_size / heads, if the architecture has its own.
_HEAD = {"hidden_size": 35, "head_dim": 6}
_EXPERTS = {"moe_intermediate_size": 11, "num_experts_per_tok": 2}
#: Gated delta nets and gated attention, alternating.
_DELTA = {
    "num_hidden_layers": 3,
    "hidden_size": 36,
    "head_dim": 16,
    "num_attention_heads": 6,
    "num_key_value_heads": 3,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 5,
    "linear_value_head_dim": 7,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 6,
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
}
_LATENT = {
    "hidden_size": 35,
    "num_key_value_heads": 5,
    "q_lora_rank": 15,
    "kv_lora_rank": 12,  # transformers' rotary positions need an even stride
    "qk_rope_head_dim": 4,
    "qk_nope_head_dim": 6,
    "v_head_dim": 7,
}
_SIZES: dict[str, dict[str, Any]] = {
    "megatron-bert": {"num_key_value_heads": 5},
    "seed_oss": _HEAD,
    "ministral": _HEAD,
    "smollm3": {},
    "arcee": _HEAD,
    "starcoder2": {"num_key_value_heads": 5},
    "stablelm": {},
    "phi3": {},
    "glm": {"hidden_size": 35, "head_dim": 8},
    "ernie4_5": _HEAD,
    "qwen2_moe": {**_EXPERTS, "num_experts": 5, "shared_expert_intermediate_size": 13, "mlp_only_layers": [0]},
    "qwen3_5_text": _DELTA,
    "nemotron_h": {
        "num_hidden_layers": 4,
        "layers_block_type": ["linear_attention", "full_attention", "mlp", "moe"],
        "head_dim": 6,
        "num_attention_heads": 6,
        "num_key_value_heads": 3,
        "mamba_num_heads": 6,
        "mamba_head_dim": 5,
        "n_groups": 2,
        "ssm_state_size": 7,
        "n_routed_experts": 5,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 11,
        "moe_shared_expert_intermediate_size": 13,
    },
    "qwen3_5_moe_text": {**_EXPERTS, **_DELTA, "num_experts": 5, "shared_expert_intermediate_size": 13},
    "glm4_moe": {
        **_EXPERTS,
        "hidden_size": 35,
        "head_dim": 8,
        "n_routed_experts": 6,
        "n_shared_experts": 1,
        "n_group": 2,
        "topk_group": 1,
        "first_k_dense_replace": 1,
        "num_nextn_predict_layers": 0,
    },
    "deepseek_v2": {
        **_EXPERTS,
        **_LATENT,
        "head_dim": 4,
        "n_routed_experts": 6,
        "n_shared_experts": 2,
        "first_k_dense_replace": 1,
    },
    "nemotron": {"head_dim": 8},
    "jais2": _HEAD,
    "helium": {},
    "cwm": {**_HEAD, "rope_parameters": {"rope_type": "default", "rope_theta": 1e6}},
    "internlm3": _HEAD,
    "iquestcoder": _HEAD,
    "persimmon": {"num_key_value_heads": None},
    "gpt_bigcode": {"n_inner": 53, "num_key_value_heads": None},
    "youtu": {
        **_LATENT,
        "pad_token_id": None,
        "initializer_range": 0.02,
        "embedding_initializer_range": 0.02,
    },  # the class clears the padding token's row on load
    "glm4_moe_lite": {**_EXPERTS, **_LATENT, "n_routed_experts": 6, "n_group": 2, "topk_group": 1},
    "dots1": {
        **_EXPERTS,
        **_HEAD,
        "n_routed_experts": 5,
        "n_shared_experts": 2,
        "first_k_dense_replace": 1,
        "norm_topk_prob": True,
    },
    "solar_open": {**_EXPERTS, **_HEAD, "n_routed_experts": 5, "n_shared_experts": 1},
    "exaone_moe": {**_EXPERTS, **_HEAD, "num_experts": 5, "sliding_window": 5, "sliding_window_pattern": 2},
    "hy_v3": {**_EXPERTS, **_HEAD, "num_experts": 5},
    "aria_text": {**_HEAD, "moe_num_experts": 5, "moe_topk": 2, "moe_num_shared_experts": 2},
    "flint": {
        **_EXPERTS,
        **_HEAD,
        "num_experts": 5,
        "shared_expert_intermediate_size": 13,
        "sliding_window": 5,
        "mlp_only_layers": [0],
        "layer_types": ["sliding_attention", "full_attention"],
    },
}

#: Text and vision sizes for models with images; all sizes in a tower differ.
_TEXT: dict[str, Any] = {**_COMMON, "head_dim": 8, "num_key_value_heads": 1}
_SECTIONS = {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 1, 1]}}
_PARTIAL = {**_SECTIONS["rope_parameters"], "partial_rotary_factor": 0.25, "mrope_section": [1, 1, 0]}
_MOE_TEXT = {**_TEXT, **_EXPERTS, "num_experts": 5, "num_local_experts": 5}
_LAYERS = {"num_hidden_layers": 2, "num_attention_heads": 2, "hidden_size": 20, "intermediate_size": 26}
_TOWER: dict[str, Any] = {**_LAYERS, "image_size": 28, "patch_size": 7}
_QWEN_TOWER = {"depth": 2, "num_heads": 2, "patch_size": 6, "temporal_patch_size": 2, "spatial_merge_size": 2}
_QWEN2_TOWER = {**_QWEN_TOWER, "embed_dim": 16, "hidden_size": 40, "mlp_ratio": 3}
_QWEN2_5_TOWER = {**_QWEN_TOWER, "hidden_size": 16, "intermediate_size": 26, "out_hidden_size": 40, "window_size": 24}
_QWEN3_TOWER = {**_QWEN_TOWER, "hidden_size": 16, "intermediate_size": 26, "out_hidden_size": 40}
_QWEN3_TOWER |= {"num_position_embeddings": 49, "deepstack_visual_indexes": [0, 1]}
_QWEN3_5_TOWER = {**_QWEN_TOWER, "hidden_size": 16, "intermediate_size": 26, "out_hidden_size": 36}
_QWEN3_5_TOWER |= {"num_position_embeddings": 49}
_GLM_TOWER = {**_QWEN_TOWER, "patch_size": 7, "hidden_size": 16, "intermediate_size": 26, "out_hidden_size": 40}
_TOKENS = {"image_token_id": 200, "video_token_id": 201, "vision_start_token_id": 202, "vision_end_token_id": 203}
_WITH_IMAGES: dict[str, dict[str, Any]] = {
    "qwen2_vl": {"text_config": {**_TEXT, **_SECTIONS}, "vision_config": _QWEN2_TOWER, **_TOKENS},
    "qwen2_5_vl": {"text_config": {**_TEXT, **_SECTIONS}, "vision_config": _QWEN2_5_TOWER, **_TOKENS},
    "qwen3_vl": {"text_config": {**_TEXT, **_SECTIONS}, "vision_config": _QWEN3_TOWER, **_TOKENS},
    "qwen3_vl_moe": {"text_config": {**_MOE_TEXT, **_SECTIONS}, "vision_config": _QWEN3_TOWER, **_TOKENS},
    **{
        name: {
            "text_config": {**_COMMON, **_SIZES[f"{name}_text"], "rope_parameters": _PARTIAL},
            "vision_config": _QWEN3_5_TOWER,
            **_TOKENS,
        }
        for name in ("qwen3_5", "qwen3_5_moe")
    },
    "llava": {
        "text_config": {"model_type": "llama", **_TEXT},
        "vision_config": {"model_type": "clip_vision_model", **_TOWER},
        "image_token_index": 200,
    },
    "llava_next": {
        "text_config": {"model_type": "mistral", **_TEXT, "sliding_window": None},
        "vision_config": {"model_type": "clip_vision_model", **_TOWER},
        "image_token_index": 200,
    },
    "llava_onevision": {
        "text_config": {"model_type": "qwen2", **_TEXT},
        "vision_config": {"model_type": "siglip_vision_model", "vision_use_head": False, **_TOWER},
        "image_token_index": 200,
        "video_token_index": 201,
    },
    "internvl": {
        "text_config": {"model_type": "qwen3", **_TEXT},
        "vision_config": {**_TOWER, "image_size": [28, 28], "patch_size": [7, 7], "attention_bias": True},
        "image_token_id": 200,
        "tie_word_embeddings": False,
    },
    "mistral3": {
        "text_config": {"model_type": "mistral", **_TEXT, "sliding_window": None},
        "vision_config": {"model_type": "pixtral", **_TOWER},
        "image_token_index": 200,
        "tie_word_embeddings": False,
    },
    "glm4v_moe": {
        "text_config": {
            **_MOE_TEXT,
            "head_dim": 16,
            "n_routed_experts": 6,
            "num_experts": 6,
            "num_local_experts": 6,
            "n_shared_experts": 1,
            "n_group": 2,
            "topk_group": 1,
            "first_k_dense_replace": 1,
            "rope_parameters": {**_SECTIONS["rope_parameters"], "partial_rotary_factor": 0.5},
        },
        "vision_config": {**_GLM_TOWER, "image_size": 28},
        **_TOKENS,
    },
}


#: Replacements for sizes that two ranks can't divide, by number. An explicit head width stays.
_EVEN: dict[str, dict[Any, Any]] = {
    "num_hidden_layers": {2: 4, 3: 4},
    "num_attention_heads": {5: 6},
    "num_key_value_heads": {1: 2, 3: 2, 5: 6},
    "intermediate_size": {53: 54},
    "n_inner": {53: 54},
    "moe_intermediate_size": {11: 12},
    "shared_expert_intermediate_size": {13: 14},
    "moe_shared_expert_intermediate_size": {13: 14},
    "q_lora_rank": {15: 16},
    "kv_lora_rank": {11: 12},
    **{key: {5: 6} for key in ("num_experts", "n_routed_experts", "num_local_experts", "moe_num_experts")},
}


def even_sizes(architecture: str, more: Mapping[str, Any]) -> dict[str, Any]:
    """Return tiny four-layer sizes divisible by two ranks on each axis. `more` adds to the config."""
    if architecture in ARCHITECTURES:
        return sizes_of(f"{architecture}_wide") | {k: v for k, v in more.items() if k not in _EVEN}
    sizes = {**tiny_sizes(architecture), **more}
    text = sizes.get("text_config", sizes)
    even = text | {name: values.get(text[name], text[name]) for name, values in _EVEN.items() if name in text}
    narrow = even.get("hidden_size")
    if narrow is not None:
        even["hidden_size"] = 8 * even["num_attention_heads"]
    for name in ("layer_types", "no_rope_layers"):
        if name in text:
            even[name] = (2 * text[name])[: even["num_hidden_layers"]]
    if "text_config" not in sizes:
        return even
    vision = sizes["vision_config"]  # the tower's output has the text's width
    wide = {name: even["hidden_size"] for name in ("hidden_size", "out_hidden_size") if vision.get(name) == narrow}
    return {**sizes, "text_config": even, "vision_config": vision | wide}


def layers_of(architecture: str) -> str | None:
    """Return Megatron's layer spec to request: hybrids only have Transformer Engine's, or stand-ins for these."""
    return None if architecture.startswith(("nemotron_h", "qwen3_next", "qwen3_5")) else "local"


def tiny_sizes(architecture: str) -> dict[str, Any]:
    """Return a tiny model's config options that differ from the architecture's defaults."""
    architecture = twin_of(architecture)
    if architecture.removesuffix("_wide") in ARCHITECTURES:
        return sizes_of(architecture)
    if architecture in _WITH_IMAGES:
        return _WITH_IMAGES[architecture]
    return {**_COMMON, **_SIZES[architecture]}
