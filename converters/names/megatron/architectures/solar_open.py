"""Solar Open: GLM-4.5's names, with experts in every layer, and fully rotated heads."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from converters.names.families.rows import Sizes
from converters.names.families.tables import FAMILIES
from converters.names.megatron.architectures import deepseek_v3, glm4_moe
from converters.names.megatron.args import gated


def args(sizes: Sizes) -> dict[str, Any]:
    deepseek_v3.normalised(sizes)
    return gated(sizes, base=1e6, partial=1.0, slides=False, epsilon=1e-5) | deepseek_v3.routing(sizes, scaling=1.0)


TABLE = replace(glm4_moe.TABLE, family=FAMILIES["solar_open"], args=args, prediction="")
