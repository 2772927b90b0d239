"""Baichuan-7B: Llama with queries, keys and values in one tensor."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from ckpt.base.errors import LossError
from converters.names.families.rows import Sizes
from converters.names.families.tables import FAMILIES
from converters.names.megatron.architectures import llama
from converters.names.megatron.args import gated

LAYER = llama.ATTENTION.replace("[q|k|v]_proj.[weight|bias]    ", "W_pack.[weight|bias]    ").replace(
    " qkv", " one_qkv"
)


def args(sizes: Sizes) -> dict[str, Any]:
    config = sizes.config
    if "z_loss_weight" in config.values or config.get("vocab_size") == 125696:
        what = "Megatron has no output layer with normed rows (Baichuan2)"
        raise LossError(what, found="z_loss_weight, or Baichuan2's vocabulary")
    if config.get("max_position_embeddings") is None:
        raise LossError("Megatron has no ALiBi biases (Baichuan-13B)", found="no positions")
    return gated(sizes, slides=False)


TABLE = replace(llama.TABLE, family=FAMILIES["baichuan"], args=args, layer=LAYER)
