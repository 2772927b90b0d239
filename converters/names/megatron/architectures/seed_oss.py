"""Seed-OSS: Llama's names, and biases for queries, keys and values."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from converters.names.families.rows import Sizes
from converters.names.families.tables import FAMILIES
from converters.names.megatron.architectures import llama
from converters.names.megatron.args import gated


def args(sizes: Sizes) -> dict[str, Any]:
    config = sizes.config
    return gated(sizes, slides=False) | {
        "attention_dropout": config.number("attention_dropout", 0.1),
        "hidden_dropout": config.number("residual_dropout", 0.1),
    }


TABLE = replace(llama.TABLE, family=FAMILIES["seed_oss"], args=args)
