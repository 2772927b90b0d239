"""Megatron-core names for Megatron-LM's own model classes, from before megatron-core.

    {"language_model": {"embedding": {"word_embeddings": {"weight"}, "position_embeddings": {"weight"}},
                        "encoder": {"layers.0.self_attention.query_key_value.weight", ..., "final_layernorm.weight"},
                        "output_layer": {"weight"}},
     "word_embeddings_for_head": {"weight"}}

From Megatron-LM core_v0.8.0, megatron/legacy/model (gpt_model.py, language_model.py, transformer.py: their
`state_dict_for_save_checkpoint`) and, for earlier versions, `load_state_dict` in the same modules.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

LANGUAGE_MODEL = "language_model"

_LAYER = re.compile(r"layers\.(\d+)\.(.*)")
_MODULES = (
    ("input_layernorm.", "input_layernorm."),
    ("input_norm.", "input_layernorm."),
    ("post_attention_layernorm.", "pre_mlp_layernorm."),
    ("post_attention_norm.", "pre_mlp_layernorm."),
    ("self_attention.query_key_value.", "self_attention.linear_qkv."),
    ("attention.query_key_value.", "self_attention.linear_qkv."),
    ("self_attention.dense.", "self_attention.linear_proj."),
    ("attention.dense.", "self_attention.linear_proj."),
    ("mlp.dense_h_to_4h.", "mlp.linear_fc1."),
    ("mlp.dense_4h_to_h.", "mlp.linear_fc2."),
)
_FINAL = ("final_layernorm.", "final_norm.")


def core_names(state: Mapping[Any, Any]) -> Iterator[tuple[str, Any]]:
    """Yield a chunk's entries in order, renamed. Entries without a counterpart keep their names."""
    for name, value in _flat(state):
        yield _core_name(name), value


def _flat(state: Mapping[Any, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in state.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


def _core_name(name: str) -> str:
    if name == "word_embeddings_for_head.weight":
        return "output_layer.weight"
    rest = name.removeprefix(f"{LANGUAGE_MODEL}.")
    for encoder in ("encoder.", "transformer."):
        if not rest.startswith(encoder):
            continue
        inner = rest.removeprefix(encoder)
        if match := _LAYER.fullmatch(inner):
            for old, new in _MODULES:
                if match[2].startswith(old):
                    return f"decoder.layers.{match[1]}.{new}{match[2].removeprefix(old)}"
        for old in _FINAL:
            if inner.startswith(old):
                return f"decoder.final_layernorm.{inner.removeprefix(old)}"
    return rest
