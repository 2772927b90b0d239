"""Models with torchtitan's names: found without the tables of `torchtitan.py`."""

from __future__ import annotations

from collections.abc import Collection

from ckpt.plan.checkpoint import Checkpoint
from ckpt.plan.namespace import TORCHTITAN

#: Supported model types. True if query and key rows are reordered.
PERMUTED = {"llama": True, "qwen3": False, "qwen3_moe": False, "deepseek_v3": False}


def namespace_of(checkpoint: Checkpoint) -> str | None:
    known = (checkpoint.config or {}).get("model_type") in PERMUTED
    return TORCHTITAN if known and _has_own_names({fqn for fqn, _ in checkpoint.tensors}) else None


def _has_own_names(names: Collection[str]) -> bool:
    return "tok_embeddings.weight" in names and any(
        name.startswith("layers.0.") and name.endswith(("attention_norm.weight", "ffn_norm.weight")) for name in names
    )
