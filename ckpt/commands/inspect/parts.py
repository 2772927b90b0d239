"""Position of each tensor part: elements, file and offset, for `ckpt inspect --tensor`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from ckpt.base.text import one_line, show_size
from ckpt.plan.tensors import Box, Fragment, Tensor


def parts_of(tensor: Tensor) -> dict[str, Any]:
    """Return offsets and sizes in the files. `copy` numbers the replicas."""
    sources = (tensor.source, *tensor.replicas)
    return {
        "fqn": one_line(tensor.fqn),
        "role": one_line(tensor.role),
        "dtype": tensor.dtype.name,
        "shape": list(tensor.shape),
        "parts": [
            {
                "copy": copy,
                "region": str(fragment.region),
                "rank": fragment.rank,
                "file": one_line(fragment.extent.path),
                "offset": fragment.extent.offset,
                "bytes": fragment.extent.nbytes,
            }
            for copy, source in enumerate(sources)
            for fragment in source.fragments(tensor.shape)
        ],
    }


def part_lines(tensor: Tensor, folder: str) -> Iterator[str]:
    yield one_line(f"{tensor.fqn}  {tensor.role} {tensor.dtype.name} {list(tensor.shape)}, {show_size(tensor.nbytes)}")
    for copy, source in enumerate((tensor.source, *tensor.replicas)):
        for fragment in source.fragments(tensor.shape):
            yield one_line("  " + (f"copy {copy}: " if copy else "") + _where(fragment, tensor, folder))


def _where(fragment: Fragment, tensor: Tensor, folder: str) -> str:
    extent, region = fragment.extent, fragment.region
    is_all = isinstance(region, Box) and region.is_whole(tensor.shape)
    rank = f"rank {fragment.rank}, " if fragment.rank is not None else ""
    path = extent.path.removeprefix(folder.rstrip("/") + "/")
    return f"{rank}{'all of it' if is_all else region}: {path} at byte {extent.offset:,}, {show_size(extent.nbytes)}"
