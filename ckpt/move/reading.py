"""Reads into memory, in raw bits."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import nullcontext

import numpy as np
from numpy.typing import NDArray

from ckpt.move.casts import storage_dtype
from ckpt.move.files import OpenFiles, translate_os_errors
from ckpt.move.source import read_into, truncated
from ckpt.plan.tensors import Box, Extent, Fragment, Shape, Tensor, flat_range, overlay, runs_of

_PAGE = 4 << 10  # minimum bytes per disk read

Computed = Mapping[str, Callable[[], memoryview]]


def read_box(tensor: Tensor, box: Box, computed: Computed, sources: OpenFiles | None = None) -> NDArray:
    """Return the elements in `box` as a contiguous array of raw bits in the box's shape.

    `computed` is `Checkpoint.computed`: contents without a file.
    """
    bits = np.empty(box.numel, storage_dtype(tensor.dtype))
    if bits.size:
        with OpenFiles() if sources is None else nullcontext(sources) as opened:
            read_box_into(tensor, box, computed, opened, bits.view(np.uint8).data)
    return bits.reshape(box.sizes)


def read_box_into(tensor: Tensor, box: Box, computed: Computed, sources: OpenFiles, buffer: memoryview) -> int:
    """Fill `buffer` with the elements in `box`, and return the number of bytes read, including gaps below a page."""
    size = tensor.dtype.itemsize
    flat = flat_range(box, tensor.shape)
    runs = None if flat is None else runs_of(tensor.source, tensor.shape, flat.start, flat.stop)
    if flat is not None and runs is not None and not any(extent.path in computed for _, _, extent, _, _ in runs):
        for start, stop, extent, at, _ in runs:
            part = buffer[(start - flat.start) * size : (stop - flat.start) * size]
            read_exactly(sources, extent.path, extent.offset + at * size, part)
        return box.numel * size
    wanted = Fragment(box, Extent.contiguous("", 0, tensor.dtype, box.sizes))
    target, done = np.frombuffer(buffer, storage_dtype(tensor.dtype)), 0
    for common in overlay(tensor.fragments(), [wanted], tensor.shape):
        source, to = common.a, common.b
        place = strided(target[to.offset // size :], to.shape, to.strides)
        if source.path in computed:
            content = np.frombuffer(computed[source.path](), np.uint8)
            place[...] = in_shape(content[source.offset : source.end], source)
        else:
            for index, run in _extent_rows(source):
                bits = np.empty(run.end - run.offset, np.uint8)
                read_exactly(sources, run.path, run.offset, bits.data)
                place[index] = in_shape(bits, run)
                done += len(bits)
    return done


def _extent_rows(extent: Extent) -> Iterator[tuple[tuple[int, ...], Extent]]:
    """Yield the parts at least a page apart, with their leading indices."""
    if len(extent.shape) > 1 and extent.shape[0] > 1:
        row = extent._replace(shape=extent.shape[1:], strides=extent.strides[1:])
        step = extent.strides[0] * extent.dtype.itemsize
        if step - (row.end - row.offset) >= _PAGE or next(_extent_rows(row))[0]:
            for number in range(extent.shape[0]):
                for index, part in _extent_rows(row._replace(offset=row.offset + number * step)):
                    yield (number, *index), part
            return
    yield (), extent


def read_exactly(sources: OpenFiles, path: str, offset: int, buffer: memoryview) -> None:
    """Fill `buffer`. Raise CorruptError if the file is too short, or a read error."""
    descriptor = sources.descriptor(path)
    with translate_os_errors(path):
        done = read_into(descriptor, offset, buffer)
    if done != len(buffer):
        raise truncated(path, offset + done)


def read_bits(descriptor: int, extent: Extent) -> NDArray:
    """Return the elements in `extent` as raw bits, in the extent's shape.

    Raise CorruptError if the file is too short, or StorageError.
    """
    raw = np.empty(extent.end - extent.offset, np.uint8)
    with translate_os_errors(extent.path):
        done = read_into(descriptor, extent.offset, raw.data)
    if done != len(raw):
        raise truncated(extent.path, extent.offset + done)
    return in_shape(raw, extent)


def in_shape(raw: NDArray, extent: Extent) -> NDArray:
    """Return `raw`, an extent's bytes, as raw bits in the extent's shape."""
    elements = raw.view(storage_dtype(extent.dtype))
    if extent.is_contiguous:
        return elements.reshape(extent.shape)
    return np.ascontiguousarray(strided(elements, extent.shape, extent.strides))


def strided(elements: NDArray, shape: Shape, strides: Shape) -> NDArray:
    """Return a strided view of a 1-d array (strides in elements). Raise ValueError if it leaves the array."""
    size = elements.itemsize
    view: NDArray = np.ndarray(shape, elements.dtype, elements.data, 0, [stride * size for stride in strides])
    return view
