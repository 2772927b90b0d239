"""SmolLM3: Llama's names, and layers without rotary positions."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from ckpt.base.errors import CorruptError
from converters.names.families.rows import Sizes
from converters.names.families.tables import FAMILIES
from converters.names.megatron.architectures import llama
from converters.names.megatron.args import gated


def args(sizes: Sizes) -> dict[str, Any]:
    return gated(sizes, base=2e6, slides="use_sliding_window") | {"no_rope_freq": _without_positions(sizes)}


def _without_positions(sizes: Sizes) -> list[int]:
    """Return a 1 for each layer marked 0 in the config's `no_rope_layers`."""
    interval = sizes.config.size("no_rope_layer_interval", default=4)
    by_interval = [int((number + 1) % interval != 0) for number in range(sizes.num_layers)]
    rotated = sizes.config.get("no_rope_layers") or by_interval
    if not isinstance(rotated, list) or len(rotated) != sizes.num_layers:
        raise CorruptError(
            "no_rope_layers in the config doesn't have a number for each layer",
            expected=sizes.num_layers,
            found=rotated,
        )
    return [int(not one) for one in rotated]


TABLE = replace(llama.TABLE, family=FAMILIES["smollm3"], args=args)
