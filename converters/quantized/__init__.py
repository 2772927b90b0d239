"""Weights that are stored quantized, in several tensors each.

They are carried like any other tensors, bit for bit; `converters.quantized.dequantize` puts plain weights in their
place, with the bits that the library computes that reads them.  A module for each method says how it stores them.

May import: `ckpt.base`, `ckpt.containers`, `ckpt.move`, `ckpt.plan`, `converters.names`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

#: Weights of 4 bits: the rest of the name says which 16 values they have.
BITSANDBYTES_STATE = re.compile(r"(?P<owner>.+)\.quant_state\.bitsandbytes__(?P<kind>nf4|fp4)")

#: Endings of the parts of one weight, the first of them what is packed ("" where it has the weight's own name).
_PARTS = (
    ("_blocks", "_scales"),
    ("", "_scale_inv"),
    ("", ".absmax", ".quant_map", ".nested_absmax", ".nested_quant_map"),
    ("weight", "SCB", "weight_format"),
)
_ENDINGS = (*(ending for _, ending, *_ in _PARTS), "nf4", "fp4")


def parts(names: Iterable[str]) -> frozenset[str]:
    """The `names` of tensors that belong to quantized weights, packed ones too: none of them is a plain parameter."""
    every = frozenset(names)
    found: set[str] = set()
    for name in (name for name in every if name.endswith(_ENDINGS)):  # few do
        if match := BITSANDBYTES_STATE.fullmatch(name):
            found |= {name, match["owner"]}
        for packed, *others in _PARTS:
            if name.endswith(others[0]) and (owner := name.removesuffix(others[0])) + packed in every:
                found |= {owner + ending for ending in (packed, *others)}
    return frozenset(found & every)
