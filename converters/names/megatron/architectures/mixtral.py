"""Mixtral: Mistral's attention, experts in every layer."""

from __future__ import annotations

from functools import partial

from converters.names.families.tables import FAMILIES
from converters.names.megatron.architectures import llama
from converters.names.megatron.args import gated
from converters.names.megatron.table import Table

EXPERTS = """
    pre_mlp_layernorm.weight                           post_attention_layernorm.weight               same
    mlp.router.weight                                  block_sparse_moe.gate.weight                  same
    mlp.experts.local_experts.{e}.linear_fc1.weight    block_sparse_moe.experts.{e}.w[1|3].weight    joined
    mlp.experts.local_experts.{e}.linear_fc2.weight    block_sparse_moe.experts.{e}.w2.weight        same
"""

TABLE = Table(FAMILIES["mixtral"], partial(gated, base=1e6, epsilon=1e-5), llama.TOP, llama.ATTENTION, sparse=EXPERTS)
