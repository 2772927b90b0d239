"""ERNIE 4.5, dense: Llama's names, and interleaved rotary positions."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from converters.names.families.rows import Sizes
from converters.names.families.tables import FAMILIES
from converters.names.megatron.architectures import llama
from converters.names.megatron.args import gated


def args(sizes: Sizes) -> dict[str, Any]:
    return gated(sizes, base=500000.0, slides=False, epsilon=1e-5) | {"rotary_interleaved": True}


TABLE = replace(llama.TABLE, family=FAMILIES["ernie4_5"], args=args)
