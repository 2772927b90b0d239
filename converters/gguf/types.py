"""Types of GGUF tensors: numbers, and blocks of quantized numbers."""

from __future__ import annotations

from math import prod
from typing import NamedTuple

from ckpt.plan.dtypes import BFLOAT16, BY_NAME, FLOAT16, FLOAT32, FLOAT64, INT64, DType
from ckpt.plan.tensors import Shape

_BYTES = BY_NAME["uint8"]


class GgmlType(NamedTuple):
    """A type in ggml: `block` elements are stored in `size` bytes. `dtype` is None for a quantized type."""

    number: int
    name: str
    block: int
    size: int
    dtype: DType | None = None

    def stored(self, shape: Shape) -> tuple[DType, Shape]:
        """Return dtype and shape of the stored array: a quantized tensor's rows are bytes of whole blocks.

        Raise ValueError if a row does not divide into blocks.
        """
        if self.dtype is not None:
            return self.dtype, shape
        if not shape or shape[-1] % self.block:
            raise ValueError(f"rows of {self.name} divide into blocks of {self.block}")
        return _BYTES, (*shape[:-1], shape[-1] // self.block * self.size)

    def nbytes(self, shape: Shape) -> int:
        dtype, stored = self.stored(shape)
        return prod(stored) * dtype.itemsize


def _of_dtype(number: int, name: str, dtype: DType) -> GgmlType:
    return GgmlType(number, name, 1, dtype.itemsize, dtype)


F32, F16, BF16 = _of_dtype(0, "f32", FLOAT32), _of_dtype(1, "f16", FLOAT16), _of_dtype(30, "bf16", BFLOAT16)
Q8_0, MXFP4 = GgmlType(8, "q8_0", 32, 34), GgmlType(39, "mxfp4", 32, 17)
#: Types to write, by name.
TYPES = ("f32", "f16", "bf16", "q8_0", "mxfp4")
PLAIN = {FLOAT32: F32, FLOAT16: F16, BFLOAT16: BF16}

#: Every type in ggml.h of llama.cpp (November 2026), by number.
BY_NUMBER = {
    one.number: one
    for one in (
        *(F32, F16, BF16, Q8_0, MXFP4),
        *(_of_dtype(24 + n, f"i{8 << n}", BY_NAME[f"int{8 << n}"]) for n in range(3)),
        *(_of_dtype(27, "i64", INT64), _of_dtype(28, "f64", FLOAT64)),
        *(GgmlType(number, f"q{name}", 32, size) for number, name, size in ((2, "4_0", 18), (3, "4_1", 20))),
        *(GgmlType(number, f"q{name}", 32, size) for number, name, size in ((6, "5_0", 22), (7, "5_1", 24))),
        *(GgmlType(9, "q8_1", 32, 36), GgmlType(20, "iq4_nl", 32, 18), GgmlType(40, "nvfp4", 64, 36)),
        *(GgmlType(10 + n, f"q{bits}_k", 256, size) for n, (bits, size) in enumerate(((2, 84), (3, 110), (4, 144)))),
        *(GgmlType(13 + n, f"q{bits}_k", 256, size) for n, (bits, size) in enumerate(((5, 176), (6, 210), (8, 292)))),
        *(GgmlType(16, "iq2_xxs", 256, 66), GgmlType(17, "iq2_xs", 256, 74), GgmlType(18, "iq3_xxs", 256, 98)),
        *(GgmlType(19, "iq1_s", 256, 50), GgmlType(21, "iq3_s", 256, 110), GgmlType(22, "iq2_s", 256, 82)),
        *(GgmlType(23, "iq4_xs", 256, 136), GgmlType(29, "iq1_m", 256, 56)),
        *(GgmlType(41, "q1_0", 128, 18), GgmlType(42, "q2_0", 64, 18)),
        *(GgmlType(34, "tq1_0", 256, 54), GgmlType(35, "tq2_0", 256, 66)),
    )
}
TYPE_BY_NAME = {one.name: one for one in BY_NUMBER.values()}
