"""StarCoder and SantaCoder: GPT-2 with [out, in] matrices, and one head for keys and values."""

from __future__ import annotations

from typing import Any

from ckpt.base.errors import LossError
from converters.names.families.rows import Sizes
from converters.names.families.tables import FAMILIES
from converters.names.megatron.architectures import gpt2
from converters.names.megatron.table import Table

LAYER = gpt2.LAYER.replace("fused_qkv", "one_qkv").replace("transposed", "same")


def args(sizes: Sizes) -> dict[str, Any]:
    if not sizes.config.flag("multi_query", True):
        raise LossError("ckpt supports this architecture only with one key head", found="multi_query false")
    return gpt2.args(sizes)


TABLE = Table(FAMILIES["gpt_bigcode"], args, gpt2.TOP, LAYER, prefix="transformer.")
