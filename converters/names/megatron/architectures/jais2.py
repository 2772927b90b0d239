"""Jais 2: Nemotron's names, with biases everywhere and plain layer norms."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from converters.names.families.rows import Sizes
from converters.names.families.tables import FAMILIES
from converters.names.megatron.architectures import arcee, nemotron


def args(sizes: Sizes) -> dict[str, Any]:
    norms = {"normalization": "LayerNorm", "norm_epsilon": sizes.config.number("layer_norm_eps", 1e-5)}
    return arcee.squared(sizes) | norms


TABLE = replace(nemotron.TABLE, family=FAMILIES["jais2"], args=args)
