"""Reading a range of a file, an extent, or a box of one tensor into memory, as raw bits."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping

import numpy as np
from numpy.typing import NDArray

from ckpt.move.casts import storage_dtype
from ckpt.move.files import translate_os_errors
from ckpt.move.source import open_file, read_into, truncated
from ckpt.plan.tensors import Box, Extent, Fragment, Shape, Tensor, overlay

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
        strided(flat[common.b.offset // dtype.itemsize :], common.b.shape, common.b.strides)[...] = read
    return flat.reshape(box.sizes)


def _read(extent: Extent, computed: Computed) -> NDArray:
    if extent.path in computed:
        content = computed[extent.path]()
        return in_shape(np.frombuffer(content, np.uint8)[extent.offset : extent.end], extent)
    descriptor = open_file(extent.path)
    try:
        return read_bits(descriptor, extent)
    finally:
        os.close(descriptor)


def read_bits(descriptor: int, extent: Extent) -> NDArray:
    """The elements of `extent` as a contiguous array of raw bits, in the extent's shape.

    Raises CorruptError where the file ends before, StorageError.
    """
    raw = np.empty(extent.end - extent.offset, np.uint8)
    with translate_os_errors(extent.path):
        done = read_into(descriptor, extent.offset, raw.data)
    if done != len(raw):
        raise truncated(extent.path, extent.offset + done)
    return in_shape(raw, extent)


def in_shape(raw: NDArray, extent: Extent) -> NDArray:
    """The elements of `extent`, whose bytes are `raw`, as a contiguous array of raw bits in the extent's shape."""
    elements = raw.view(storage_dtype(extent.dtype))
    if extent.is_contiguous:
        return elements.reshape(extent.shape)
    return np.ascontiguousarray(strided(elements, extent.shape, extent.strides))


def strided(elements: NDArray, shape: Shape, strides: Shape) -> NDArray:
    """A view of the 1-d array `elements`, with strides in elements.  ValueError where it would lead out of them."""
    size = elements.itemsize
    view: NDArray = np.ndarray(shape, elements.dtype, elements.data, 0, [stride * size for stride in strides])
    return view
