"""Nemotron 3 and 4, Minitron: Llama's attention, layer norms stored less one, and Arcee's ungated MLP."""

from __future__ import annotations

from typing import Any

from converters.names.families.rows import Sizes
from converters.names.families.tables import FAMILIES
from converters.names.megatron.architectures import arcee, llama, starcoder2
from converters.names.megatron.table import Table


def args(sizes: Sizes) -> dict[str, Any]:
    norms = {"normalization": "LayerNorm", "norm_epsilon": sizes.config.number("norm_eps", 1e-5)}
    return arcee.squared(sizes, partial=0.5) | norms | {"apply_layernorm_1p": True}


TABLE = Table(
    FAMILIES["nemotron"],
    args,
    llama.TOP + starcoder2.FINAL_BIAS,
    llama.ATTENTION + starcoder2.NORM_BIASES,
    dense=arcee.MLP,
)
