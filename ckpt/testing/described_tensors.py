"""Reader for a described tensor's bytes, independent of the conversion code."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np

from ckpt.plan.tensors import FlatRange, Shape, Tensor

Content = tuple[str, Shape, bytes]
_NOTHING: Mapping[str, Callable[[], memoryview]] = {}


def content(tensor: Tensor, computed: Mapping[str, Callable[[], memoryview]] = _NOTHING) -> Content:
    dtype = np.dtype(f"u{tensor.dtype.itemsize}")
    flat = np.zeros(tensor.numel, dtype)
    for fragment in tensor.fragments():
        if not fragment.region.numel:
            continue
        extent = fragment.extent
        if extent.path in computed:
            base = np.frombuffer(computed[extent.path]()[extent.offset : extent.end], dtype)
        else:
            with open(extent.path, "rb") as file:
                file.seek(extent.offset)
                base = np.frombuffer(file.read(extent.end - extent.offset), dtype)
        strides = tuple(s * extent.dtype.itemsize for s in extent.strides)
        values = np.lib.stride_tricks.as_strided(base, extent.shape, strides)
        if isinstance(fragment.region, FlatRange):
            flat[fragment.region.start : fragment.region.stop] = values.reshape(-1)
        else:
            box = fragment.region
            window = tuple(slice(a, b, s) for a, b, s in zip(box.offsets, box.ends, box.all_steps, strict=True))
            flat.reshape(tensor.shape)[window] = values
    return tensor.dtype.name, tensor.shape, flat.tobytes()
