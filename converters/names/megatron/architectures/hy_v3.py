"""Hy3: Qwen3's attention, dense first layers, and DeepSeek's experts with other names."""

from __future__ import annotations

from typing import Any

from converters.names.families.rows import Sizes
from converters.names.families.tables import FAMILIES
from converters.names.megatron.architectures import deepseek_v3, llama, qwen3_moe
from converters.names.megatron.args import gated
from converters.names.megatron.table import Table

EXPERTS = (
    qwen3_moe.EXPERTS.replace("mlp.gate.", "mlp.router.gate.")
    + """
    mlp.router.expert_bias                      mlp.expert_bias                             same
    mlp.shared_experts.linear_fc1.weight        mlp.shared_mlp.[gate|up]_proj.weight        joined
    mlp.shared_experts.linear_fc2.weight        mlp.shared_mlp.down_proj.weight             same
"""
)
PREDICTION = """
    mtp.layers.{n}.[enorm|hnorm].weight         [enorm|hnorm].weight                        same
    mtp.layers.{n}.eh_proj.weight               eh_proj.weight                              same
    mtp.layers.{n}.final_layernorm.weight       final_layernorm.weight                      same
"""


def args(sizes: Sizes) -> dict[str, Any]:
    return gated(sizes, base=11158840.0, slides=False, epsilon=1e-5) | deepseek_v3.routing(sizes, scaling=2.826)


TABLE = Table(
    FAMILIES["hy_v3"], args, llama.TOP, llama.ATTENTION, dense=llama.MLP, sparse=EXPERTS, prediction=PREDICTION
)
