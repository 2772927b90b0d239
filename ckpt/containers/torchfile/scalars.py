"""Values of one-element tensors, such as Adam's step."""

from __future__ import annotations

import struct

from ckpt.base.errors import CorruptError
from ckpt.move.files import translate_os_errors
from ckpt.move.source import opened, read_up_to
from ckpt.plan.checkpoint import OneElement
from ckpt.plan.dtypes import BFLOAT16, DType
from ckpt.plan.tensors import Extent

_FORMATS = {"float64": "<d", "float32": "<f", "float16": "<e", "bool": "<?"}
_FORMATS |= {f"int{bits}": f"<{code}" for bits, code in zip((8, 16, 32, 64), "bhiq", strict=True)}
_FORMATS |= {f"u{name}": _FORMATS[name].upper() for name in ("int8", "int16", "int32", "int64")}


def read_scalar(extent: Extent) -> int | float | bool:
    """Raise CorruptError if the element is missing or not a number."""
    if extent.numel != 1:
        raise CorruptError("a single number was expected", path=extent.path, found=f"shape {list(extent.shape)}")
    with opened(extent.path) as descriptor, translate_os_errors(extent.path):
        data = read_up_to(descriptor, extent.offset, extent.dtype.itemsize)
    if len(data) != extent.dtype.itemsize:
        raise CorruptError("the file ends inside a tensor", path=extent.path, found=f"end before byte {extent.end}")
    return scalar_from_bytes(data, extent.dtype)


def number_state(name: str, extent: Extent) -> int | float | bool | OneElement:
    """Return a one-element optimizer state: Adam's `step` as a number, others as `OneElement`."""
    value = read_scalar(extent)
    return value if name == "step" and not extent.shape else OneElement(value, extent.dtype, extent.shape)


def scalar_from_bytes(data: bytes, dtype: DType) -> int | float | bool:
    if dtype == BFLOAT16:
        data, code = b"\0\0" + data, "<f"
    elif dtype.name in _FORMATS:
        code = _FORMATS[dtype.name]
    else:
        raise CorruptError(f"an element of {dtype} is not a plain number")
    value: int | float | bool = struct.unpack(code, data)[0]
    return value


def scalar_to_bytes(value: float, dtype: DType) -> bytes:
    if dtype == BFLOAT16:
        return struct.pack("<f", value)[2:]
    return struct.pack(_FORMATS[dtype.name], value)
