"""Folders of safetensors files with whole tensors, optionally with an index from tensor to file.

Files are filled and numbered like huggingface_hub's (`serialization/_base.py`). The index is transformers'
`model.safetensors.index.json`; MLX writes it too.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from ckpt.base.errors import CorruptError, IncompleteError, NotFoundError, UnsafeError
from ckpt.base.text import pluralize
from ckpt.containers.dcp.shards import DCP_KEY, saved_offsets
from ckpt.containers.safetensors import Header, Planned, build_header, read_header
from ckpt.containers.sources import Sources
from ckpt.move.files import confined
from ckpt.plan.checkpoint import WEIGHT, Key, Slot, TargetFile
from ckpt.plan.precision import Choice
from ckpt.plan.tensors import Extent, Tensor, Whole, whole

_T = TypeVar("_T")

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
#: Not `shard-00001-model-00001-of-00001`: PyTorch's sharded writer has a set per rank.
SHARD = re.compile(r"(?P<stem>(?!shard-).+)-(?P<number>\d{5,})-of-(?P<count>\d{5,})(?P<suffix>\.safetensors|\.bin)")
MAX_INDEX = 128 << 20


@dataclass(frozen=True)
class Index:
    name: str
    weight_map: Mapping[str, str]
    total_size: object

    def size_notes(self, tensors: Iterable[Tensor]) -> list[str]:
        """Return a note if total_size is wrong: older tools counted elements, or tied tensors twice."""
        if self.total_size is None or self.total_size == (total := sum(tensor.nbytes for tensor in tensors)):
            return []
        return [f"{self.name}: total_size says {self.total_size!r} bytes, the tensors have {total}"]


def parse_index(
    index: Any, path: Path, what: str = "safetensors", suffixes: tuple[str, ...] = (".safetensors",)
) -> Index:
    """Raise CorruptError if the index is malformed, UnsafeError if it names a file outside its folder."""
    weight_map = index.get("weight_map") if isinstance(index, dict) else None
    if not isinstance(weight_map, dict) or not weight_map:
        raise CorruptError("the index has no weight_map", path=path)
    checked: set[str] = set()
    for fqn, name in weight_map.items():
        if not isinstance(name, str):
            raise CorruptError("the index does not give a file name", path=path, fqn=fqn, found=repr(name))
        if name in checked:
            continue
        checked.add(name)
        if not name or "\0" in name or os.path.isabs(name) or ".." in Path(name).parts:
            raise UnsafeError("the index names a file outside its folder", path=path, fqn=fqn, found=repr(name))
        if not name.endswith(suffixes) or not name.isprintable():
            raise CorruptError(f"a file in the index is not a {what}", path=path, fqn=fqn, found=repr(name))
    metadata = index.get("metadata")
    total_size = metadata.get("total_size") if isinstance(metadata, dict) else None
    return Index(path.name, weight_map, total_size)


def is_shard_set(names: Iterable[str]) -> bool:
    """Return True if all names are one model's shards, maybe incomplete."""
    found = [SHARD.fullmatch(name) for name in names]
    return None not in found and len({(one["stem"], one["count"], one["suffix"]) for one in found if one}) == 1


def index_of(shard: str) -> str | None:
    found = SHARD.fullmatch(shard)
    return f"{found['stem']}{found['suffix']}.index.json" if found else None


def _variants_index(shard: str) -> str | None:
    """Return the index's name if the stem ends in a variant: `model.fp16-00001-of-00002.safetensors`.

    transformers/modeling_utils.py and diffusers/utils/hub_utils.py, `_add_variant`.
    """
    found = SHARD.fullmatch(shard)
    stem, _, variant = found["stem"].rpartition(".") if found else ("", "", "")
    return f"{stem}{found['suffix']}.index.{variant}.json" if found and stem else None


def missing_index(shard: Path) -> str | None:
    """Return the name of the index that a shard lacks."""
    known = [name for name in (index_of(shard.name), _variants_index(shard.name)) if name]
    return known[0] if known and not any(shard.with_name(name).exists() for name in known) else None


def check_shard_set(names: Iterable[str], folder: Path) -> None:
    """Raise IncompleteError if shards without an index have gaps in their numbers."""
    found = [match for name in names if (match := SHARD.fullmatch(name))]
    if not found:
        return
    count, numbers = int(found[0]["count"]), {int(match["number"]) for match in found}
    missing = next((number for number in range(1, count + 1) if number not in numbers), None)
    if missing is not None or len(numbers) != count:
        raise IncompleteError(
            "the set of shards is not complete",
            path=folder,
            expected=f"{pluralize(count, 'shard')}, from 1 on",
            found=pluralize(len(found), "shard") + (f", number {missing} is missing" if missing is not None else ""),
        )


def index_is_missing(shard: str) -> str:
    return f"{index_of(shard)} is missing; every shard is here, but transformers needs the index"


def read_weights(
    folder: Path, names: Iterable[str], weight_map: Mapping[str, str] | None, sources: Sources
) -> dict[Key, Tensor]:
    """Return the tensors in safetensors files, with the role `weight`, and add the files to `sources`.

    Raise CorruptError for a missing file, a duplicate tensor, or a tensor in another file than `weight_map` says.
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
            raise CorruptError("the index names a tensor missing from its file", path=folder / name, fqn=fqn)
    return tensors


def missing_file(file: Path, weight_map: Mapping[str, str] | None) -> CorruptError:
    lost = [fqn for fqn, name in (weight_map or {}).items() if name == file.name]
    return CorruptError(
        "a file of weights is missing",
        path=file,
        expected=f"a file with {pluralize(len(lost), 'tensor')}" if lost else "a file",
        found="no file",
        fqn=", ".join(lost[:3]) + (", ..." if len(lost) > 3 else "") if lost else None,
        hint="fetch it again, or wait until the folder is written completely",
    )


def _collect(
    tensors: dict[Key, Tensor], header: Header, path: str, name: str, weight_map: Mapping[str, str] | None
) -> None:
    # torch writes zero offsets for whole tensors too. But only an index shows that each tensor is in one file.
    if DCP_KEY in header.metadata and (weight_map is None or any(map(any, saved_offsets(header, path).values()))):
        raise NotFoundError(
            "this file holds pieces of tensors (PyTorch's distributed checkpoint), not a model's weights",
            path=path,
            found=f"{DCP_KEY} in its metadata",
            hint="consolidate them with PyTorch's consolidate_safetensors_files_on_every_rank",
        )
    for fqn, dtype, shape, start, _ in header.entries:
        if weight_map is not None and weight_map.get(fqn) != name:
            raise CorruptError(
                "the file has a tensor missing from the index",
                path=path,
                fqn=fqn,
                expected=weight_map.get(fqn, "no such tensor"),
                found=name,
            )
        key = fqn, WEIGHT
        if key in tensors:
            raise CorruptError("the tensor is in two files", path=path, fqn=fqn)
        tensors[key] = Tensor(fqn, WEIGHT, dtype, shape, Whole(Extent.contiguous(path, start, dtype, shape)))


def weight_files(
    chosen: Mapping[str, Choice], stem: str, metadata: Mapping[str, str], max_size: int | None = None
) -> tuple[list[TargetFile], dict[str, str]]:
    """Return files with at most `max_size` bytes of data, and each tensor's file name.

    A single file is named `stem`; several are numbered.
    """
    planned = {name: Planned(name, choice.dtype, choice.tensor.shape) for name, choice in chosen.items()}
    packed = shards(planned.values(), lambda one: one.nbytes, max_size)
    files: list[TargetFile] = []
    for number, members in enumerate(packed, start=1):
        name = f"{stem}-{number:05d}-of-{len(packed):05d}.safetensors" if len(packed) > 1 else f"{stem}.safetensors"
        header, placed = build_header(members, metadata)
        slots = tuple(
            Slot(chosen[fqn].key, whole(shape), Extent.contiguous(name, offset, dtype, shape))
            for (fqn, dtype, shape), offset in placed
        )
        size = slots[-1].extent.end if slots else len(header)
        files.append(TargetFile(name, size, ((0, header),), slots))
    return files, {one.name: file.name for file, members in zip(files, packed, strict=True) for one in members}


def model_weights(chosen: Mapping[str, Choice], max_size: int, stem: str = "model", **totals: int) -> list[TargetFile]:
    """Return one file named `stem`, or shards and an index with `totals`."""
    files, weight_map = weight_files(chosen, stem, {"format": "pt"}, max_size)
    if len(files) == 1:
        return files
    size = sum(slot.extent.nbytes for file in files for slot in file.slots)
    return [*files, index_file(f"{stem}.safetensors.index.json", weight_map, total_size=size, **totals)]


def index_file(name: str, weight_map: Mapping[str, str], **totals: int) -> TargetFile:
    index = {"metadata": totals, "weight_map": weight_map}
    return TargetFile.of_bytes(name, (json.dumps(index, indent=2, sort_keys=True) + "\n").encode())


def shards(tensors: Iterable[_T], size: Callable[[_T], int], max_size: int | None) -> list[list[_T]]:
    """Group tensors into shards, in their order. A tensor larger than `max_size` gets its own shard."""
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
