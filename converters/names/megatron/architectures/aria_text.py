"""Aria's language model: Llama's attention, and experts stacked on the Hub as [in, out]."""

from __future__ import annotations

from typing import Any

from converters.names.families.rows import Sizes
from converters.names.families.tables import FAMILIES
from converters.names.megatron.architectures import llama
from converters.names.megatron.args import gated
from converters.names.megatron.table import Table

EXPERTS = """
    pre_mlp_layernorm.weight                            post_attention_layernorm.weight             same
    mlp.router.weight                                   mlp.router.weight                           same
    mlp.experts.local_experts.{e}.linear_fc1.weight     mlp.experts.fc1.weight                      transposed
    mlp.experts.local_experts.{e}.linear_fc2.weight     mlp.experts.fc2.weight                      transposed
    mlp.shared_experts.linear_fc1.weight                mlp.shared_experts.[gate|up]_proj.weight    joined
    mlp.shared_experts.linear_fc2.weight                mlp.shared_experts.down_proj.weight         same
"""


def args(sizes: Sizes) -> dict[str, Any]:
    return gated(sizes, slides=False) | {"moe_shared_expert_intermediate_size": sizes.dims["s"]}


TABLE = Table(FAMILIES["aria_text"], args, llama.TOP, llama.ATTENTION, sparse=EXPERTS)
