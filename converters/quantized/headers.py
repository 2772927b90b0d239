"""Metadata in the headers of safetensors files."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache

from ckpt.base.errors import CorruptError
from ckpt.containers.safetensors import read_header
from ckpt.plan.tensors import Tensor, Whole


def file_metadata(tensors: Mapping[str, Tensor]) -> Callable[[str], Mapping[str, str]]:
    """Return a function from a tensor's name to its file's metadata. Empty if the tensor has no safetensors file."""

    @cache
    def of_file(path: str) -> Mapping[str, str]:
        try:
            return read_header(path).metadata
        except CorruptError:
            return {}

    def of_tensor(fqn: str) -> Mapping[str, str]:
        source = tensors[fqn].source
        return of_file(source.extent.path) if isinstance(source, Whole) else {}

    return of_tensor
