"""Reading a range of a file, an extent, or a box of one tensor into memory, as raw bits."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping

import numpy as np
from numpy.typing import NDArray

from ckpt.errors import CorruptError
from ckpt.move.casts import storage_dtype
from ckpt.move.files import translate_os_errors
from ckpt.plan.tensors import Box, Extent, Fragment, Tensor, overlay

Computed = Mapping[str, Callable[[], memoryview]]


def read_box(tensor: Tensor, box: Box, computed: Computed) -> NDArray:
    """The elements of `box` of `tensor` as a contiguous array of raw bits, in the box's shape.

    `computed` is `Checkpoint.computed`: the content of extents that lie in no file.
    """
    wanted = Fragment(box, Extent.contiguous("", 0, tensor.dtype, box.sizes))
    dtype = storage_dtype(tensor.dtype)
    flat = np.empty(0, dtype)
    for common in overlay(tensor.fragments(), [wanted], tensor.shape):
        read = _read(common.a, computed)
        if read.size == box.numel:  # all of it: there is nothing to put together
            return read.reshape(box.sizes)
        if not flat.size:
            flat = np.empty(box.numel, dtype)
        start = common.b.offset // dtype.itemsize
        strides = tuple(stride * dtype.itemsize for stride in common.b.strides)
        np.lib.stride_tricks.as_strided(flat[start:], common.b.shape, strides)[...] = read
    return flat.reshape(box.sizes)


def _read(extent: Extent, computed: Computed) -> NDArray:
    if extent.path in computed:
        content = computed[extent.path]()
        return in_shape(np.frombuffer(content, np.uint8)[extent.offset : extent.end], extent)
    with translate_os_errors(extent.path):
        descriptor = os.open(extent.path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        return read_bits(descriptor, extent)
    finally:
        os.close(descriptor)


def read_bits(descriptor: int, extent: Extent) -> NDArray:
    """The elements of `extent` as a contiguous array of raw bits, in the extent's shape."""
    raw = np.empty(extent.end - extent.offset, np.uint8)
    read_into(descriptor, raw.data, extent)
    return in_shape(raw, extent)


def in_shape(raw: NDArray, extent: Extent) -> NDArray:
    """The elements of `extent`, whose bytes are `raw`, as a contiguous array of raw bits in the extent's shape."""
    elements = raw.view(storage_dtype(extent.dtype))
    if extent.is_contiguous:
        return elements.reshape(extent.shape)
    strides = tuple(stride * extent.dtype.itemsize for stride in extent.strides)
    return np.ascontiguousarray(np.lib.stride_tricks.as_strided(elements, extent.shape, strides))


def read_into(descriptor: int, buffer: memoryview, extent: Extent) -> None:
    """Fill `buffer` from the start of `extent`; CorruptError where the file ends before that."""
    done = 0
    while done < len(buffer):
        with translate_os_errors(extent.path):
            count = os.preadv(descriptor, [buffer[done:]], extent.offset + done)
        if count == 0:
            raise truncated(extent, extent.offset + done)
        done += count


def truncated(extent: Extent, offset: int) -> CorruptError:
    """The error for a file that ends at `offset`, inside `extent`."""
    return CorruptError("the file ends inside a tensor", path=extent.path, found=f"end of file at byte {offset}")
