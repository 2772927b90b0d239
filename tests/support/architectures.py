"""Tiny models for transformers' architectures: shrunk configs and folders saved by `save_pretrained`."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest
import torch

transformers = pytest.importorskip("transformers", minversion="5")
auto = pytest.importorskip("transformers.models.auto.modeling_auto")

#: Applied if the config class has the attribute.
TINY: dict[str, Any] = {
    **dict.fromkeys(("hidden_size", "n_embd", "d_model"), 32),
    **dict.fromkeys(("num_hidden_layers", "n_layer", "num_layers", "encoder_layers", "decoder_layers"), 2),
    **dict.fromkeys(("num_attention_heads", "n_head", "num_heads"), 4),
    **dict.fromkeys(("encoder_attention_heads", "decoder_attention_heads"), 4),
    **dict.fromkeys(("intermediate_size", "n_inner", "encoder_ffn_dim", "decoder_ffn_dim"), 48),
    **dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size"), 24),
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"), 12),
    **dict.fromkeys(("q_lora_rank", "kv_lora_rank", "qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim"), 8),
    "num_experts_per_tok": 2,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "vocab_size": 64,
    "n_group": 2,
    "topk_group": 1,
    "max_position_embeddings": 64,
    "first_k_dense_replace": 1,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
TINY_PART = {**TINY, "depth": 2, "embed_dim": 32, "image_size": 28, "patch_size": 14}

_LAYERS = ("n_layer", "num_hidden_layers", "num_layers")
#: Attributes to leave unshrunk, by model type.
KEPT: dict[str, tuple[str, ...]] = {
    "cosmos3_edge": ("head_dim",),
    "falcon": ("head_dim",),
    "gpt_neo": _LAYERS,
    "molmo2": (*_LAYERS, "image_size", "patch_size"),
    "prophetnet": _LAYERS,
    "xlnet": ("max_position_embeddings",),
    "xlstm": ("v_head_dim",),
    "zamba": _LAYERS,
    "zamba2": _LAYERS,
}
_MAMBA = {"mamba_n_heads": 4, "mamba_d_head": 16, "mamba_d_state": 8}
#: Extra attributes for a model type.
ALSO: dict[str, dict[str, Any]] = {
    "bamba": _MAMBA,
    "dots1": {"n_shared_experts": 1},
    "gemma3n_text": {"layer_types": ["sliding_attention", "full_attention"], "num_kv_shared_layers": 0},
    "granitemoehybrid": _MAMBA,
    "lfm2_moe": {"layer_types": ["conv", "full_attention"], "num_dense_layers": 1},
    "mamba2": {"num_heads": 4, "head_dim": 16},
    "reformer": {"is_decoder": True},
    "whisper": {"d_model": 32},
    "zaya": {"num_experts_per_tok": 1},
}


#: Class names of causal and image-text-to-text models by model type.
MAPPINGS = (auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES)


def model_types() -> list[str]:
    """Return transformers' causal and image-text-to-text model types."""
    return list(dict.fromkeys(model_type for mapping in MAPPINGS for model_type in mapping))


def _has(config: Any, key: str) -> bool:
    try:
        return hasattr(config, key)
    except Exception:  # a per-layer value
        return True


def _shrunk(config: Any, tiny: dict[str, Any], kept: Iterable[str]) -> dict[str, Any]:
    return {key: value for key, value in tiny.items() if key not in kept and _has(config, key)}


def tiny_config(model_type: str) -> Any:
    cls = transformers.CONFIG_MAPPING[model_type]
    default, kept = cls(), KEPT.get(model_type, ())
    values = _shrunk(default, TINY, kept) | ALSO.get(model_type, {})
    for part in getattr(cls, "sub_configs", {}):
        inner = getattr(default, part, None)
        if inner is not None:
            values[part] = {"model_type": inner.model_type, **_shrunk(inner, TINY_PART, kept)}
            values[part] |= ALSO.get(inner.model_type, {})
    return cls(**values)


def model_class(config: Any) -> Any:
    """Return the image class if there is one: the causal class of the same model takes the text's config."""
    mappings = (
        auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
        transformers.MODEL_FOR_CAUSAL_LM_MAPPING,
        transformers.MODEL_MAPPING,
    )
    return next(mapping[type(config)] for mapping in mappings if type(config) in mapping)


def tiny_model(model_type: str) -> Any:
    config = tiny_config(model_type)
    torch.manual_seed(0)
    return model_class(config)(config)


def numbered(model: Any) -> Any:
    """Fill the model with numbers that rise through all its tensors: random numbers may repeat."""
    reached = 0
    for tensor in [*model.parameters(), *model.buffers()]:
        if tensor.is_floating_point():
            numbers = torch.arange(reached, reached + tensor.numel(), dtype=torch.float64)
            with torch.no_grad():
                tensor.copy_(numbers.remainder(2**24 - 3).reshape(tensor.shape))
            reached += tensor.numel()
    return model
