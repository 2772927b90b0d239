"""Element types, with torch's and safetensors' names."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, eq=False)
class DType:
    """An element type. There is one object for each, because large plans compare and hash millions.

    `tag` is the name in safetensors headers, or None. `itemsize` is the size in bytes of one torch element: a
    `float4_e2m1fn_x2` element is one byte with two values.
    """

    name: str
    itemsize: int
    tag: str | None
    floating: bool = False

    def __str__(self) -> str:
        return self.name

    def __reduce__(self) -> tuple[Callable[[str], DType], tuple[str]]:
        return _dtype_called, (self.name,)


def _dtype_called(name: str) -> DType:
    return BY_NAME[name]


FLOAT64 = DType("float64", 8, "F64", True)
FLOAT32 = DType("float32", 4, "F32", True)
FLOAT16 = DType("float16", 2, "F16", True)
BFLOAT16 = DType("bfloat16", 2, "BF16", True)
INT64 = DType("int64", 8, "I64")
UINT8 = DType("uint8", 1, "U8")
BOOL = DType("bool", 1, "BOOL")

ALL: tuple[DType, ...] = (
    FLOAT64,
    FLOAT32,
    FLOAT16,
    BFLOAT16,
    DType("float8_e4m3fn", 1, "F8_E4M3", True),
    DType("float8_e5m2", 1, "F8_E5M2", True),
    DType("float8_e4m3fnuz", 1, "F8_E4M3FNUZ", True),
    DType("float8_e5m2fnuz", 1, "F8_E5M2FNUZ", True),
    DType("float8_e8m0fnu", 1, "F8_E8M0", True),
    DType("float4_e2m1fn_x2", 1, "F4", True),
    DType("complex32", 4, None),
    DType("complex64", 8, "C64"),
    DType("complex128", 16, None),
    INT64,
    DType("int32", 4, "I32"),
    DType("int16", 2, "I16"),
    DType("int8", 1, "I8"),
    DType("uint64", 8, "U64"),
    DType("uint32", 4, "U32"),
    DType("uint16", 2, "U16"),
    UINT8,
    BOOL,
)

BY_NAME = {dtype.name: dtype for dtype in ALL}
BY_TAG = {dtype.tag: dtype for dtype in ALL if dtype.tag is not None}

#: Casts only happen between these.
CASTABLE = {"fp32": FLOAT32, "bf16": BFLOAT16, "fp16": FLOAT16}
