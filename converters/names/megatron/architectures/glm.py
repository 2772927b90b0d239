"""GLM-4 as `glm`: Llama's attention with biases, interleaved rotary positions, and gate and up in one tensor."""

from __future__ import annotations

from typing import Any

from converters.names.families.rows import Sizes
from converters.names.families.tables import FAMILIES
from converters.names.megatron.architectures import llama, phi3
from converters.names.megatron.args import gated
from converters.names.megatron.table import Table


def args(sizes: Sizes) -> dict[str, Any]:
    return gated(sizes, partial=0.5, slides=False, epsilon=1.5625e-7) | {"rotary_interleaved": True}


TABLE = Table(FAMILIES["glm"], args, llama.TOP, llama.ATTENTION, dense=phi3.MLP)
