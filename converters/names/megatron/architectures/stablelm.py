"""StableLM: Llama's names, layer norms with biases, and partly rotated heads."""

from __future__ import annotations

from typing import Any

from ckpt.base.errors import LossError
from converters.names.families.rows import Sizes
from converters.names.families.tables import FAMILIES
from converters.names.megatron.architectures import llama, starcoder2
from converters.names.megatron.args import gated
from converters.names.megatron.table import Table


def args(sizes: Sizes) -> dict[str, Any]:
    config = sizes.config
    if config.flag("use_parallel_residual"):
        raise LossError("Megatron has no parallel residual", found="use_parallel_residual true")
    norms = {"normalization": "LayerNorm", "norm_epsilon": config.number("layer_norm_eps", 1e-5)}
    return gated(sizes, partial=0.25, slides=False) | norms


TABLE = Table(
    FAMILIES["stablelm"],
    args,
    llama.TOP + starcoder2.FINAL_BIAS,
    llama.ATTENTION + starcoder2.NORM_BIASES,
    dense=llama.MLP,
)
