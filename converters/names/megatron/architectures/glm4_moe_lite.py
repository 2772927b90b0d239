"""GLM-4.7-Flash: DeepSeek-V3's names, with a list of layer kinds."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from converters.names.families.tables import FAMILIES
from converters.names.megatron.architectures import deepseek_v3

TABLE = replace(
    deepseek_v3.TABLE,
    family=FAMILIES["glm4_moe_lite"],
    args=partial(deepseek_v3.args, scaling=1.8, epsilon=1e-5),
    notes=partial(deepseek_v3.notes, epsilon=1e-5),
)
