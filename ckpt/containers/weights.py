"""Folders of safetensors files that hold whole tensors, with or without an index of which file has which.

Files of torch's with an index are of the same kind: what concerns the index and its shards serves both.

Files are filled and numbered as huggingface_hub does it (`serialization/_base.py`); the index is transformers'
`model.safetensors.index.json`, which MLX writes as well.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from ckpt.base.errors import CorruptError, NotFoundError, UnsafeError
from ckpt.base.text import counted
from ckpt.containers.dcp.shards import DCP_KEY, saved_offsets
from ckpt.containers.safetensors import Header, Planned, build_header, read_header
from ckpt.containers.sources import Sources
from ckpt.move.files import confined
from ckpt.plan.checkpoint import WEIGHT, Key, Slot, TargetFile
from ckpt.plan.precision import Choice
from ckpt.plan.tensors import Extent, Tensor, Whole, whole

_T = TypeVar("_T")

#: transformers' names for a model's only file, and for the index of shards.
SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
#: The bound on the size of an index.
MAX_INDEX = 128 << 20


@dataclass(frozen=True)
class Index:
    """`model.safetensors.index.json`: the file of each tensor, and what it says of their size."""

    name: str
    weight_map: Mapping[str, str]
    total_size: object

    def size_notes(self, total: int) -> list[str]:
        """A wrong total_size is worth a note only: older tools counted elements, or tied tensors twice."""
        if self.total_size is None or self.total_size == total:
            return []
        return [f"{self.name}: total_size says {self.total_size!r} bytes, the tensors have {total}"]


def parse_index(
    index: Any, path: Path, what: str = "safetensors", suffixes: tuple[str, ...] = (".safetensors",)
) -> Index:
    """The index whose JSON is `index`; CorruptError or UnsafeError where it names no files of its folder."""
    weight_map = index.get("weight_map") if isinstance(index, dict) else None
    if not isinstance(weight_map, dict) or not weight_map:
        raise CorruptError("the index has no weight_map", path=path)
    for fqn, name in weight_map.items():
        if not isinstance(name, str):
            raise CorruptError("the index does not give a file name", path=path, fqn=fqn, found=repr(name))
        if not name or "\0" in name or os.path.isabs(name) or ".." in Path(name).parts:
            raise UnsafeError("the index names a file outside its folder", path=path, fqn=fqn, found=repr(name))
        if not name.endswith(suffixes) or not name.isprintable():
            raise CorruptError(f"the index names a file that is not a {what}", path=path, fqn=fqn, found=repr(name))
    metadata = index.get("metadata")
    total_size = metadata.get("total_size") if isinstance(metadata, dict) else None
    return Index(path.name, weight_map, total_size)


def read_weights(
    folder: Path, names: Iterable[str], weight_map: Mapping[str, str] | None, sources: Sources
) -> dict[Key, Tensor]:
    """The tensors of safetensors files in `folder`, which `sources` remember; all have the role `weight`.

    CorruptError for a missing file, for a tensor that stands twice, and for one that is not where `weight_map` says.
    """
    tensors: dict[Key, Tensor] = {}
    for name in names:
        file = confined(folder, name)
        if not file.exists():
            raise missing_file(file, weight_map)
        sources.add(file)
        _collect(tensors, read_header(file), str(file), name, weight_map)
    for fqn, name in (weight_map or {}).items():
        if (fqn, WEIGHT) not in tensors:
            raise CorruptError("the index names a tensor that its file does not hold", path=folder / name, fqn=fqn)
    return tensors


def missing_file(file: Path, weight_map: Mapping[str, str] | None) -> CorruptError:
    """The error of a file that is not there, with some of the tensors that it should have."""
    lost = [fqn for fqn, name in (weight_map or {}).items() if name == file.name]
    return CorruptError(
        "a file of weights is missing",
        path=file,
        expected=f"a file with {counted(len(lost), 'tensor')}" if lost else "a file",
        found="no file",
        fqn=", ".join(lost[:3]) + (", ..." if len(lost) > 3 else "") if lost else None,
        hint="fetch it again, or wait until the folder is written completely",
    )


def _collect(
    tensors: dict[Key, Tensor], header: Header, path: str, name: str, weight_map: Mapping[str, str] | None
) -> None:
    """Add a file's tensors, each of which must be there for the first time and where the index says."""
    # torch's writer of whole tensors records offsets, too: zeros. Only with an index is each in one file alone.
    if DCP_KEY in header.metadata and (weight_map is None or any(map(any, saved_offsets(header, path).values()))):
        raise NotFoundError(
            "this file holds pieces of tensors (PyTorch's distributed checkpoint), not a model's weights",
            path=path,
            found=f"{DCP_KEY} in its metadata",
            hint="consolidate them with PyTorch's consolidate_safetensors_files_on_every_rank",
        )
    for entry in header.entries:
        if weight_map is not None and weight_map.get(entry.name) != name:
            raise CorruptError(
                "the file holds a tensor that the index does not place there",
                path=path,
                fqn=entry.name,
                expected=weight_map.get(entry.name, "no such tensor"),
                found=name,
            )
        if (entry.name, WEIGHT) in tensors:
            raise CorruptError("the tensor is in two files", path=path, fqn=entry.name)
        extent = Extent.contiguous(path, entry.start, entry.dtype, entry.shape)
        tensors[entry.name, WEIGHT] = Tensor(entry.name, WEIGHT, entry.dtype, entry.shape, Whole(extent))


def weight_files(
    chosen: Mapping[str, Choice], stem: str, metadata: Mapping[str, str], max_size: int | None = None
) -> tuple[list[TargetFile], dict[str, str]]:
    """Files with the chosen tensors, of at most `max_size` bytes of data or one tensor, and each tensor's file by name.

    They are filled in the order given, as huggingface_hub does, and called `stem`, numbered where there are several.
    """
    planned = {name: Planned(name, choice.dtype, choice.tensor.shape) for name, choice in chosen.items()}
    packed = shards(planned.values(), lambda one: one.nbytes, max_size)
    files: list[TargetFile] = []
    for number, members in enumerate(packed, start=1):
        name = f"{stem}-{number:05d}-of-{len(packed):05d}.safetensors" if len(packed) > 1 else f"{stem}.safetensors"
        header, placed = build_header(members, metadata)
        slots = tuple(
            Slot(chosen[one.name].key, whole(one.shape), Extent.contiguous(name, offset, one.dtype, one.shape))
            for one, offset in placed
        )
        files.append(TargetFile(name, len(header) + sum(one.nbytes for one in members), ((0, header),), slots))
    return files, {one.name: file.name for file, members in zip(files, packed, strict=True) for one in members}


def model_weights(chosen: Mapping[str, Choice], max_size: int, **totals: int) -> list[TargetFile]:
    """`model.safetensors` as transformers writes it, or shards and an index with `totals` beside their size."""
    files, weight_map = weight_files(chosen, "model", {"format": "pt"}, max_size)
    if len(files) == 1:
        return files
    size = sum(slot.extent.nbytes for file in files for slot in file.slots)
    return [*files, index_file(INDEX, weight_map, total_size=size, **totals)]


def index_file(name: str, weight_map: Mapping[str, str], **totals: int) -> TargetFile:
    index = {"metadata": totals, "weight_map": weight_map}
    return TargetFile.of_bytes(name, (json.dumps(index, indent=2, sort_keys=True) + "\n").encode())


def shards(tensors: Iterable[_T], size: Callable[[_T], int], max_size: int | None) -> list[list[_T]]:
    """Tensors by the file that they are dealt to, in their order: what is larger than `max_size` has one of its own."""
    result: list[list[_T]] = []
    current: list[_T] = []
    filled = 0
    for tensor in tensors:
        added = size(tensor)
        if max_size is not None and added > max_size:
            result.append([tensor])
            continue
        if max_size is not None and filled + added > max_size:
            result.append(current)
            current, filled = [], 0
        current.append(tensor)
        filled += added
    return [*result, current] if current or not result else result
