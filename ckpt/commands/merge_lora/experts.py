"""LoRA on experts, in the layouts of Unsloth and Tinker.

Unsloth's gpt-oss in bitsandbytes has a linear layer for each expert (`experts.gate_up_projs.3`). Tinker stacks all
experts' factors (`experts.w1`, [experts, rank, in]), with size 1 for a shared factor.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from dataclasses import dataclass

from ckpt.commands.merge_lora.find import Factor

_UNSLOTH = re.compile(r"(?P<experts>.+\.experts)\.(?P<name>gate_up|down)_projs\.(?P<number>\d+)")
_TINKER = re.compile(r"(?P<experts>.+\.experts)\.w(?P<number>[123])")
_OF_TINKER = {"1": ("gate_up_proj", 0), "2": ("down_proj", None), "3": ("gate_up_proj", 1)}


@dataclass(frozen=True)
class ExpertPart:
    """Part of a stacked parameter: one expert or all, gate or up or all rows."""

    module: str
    parameter: str
    expert: int | None = None
    half: int | None = None

    def fits(self, a: Factor, b: Factor, rank: int, sizes: tuple[int, int, int]) -> bool:
        """Return True if the factors fit `sizes`: number of experts, then rows and columns per expert."""
        num, rows, columns = sizes
        rows = rows if self.half is None else rows // 2
        if self.expert is not None:
            return self.expert < num and (a.shape, b.shape) == ((rank, columns), (rows, rank))
        shapes = {a.shape[1:]: (rank, columns), b.shape[1:]: (rows, rank)}
        counts = {one.shape[0] for one in (a, b) if one.shape}
        return all(found == wanted for found, wanted in shapes.items()) and counts <= {1, num} and num in counts


def part_of(module: str, parameters: Collection[str]) -> ExpertPart | None:
    if found := _UNSLOTH.fullmatch(module):
        part = ExpertPart(module, f"{found['experts']}.{found['name']}_proj", int(found["number"]))
    elif found := _TINKER.fullmatch(module):
        name, half = _OF_TINKER[found["number"]]
        part = ExpertPart(module, f"{found['experts']}.{name}", half=half)
    else:
        return None
    return part if part.parameter in parameters else None
