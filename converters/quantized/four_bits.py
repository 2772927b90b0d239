"""Reader for bitsandbytes' recorded state for a 4-bit weight: its shape and block sizes.

Source: bitsandbytes 0.50.2 `functional.py` (`QuantState.as_dict`, `from_dict`).
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from typing import Any

from ckpt.plan.tensors import Shape

#: Its suffix names the weight's 16 values.
STATE = re.compile(r"(?P<owner>.+)\.quant_state\.bitsandbytes__(?P<kind>nf4|fp4)")
#: Maximum size of the JSON, in bytes.
MAX_STATE = 1 << 16
NUM_VALUES, NUM_NESTED_VALUES = 16, 256
_BLOCK_SIZES = (32, 64, 128, 256, 512, 1024, 2048, 4096)
_DTYPES = ("bfloat16", "float16", "float32")


class StateError(ValueError):
    """State never written by bitsandbytes: `expected` tells what is wrong with `found`."""

    def __init__(self, expected: str, found: object) -> None:
        super().__init__(f"expected {expected}, found {found}")
        self.expected, self.found = expected, found


@dataclass(frozen=True, slots=True)
class NestedState:
    block_size: int
    offset: float


@dataclass(frozen=True, slots=True)
class FourBitState:
    """A weight's recorded state. `dtype` and `shape` are the plain weight's."""

    shape: Shape
    dtype: str
    block_size: int
    nested: NestedState | None

    @property
    def num_bytes(self) -> int:
        return -(-prod(self.shape) // 2)

    @property
    def num_blocks(self) -> int:
        return -(-prod(self.shape) // self.block_size)

    @property
    def counts(self) -> Mapping[str, int]:
        """Number of elements in each other part."""
        found = {".absmax": self.num_blocks, ".quant_map": NUM_VALUES}
        if self.nested is not None:
            num_nested = -(-self.num_blocks // self.nested.block_size)
            found |= {".nested_absmax": num_nested, ".nested_quant_map": NUM_NESTED_VALUES}
        return found


def parse_state(stored: bytes, kind: str) -> FourBitState:
    try:
        content: Any = json.loads(stored)
    except (ValueError, RecursionError) as error:
        raise StateError("JSON", error) from None
    if not isinstance(content, dict) or content.get("quant_type") != kind:
        raise StateError(f"an object with quant_type {kind}", content)
    dtype, shape, size = content.get("dtype"), content.get("shape"), content.get("blocksize")
    if dtype not in _DTYPES or not isinstance(shape, list) or not all(type(n) is int and n >= 0 for n in shape):
        raise StateError("a shape and a dtype, " + ", ".join(_DTYPES), content)
    if size not in _BLOCK_SIZES:
        raise StateError(f"a blocksize, one of {_BLOCK_SIZES}", size)
    nested = _parse_nested(content) if "nested_blocksize" in content else None
    return FourBitState(tuple(shape), dtype, size, nested)


def _parse_nested(content: Mapping[str, Any]) -> NestedState:
    size, offset = content.get("nested_blocksize"), content.get("nested_offset")
    if type(size) is not int or size <= 0 or not isinstance(offset, int | float):
        raise StateError("nested_blocksize and nested_offset", content)
    if content.get("nested_dtype") != "float32":
        raise StateError("nested_dtype float32", content.get("nested_dtype"))
    return NestedState(size, offset)
