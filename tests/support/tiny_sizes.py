"""Sizes of tiny models of the architectures in Megatron's formats, those too that the trainer does not train."""

from __future__ import annotations

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
#: A head whose width is not that of hidden_size / heads, where the architecture has one of its own.
_HEAD = {"hidden_size": 35, "head_dim": 6}
_EXPERTS = {"moe_intermediate_size": 11, "num_experts_per_tok": 2}
_LATENT = {
    "hidden_size": 35,
    "num_key_value_heads": 5,
    "q_lora_rank": 15,
    "kv_lora_rank": 12,  # transformers' rotary positions take no odd stride
    "qk_rope_head_dim": 4,
    "qk_nope_head_dim": 6,
    "v_head_dim": 7,
}
_SIZES: dict[str, dict[str, Any]] = {
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
    },  # the class forgets the padding token's row as it loads
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


def tiny_sizes(architecture: str) -> dict[str, Any]:
    """What the configuration of a tiny model has otherwise than the architecture's defaults."""
    architecture = twin_of(architecture)
    if architecture.removesuffix("_wide") in ARCHITECTURES:
        return sizes_of(architecture)
    return {**_COMMON, **_SIZES[architecture]}
