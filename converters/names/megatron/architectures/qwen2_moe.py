"""Qwen1.5 MoE and Qwen2 MoE: Qwen2's names, with experts and a gated shared expert in some or all layers."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from converters.names.families.rows import Sizes
from converters.names.families.tables import FAMILIES
from converters.names.megatron.architectures import llama, qwen3_moe
from converters.names.megatron.args import gated

SHARED = """
    mlp.shared_experts.linear_fc1.weight                mlp.shared_expert.[gate|up]_proj.weight     joined
    mlp.shared_experts.linear_fc2.weight                mlp.shared_expert.down_proj.weight          same
    mlp.shared_experts.gate_weight                      mlp.shared_expert_gate.weight               same
"""


def args(sizes: Sizes) -> dict[str, Any]:
    return gated(sizes, slides="use_sliding_window") | qwen3_moe.softmax(sizes) | shared(sizes)


def shared(sizes: Sizes) -> dict[str, Any]:
    return {"moe_shared_expert_intermediate_size": sizes.dims["s"], "moe_shared_expert_gate": True}


TABLE = replace(llama.TABLE, family=FAMILIES["qwen2_moe"], args=args, sparse=qwen3_moe.EXPERTS + SHARED)
