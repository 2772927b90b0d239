"""What transformers calls tensors in memory otherwise than the Hub's files do, for each model type.

Declared from `conversion_mapping.py` of transformers 5.23, and held by a test against it and `save_pretrained`.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from converters.names.transformers.installed import model_types
from converters.names.transformers.rules import Rule, Rules, rename, stacked


def _experts(inside: str, gate: str, up: str, down: str, hub: str | None = None) -> tuple[Rule, ...]:
    """Each expert's three matrices, which are two of a layer in memory."""
    on_hub = f"{hub or inside}.experts.*"
    return (
        stacked(f"{inside}.experts.gate_up_proj", f"{on_hub}.{gate}.weight", f"{on_hub}.{up}.weight"),
        stacked(f"{inside}.experts.down_proj", f"{on_hub}.{down}.weight"),
    )


_QWEN = _experts("mlp", "gate_proj", "up_proj", "down_proj")
_MIXTRAL = (rename("mlp", "block_sparse_moe"), *_experts("mlp", "w1", "w3", "w2"))

RULES: Mapping[str, tuple[Rule, ...]] = {
    **dict.fromkeys(
        (
            "deepseek_v2",
            "deepseek_v3",
            "glm4_moe",
            "olmoe",
            "qwen2_moe",
            "qwen3_moe",
            "qwen3_next",
        ),
        _QWEN,
    ),
    **dict.fromkeys(("minimax", "mixtral"), _MIXTRAL),
}

#: Model types whose names are the same on both sides.
UNCHANGED: frozenset[str] = frozenset()

_NUM_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")


def declared(config: Mapping[str, Any]) -> Rules | None:
    """The rules of the model of this config; None unless every model in it is in these tables."""
    found: dict[str, tuple[Rule, ...]] = {}
    for model_type in model_types(config):
        if model_type not in RULES and model_type not in UNCHANGED:
            return None
        found[model_type] = RULES.get(model_type, ())
    layers, experts = _stated(config, ("num_hidden_layers",)), _stated(config, _NUM_EXPERTS)
    rules = tuple(rule for of_one in found.values() for rule in of_one)
    return Rules(rules, max(layers, default=None), experts.pop() if len(experts) == 1 else None)


def _stated(config: Mapping[str, Any], keys: Collection[str]) -> set[int]:
    """The numbers that a config and those in it give for these keys."""
    own = {value for key in keys if isinstance(value := config.get(key), int)}
    return own.union(*(_stated(inner, keys) for inner in config.values() if isinstance(inner, Mapping)))
