"""Models with torchtitan's or OLMo-core's names: found without the tables of `torchtitan.py` and `olmo_core.py`."""

from __future__ import annotations

from collections.abc import Collection

from ckpt.plan.checkpoint import Checkpoint
from ckpt.plan.namespace import OLMO_CORE, TORCHTITAN

#: torchtitan's model types. True if query and key rows are reordered.
PERMUTED = {"llama": True, "qwen3": False, "qwen3_moe": False, "deepseek_v3": False}
#: OLMo-core's model types.
OLMOS = ("olmo2", "olmo3")


def namespace_of(checkpoint: Checkpoint) -> str | None:
    model_type = (checkpoint.config or {}).get("model_type")
    names = {fqn for fqn, _ in checkpoint.tensors}
    if model_type in PERMUTED and _has_layer(names, "tok_embeddings", "layers.0.", ("attention_norm", "ffn_norm")):
        return TORCHTITAN
    if model_type in OLMOS and _has_layer(names, "embeddings", "blocks.0.", ("attention_norm", "feed_forward_norm")):
        return OLMO_CORE
    return None


def _has_layer(names: Collection[str], embedding: str, layer: str, norms: tuple[str, ...]) -> bool:
    ends = tuple(f"{norm}.weight" for norm in norms)
    return f"{embedding}.weight" in names and any(name.startswith(layer) and name.endswith(ends) for name in names)
