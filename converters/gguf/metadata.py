"""Hyperparameters in GGUF, from the config.

Keys and their conditions are those of llama.cpp's converter (`conversion/base.py`, `set_gguf_parameters`, and the
classes in `conversion/`). Rotary settings without a key are an error.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Iterator, Mapping
from typing import Any

from ckpt.base.errors import CorruptError, LossError
from ckpt.base.words import Message

#: Factors for rotary frequencies, computed by llama.cpp's converter.
ROPE_FACTORS = "rope_freqs.weight"
#: Config keys, and the name of `GGUFWriter`'s method after `add_`.
_NUMBERS = {
    "max_position_embeddings": "context_length",
    "hidden_size": "embedding_length",
    "num_hidden_layers": "block_count",
    "intermediate_size": "feed_forward_length",
    "num_attention_heads": "head_count",
    "rms_norm_eps": "layer_norm_rms_eps",
}
#: Rotary types with their own key or tensor, and their settings.
_ROPE = {
    "default": (),
    "linear": ("factor",),
    "yarn": (
        *("factor", "original_max_position_embeddings", "extrapolation_factor", "attention_factor"),
        *("beta_fast", "beta_slow", "truncate"),
    ),
    "llama3": ("factor", "original_max_position_embeddings", "low_freq_factor", "high_freq_factor"),
}
#: Settings without a key, by architecture: the values in llama.cpp's code. None means that the config lacks it.
_SILU: dict[str, tuple[Any, ...]] = {"hidden_act": ("silu", "swish", None), "partial_rotary_factor": (1, None)}
_NO_WINDOW: dict[str, tuple[Any, ...]] = {**_SILU, "use_sliding_window": (False, None)}
_FIXED = {
    "llama": _SILU,
    "qwen2": _NO_WINDOW,
    "qwen3": _NO_WINDOW | {"attention_bias": (False, None)},
    "qwen3moe": _NO_WINDOW
    | {
        "attention_bias": (False, None),
        "norm_topk_prob": (True,),
        "decoder_sparse_step": (1, None),
        "mlp_only_layers": ([], None),
    },
    "gpt-oss": _SILU | {"swiglu_limit": (7, None), "swiglu_alpha": (1.702, None)},
    "gemma": {
        "hidden_act": ("gelu_pytorch_tanh", "gelu", None),
        "attention_bias": (False, None),
        "use_bidirectional_attention": (False, None),
    },
}
#: Config entries by their keys in GGUF, without the architecture's prefix.
_RECORDED = {
    "embedding_length": "hidden_size",
    "block_count": "num_hidden_layers",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
    "expert_used_count": "num_experts_per_tok",
}


def add_hyperparameters(writer: Any, config: Mapping[str, Any], arch: str, path: str) -> None:
    """Raise LossError for settings without a key."""
    _check_fixed(config, arch, path)
    for name, method in _NUMBERS.items():
        if name not in config:
            raise CorruptError("the config lacks a size that GGUF needs", path=path, expected=name)
        getattr(writer, f"add_{method}")(config[name])
    writer.add_head_count_kv(config.get("num_key_value_heads") or config["num_attention_heads"])
    head_dim = config.get("head_dim")
    if arch == "gemma":
        writer.add_key_length(head_dim)
        writer.add_value_length(head_dim)
        return
    for method, values in _rope_keys(rope_parameters(config), path):
        getattr(writer, f"add_rope_{method}")(*values)
    if head_dim is not None:
        writer.add_key_length(head_dim)
        writer.add_value_length(head_dim)
    if arch == "llama":
        writer.add_vocab_size(config["vocab_size"])
        writer.add_rope_dimension_count(head_dim or config["hidden_size"] // config["num_attention_heads"])
    experts = config.get("num_local_experts", config.get("num_experts"))
    if experts is not None:
        writer.add_expert_count(experts)
        writer.add_expert_used_count(config["num_experts_per_tok"])
    if arch == "qwen3moe":
        writer.add_expert_feed_forward_length(config["moe_intermediate_size"])
    if arch == "gpt-oss":
        writer.add_sliding_window(config["sliding_window"])
        writer.add_expert_feed_forward_length(config["intermediate_size"])


def _check_fixed(config: Mapping[str, Any], arch: str, path: str) -> None:
    sliding = [int(one == "sliding_attention") for one in config.get("layer_types") or ()]
    pattern = [(number + 1) % 2 * (arch == "gpt-oss") for number in range(len(sliding))]
    differing = {name: config.get(name) for name, values in _FIXED[arch].items() if config.get(name) not in values}
    if sliding != pattern:
        differing["layer_types"] = config["layer_types"]
    for name, value in differing.items():
        raise LossError(
            "GGUF has no key for this setting, and llama.cpp computes with another value",
            path=path,
            expected=f"{name} {_FIXED[arch][name][0]!r}" if name in _FIXED[arch] else None,
            found=f"{name} {value!r}",
        )


def rounding_notes(config: Mapping[str, Any]) -> list[str]:
    """Return a note if llama.cpp rounds a rotary setting."""
    rope = rope_parameters(config)
    if rope["rope_type"] != "yarn" or rope.get("truncate", True):
        return []
    return ["llama.cpp rounds YaRN's range, as with truncate true; the config has truncate false"]


def check_recorded(config: Mapping[str, Any], arch: str, recorded: Mapping[str, Any], path: str) -> None:
    """Raise CorruptError if the config differs from the file."""
    expected = {key: config.get(name) for key, name in _RECORDED.items()}
    expected["rope.freq_base"] = rope_parameters(config).get("rope_theta")
    if recorded.get(ROPE_FACTORS) and rope_factors(config) is None:
        raise CorruptError("the config lacks the file's rotary factors", path=path, expected="rope_type 'llama3'")
    for key, value in expected.items():
        found = recorded.get(f"{arch}.{key}", value)
        if value is not None and struct.pack("<f", found) != struct.pack("<f", value):
            raise CorruptError(
                "the config is of another model",
                path=path,
                expected=f"{arch}.{key} {found}, as in the file",
                found=f"{_RECORDED.get(key, 'rope_theta')} {value}",
                hint=Message("give the config of this model with {config}"),
            )


def rope_parameters(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return rotary settings in transformers 5's form."""
    found = dict(config.get("rope_parameters") or config.get("rope_scaling") or {})
    if "rope_theta" not in found and config.get("rope_theta") is not None:
        found["rope_theta"] = config["rope_theta"]
    found["rope_type"] = found.get("rope_type", found.pop("type", "default"))
    if "original_max_position_embeddings" not in found and config.get("original_max_position_embeddings"):
        found["original_max_position_embeddings"] = config["original_max_position_embeddings"]
    return found


def _rope_keys(rope: Mapping[str, Any], path: str) -> Iterator[tuple[str, tuple[Any, ...]]]:
    from converters.gguf.package import package

    kind = rope["rope_type"]
    more = [name for name in rope.keys() - {"rope_type", "rope_theta", *_ROPE.get(kind, ())} if rope[name] is not None]
    if kind not in _ROPE or more:
        what = "llama.cpp's key for these rotary settings is not known"
        expected = ", ".join(_ROPE[kind]) if more and kind in _ROPE else "one of " + ", ".join(_ROPE)
        raise LossError(what, path=path, expected=expected, found=", ".join(sorted(more)) or kind)
    if kind in ("linear", "yarn"):
        yield "scaling_type", (package().RopeScalingType(kind),)
        yield "scaling_factor", (rope["factor"],)
    if kind == "yarn":
        yield "scaling_orig_ctx_len", (rope["original_max_position_embeddings"],)
        named = {"extrapolation_factor": "ext_factor", "attention_factor": "attn_factor"}
        for name in ("extrapolation_factor", "attention_factor", "beta_fast", "beta_slow"):
            if rope.get(name) is not None:
                yield f"scaling_yarn_{named.get(name, name)}", (rope[name],)
    if rope.get("rope_theta") is not None:
        yield "freq_base", (rope["rope_theta"],)


def rope_factors(config: Mapping[str, Any]) -> list[float] | None:
    """Return llama 3's rotary factors, or None for another type.

    Frequencies are rounded to float32 first, like torch's in llama.cpp's converter.
    """
    rope = rope_parameters(config)
    if rope["rope_type"] != "llama3":
        return None
    import numpy as np

    dim = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    steps = np.arange(0, dim, 2, dtype=np.float32) / np.float32(dim)
    frequencies = np.float32(1) / np.float32(rope.get("rope_theta", 10000.0)) ** steps
    factor, low, high = (rope.get(name, usual) for name, usual in _LLAMA3.items())
    context = rope.get("original_max_position_embeddings", 8192)
    found = []
    for one in frequencies:
        length = np.float32(2 * math.pi) / one
        if length < context / high:
            found.append(1.0)
        elif length > context / low:
            found.append(float(factor))
        else:
            smooth = (np.float32(context) / length - np.float32(low)) / np.float32(high - low)
            found.append(float(1 / ((1 - smooth) / np.float32(factor) + smooth)))
    return found


_LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
