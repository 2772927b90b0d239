"""Plain LoRA without torch's Python, the import of which takes longer than a merge of a small model.

The arithmetic is torch's all the same, in the order of `ckpt.lora.arithmetic`.  The C functions of its library
(`torch/csrc/inductor/aoti_torch/c/shim.h`, kept for programs that were compiled with an older torch) multiply the
factors and convert dtypes; numpy scales and adds, which IEEE 754 leaves one result for, but for the bits of a NaN that
is added to another.
"""

from __future__ import annotations

import ctypes
import os
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ckpt.lora.find import Factor
from ckpt.move.reading import read_box
from ckpt.plan.dtypes import BFLOAT16, FLOAT16, FLOAT32, FLOAT64, DType
from ckpt.plan.tensors import whole

_FUNCTIONS = ("create_tensor_from_blob", "delete_tensor_object", "copy_", "cpu_mm_out")
_SET_THREADS = "MKL_Set_Num_Threads_Local"
_WIDE: dict[DType, np.dtype[Any]] = {FLOAT32: np.dtype(np.float32), FLOAT64: np.dtype(np.float64)}
_LINE = 64  # bytes of a cache line: products that begin elsewhere take three times as long
_AT_ONCE = 1 << 17  # elements that stay in the processor's cache from scaling to rounding


@dataclass(frozen=True)
class PlainLora:
    """What plain LoRA adds to a weight [out, in], or [in, out] where `transposed`: `scaling` times b @ a."""

    a: Factor
    b: Factor
    scaling: float
    transposed: bool

    def merge(self, library: TorchLibrary, weight: NDArray[Any], dtype: DType) -> NDArray[Any]:
        """Add it to `weight`, the raw bits of a tensor of `dtype`, in place."""
        with library.one_thread():  # tensors are computed side by side already
            return self._merge(library, weight, dtype)

    def _merge(self, library: TorchLibrary, weight: NDArray[Any], dtype: DType) -> NDArray[Any]:
        wide = FLOAT64 if dtype == FLOAT64 else FLOAT32
        low, high = (library.cast(*stored(one), wide, use) for one, use in ((self.a, "low"), (self.b, "high")))
        product = _MEMORY.array("product", (high.shape[0], low.shape[1]), _WIDE[wide])
        library.multiply(high, low, product, wide)
        lying = product.T if self.transposed else product
        step = max(1, _AT_ONCE // max(1, weight.shape[1]))
        with np.errstate(all="ignore"):
            for first in range(0, len(weight), step):
                part, delta = weight[first : first + step], lying[first : first + step]
                np.multiply(delta, self.scaling, out=delta)
                if dtype == wide:
                    np.add(part.view(_WIDE[wide]), delta, out=part.view(_WIDE[wide]))
                    continue
                total = _MEMORY.array("sum", part.shape, _WIDE[wide])
                library.copy(part, dtype, total, wide)
                np.add(total, delta, out=total)
                library.copy(total, wide, part, dtype)
        return weight


def is_stored(factor: Factor) -> bool:
    """Whether a tensor is had from its file as it is, in a dtype that is computed with here."""
    choice = factor.choice
    return choice is not None and not choice.is_cast and choice.dtype in (BFLOAT16, FLOAT16, FLOAT32, FLOAT64)


def stored(factor: Factor) -> tuple[NDArray[Any], DType]:
    """The raw bits of a tensor, which may be written to, and its dtype."""
    assert factor.choice is not None
    bits = read_box(factor.choice.tensor, whole(factor.shape), factor.of.computed)
    return bits if bits.flags.writeable else bits.copy(), factor.choice.dtype


class TorchLibrary:
    """The functions of torch's library that are needed here, each on numpy's memory."""

    def __init__(self, path: Path) -> None:
        """Raises OSError without such a library, AttributeError for one that has not all of them."""
        ctypes.CDLL(None).dlopen(os.fsencode(path), os.RTLD_NOW)  # unlike CDLL, it lets other threads run
        library = ctypes.CDLL(str(path))
        self._create, self._delete, self._copy, self._multiply = (
            getattr(library, f"aoti_torch_{name}") for name in _FUNCTIONS
        )
        self._codes = {
            dtype: getattr(library, f"aoti_torch_dtype_{dtype.name}")()
            for dtype in (BFLOAT16, FLOAT16, FLOAT32, FLOAT64)
        }
        self._mkl, self._omp = getattr(library, _SET_THREADS), library.omp_set_num_threads
        self._omp_threads = library.omp_get_max_threads

    @contextmanager
    def one_thread(self) -> Iterator[None]:
        """Multiply and convert in the calling thread alone; torch finds its settings as they were."""
        mkl, omp = self._mkl(1), self._omp_threads()
        self._omp(1)
        try:
            yield
        finally:
            self._mkl(mkl)
            self._omp(omp)

    def cast(self, bits: NDArray[Any], dtype: DType, wide: DType, use: str) -> NDArray[Any]:
        """The values of a tensor in the wide dtype, which lie as torch's own: where they lie may decide BLAS's bits."""
        found = _MEMORY.array(use, bits.shape, _WIDE[wide])
        self.copy(bits, dtype, found, wide)
        return found

    def copy(self, of: NDArray[Any], dtype: DType, to: NDArray[Any], other: DType) -> None:
        with self._tensor(of, dtype) as before, self._tensor(to, other) as after:
            _refuse_failed(self._copy(after, before, 0))

    def multiply(self, one: NDArray[Any], other: NDArray[Any], product: NDArray[Any], dtype: DType) -> None:
        with self._tensor(one, dtype) as a, self._tensor(other, dtype) as b, self._tensor(product, dtype) as made:
            _refuse_failed(self._multiply(made, a, b))

    @contextmanager
    def _tensor(self, array: NDArray[Any], dtype: DType) -> Iterator[ctypes.c_void_p]:
        numbers = ctypes.c_int64 * array.ndim
        sizes, strides = numbers(*array.shape), numbers(*(stride // array.itemsize for stride in array.strides))
        place, made, first = ctypes.c_void_p(array.ctypes.data), ctypes.c_void_p(), ctypes.c_int64(0)
        ndim, cpu = ctypes.c_int64(array.ndim), (0, 0)
        _refuse_failed(self._create(place, ndim, sizes, strides, first, self._codes[dtype], *cpu, ctypes.byref(made)))
        try:
            yield made
        finally:
            self._delete(made)


class RefusedError(Exception):
    """Torch's library has not carried out a function, and has said why on standard error."""


def _refuse_failed(error: int) -> None:
    if error:
        raise RefusedError


def load_ahead() -> None:
    """Begin to load torch's library, which takes a fifth of a second, while a merge is being planned."""
    if "torch" not in sys.modules:
        threading.Thread(target=_library).start()


def library() -> TorchLibrary | None:
    """Torch's library; None where torch is imported anyway, or it is one without these functions."""
    return None if "torch" in sys.modules else _library()


@contextmanager
def one_thread() -> Iterator[None]:
    """Let torch compute in the calling thread alone, where its library can be told so for one thread of many."""
    from torch import get_num_threads

    get_num_threads()  # it sets those of a new thread when it is first asked
    found = _library()
    with found.one_thread() if found else nullcontext():
        yield


@cache
def _library() -> TorchLibrary | None:
    found = find_spec("torch")
    try:
        return TorchLibrary(Path(str(found and found.origin)).parent / "lib/libtorch_cpu.so")
    except (OSError, AttributeError):
        return None


class _Memory(threading.local):
    """A thread's memory for factors, products and sums: fresh pages for each would cost as much as computing it."""

    def __init__(self) -> None:
        self.held: dict[str, NDArray[np.uint8]] = {}

    def array(self, use: str, shape: tuple[int, ...], dtype: np.dtype[Any]) -> NDArray[Any]:
        size = int(np.prod(shape)) * dtype.itemsize
        if use not in self.held or self.held[use].size < size:
            memory = np.empty(size + _LINE, np.uint8)
            self.held[use] = memory[-memory.ctypes.data % _LINE :][:size]
        return self.held[use][:size].view(dtype).reshape(shape)


_MEMORY = _Memory()
