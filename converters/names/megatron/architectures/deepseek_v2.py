"""DeepSeek-V2: V3's latent attention and shared experts, with a softmax over all experts."""

from __future__ import annotations

from typing import Any

from ckpt.base.errors import LossError
from converters.names.families.rows import Sizes
from converters.names.families.tables import FAMILIES
from converters.names.megatron.architectures import deepseek_v3, llama, qwen3_moe
from converters.names.megatron.table import Table


def args(sizes: Sizes) -> dict[str, Any]:
    config = sizes.config
    method = config.get("topk_method") or "greedy"
    if method != "greedy":
        raise LossError("Megatron does not choose experts this way", expected="topk_method greedy", found=method)
    return deepseek_v3.latent(sizes) | {
        "moe_router_pre_softmax": True,
        "moe_router_topk_scaling_factor": config.number("routed_scaling_factor", 1.0),
        "moe_shared_expert_intermediate_size": sizes.dims["s"],
    }


TABLE = Table(
    FAMILIES["deepseek_v2"],
    args,
    llama.TOP,
    deepseek_v3.ATTENTION,
    dense=llama.MLP,
    sparse=qwen3_moe.EXPERTS + deepseek_v3.SHARED,
    notes=deepseek_v3.notes,
)
