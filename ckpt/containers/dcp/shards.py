"""DCP's safetensors layout: pieces in `shard-{rank}-model-{number}-of-{count}.safetensors`.

Facts from torch 2.13, `distributed/checkpoint/hf_storage.py` and `_hf_utils.py`. `DCP_SHARDING_INFO` in the header's
`__metadata__` is JSON text: each name's `{"saved_offsets": [...]}` in its tensor. The whole shape is inferred from the
pieces. A replicated tensor is in one file only. A rank without a part of a tensor writes an empty piece.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from typing import Any

from ckpt.base.errors import CorruptError
from ckpt.base.text import pluralize
from ckpt.containers.safetensors import Header, HeaderEntry, read_header
from ckpt.move.files import confined
from ckpt.plan.dtypes import DType
from ckpt.plan.tensors import Box, Extent, Shape

DCP_KEY = "DCP_SHARDING_INFO"
_MAX_JSON = 100_000_000


@dataclass(slots=True)
class Sharded:
    """A tensor and its pieces so far. `shape` is their extent."""

    fqn: str
    dtype: DType
    shape: Shape
    path: str
    placed: list[tuple[Box, Extent]] = field(default_factory=list)


def read_shards(folder: Path, names: tuple[str, ...]) -> list[Sharded]:
    found: dict[str, Sharded] = {}
    for name in names:
        path = str(confined(folder, name))
        header = read_header(path)
        offsets = saved_offsets(header, path)
        for entry in header.entries:
            _add(found, entry, offsets.get(entry.name), path)
    return list(found.values())


def saved_offsets(header: Header, path: str) -> dict[str, Shape]:
    """Return each piece's offsets in its tensor. Raise CorruptError if the header lacks them."""
    text = header.metadata.get(DCP_KEY)
    if text is None:
        raise CorruptError("the file does not record its tensor parts", path=path, expected=DCP_KEY)
    try:
        info = json.loads(text) if len(text) <= _MAX_JSON else None
    except (ValueError, RecursionError):
        info = None
    if not isinstance(info, dict):
        raise CorruptError(f"{DCP_KEY} is not a JSON object", path=path)
    return {name: _shape(value, name, path) for name, value in info.items()}


def _shape(value: Any, name: str, path: str) -> Shape:
    offsets = value.get("saved_offsets") if isinstance(value, dict) else None
    if not isinstance(offsets, list) or not all(type(n) is int and 0 <= n < 1 << 63 for n in offsets):
        raise CorruptError("a piece's offsets are damaged", path=path, fqn=name, expected="saved_offsets")
    return tuple(offsets)


def _add(found: dict[str, Sharded], entry: HeaderEntry, offsets: Shape | None, path: str) -> None:
    if offsets is None or len(offsets) != len(entry.shape):
        raise CorruptError(
            "the file does not record its part of a tensor",
            path=path,
            fqn=entry.name,
            expected=f"{pluralize(len(entry.shape), 'offset')}",
            found="none" if offsets is None else f"{pluralize(len(offsets), 'offset')}",
        )
    reach = tuple(a + n for a, n in zip(offsets, entry.shape, strict=True))
    tensor = found.setdefault(entry.name, Sharded(entry.name, entry.dtype, reach, path))
    if tensor.dtype != entry.dtype or len(tensor.shape) != len(reach):
        raise CorruptError(
            "pieces of a tensor differ in dtype or dims",
            path=path,
            fqn=entry.name,
            expected=f"{tensor.dtype} of {pluralize(len(tensor.shape), 'dim')}",
            found=f"{entry.dtype} of {pluralize(len(reach), 'dim')}",
        )
    tensor.shape = tuple(map(max, tensor.shape, reach))
    if prod(entry.shape):
        extent = Extent.contiguous(path, entry.start, entry.dtype, entry.shape)
        tensor.placed.append((Box(offsets, entry.shape), extent))
