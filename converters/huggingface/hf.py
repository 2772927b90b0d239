"""Hugging Face model folders: `model.safetensors`, or shards with `model.safetensors.index.json`.

Format facts: safetensors 0.8.0 (see `safetensors_file`); names of files, index and sharding from transformers
5.23 (`modeling_utils.py`, `save_pretrained`) and huggingface_hub (`serialization/_base.py`).  Written bytes
are the same from run to run, and per file those of `safetensors.torch.save_file`.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from ckpt.containers.safetensors import Header, Planned, build_header, read_header
from ckpt.containers.sources import Sources
from ckpt.errors import CorruptError, NotFoundError, UnsafeError, UsageError
from ckpt.move.files import confined, translate_os_errors
from ckpt.plan.checkpoint import (
    BUFFER,
    HUB,
    OWN,
    WEIGHT,
    Checkpoint,
    Key,
    Layout,
    ReadRequest,
    Slot,
    Target,
    TargetFile,
)
from ckpt.plan.precision import CAST_SOURCES, Choice, choices, describe, num_elements
from ckpt.plan.tensors import Extent, Tensor, Whole, whole
from ckpt.run_folder.carried import model_files
from ckpt.run_folder.companions import (
    CONFIG,
    read_config,
    read_json,
)
from ckpt.run_folder.left_out import run_files_left_out, training_left_out
from converters.names.transformers.ties import kept_names, tied_names
from converters.quantized import parts

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
METADATA = {"format": "pt"}

#: PyTorch's distributed checkpoint may write its shards as safetensors; each then holds pieces of tensors.
DCP_KEY = "DCP_SHARDING_INFO"

_SHARD = re.compile(r"(?P<stem>.+)-(?P<number>\d{5,})-of-(?P<count>\d{5,})\.safetensors")
_ADAPTER = re.compile(r"adapter_model.*\.safetensors")
_MAX_INDEX = 128 << 20


class HuggingFace:
    name = "hf"
    title = "Hugging Face safetensors"
    reads = True
    writes = True
    carries_optimizer = False
    namespace: str | None = HUB

    # -- find ------------------------------------------------------------------------------------------------

    def find(self, path: Path, tag: str | None) -> Path | None:
        """A folder with weights (`tag` names one inside it), an index, or a safetensors file of its own."""
        if path.is_file():
            named = path.name.endswith((".safetensors", ".safetensors.index.json")) and not _ADAPTER.match(path.name)
            return path if named else None
        folder = path if tag is None else confined(path, tag)
        return folder if folder.is_dir() and _weights(folder) else None

    # -- read ------------------------------------------------------------------------------------------------

    def read(self, path: Path, request: ReadRequest) -> Checkpoint:
        """Describe a model folder's weights; all have the role `weight`, as files tell no buffers apart."""
        folder = path.parent if path.is_file() else path
        folders = tuple(p for p in (request.config, folder) if p is not None)
        config = read_config(folders)
        index, names, notes = _weight_files(path, folder)
        weight_map = index.weight_map if index else None
        tensors: dict[Key, Tensor] = {}
        sources = Sources()
        for name in names:
            file = confined(folder, name)
            if not file.exists():
                raise _missing(file, weight_map)
            sources.add(file)
            _collect(tensors, read_header(file), str(file), name, weight_map)
        if index is not None:
            _check_all_found(tensors, index.weight_map, folder)
            notes += index.size_notes(sum(tensor.nbytes for tensor in tensors.values()))
        is_hub = config is not None and "model_type" in config
        return Checkpoint(
            path=str(path),
            format=self.name,
            tensors=tensors,
            files=sources.files,
            framework="transformers" if is_hub else None,
            namespace=HUB if is_hub else OWN,
            ties=tied_names(config, {fqn for fqn, _ in tensors}) if config else {},
            config=config,
            folders=tuple(str(p) for p in folders),
            notes=tuple(notes),
        )

    # -- lay out ---------------------------------------------------------------------------------------------

    def lay_out(self, checkpoint: Checkpoint, layout: Layout) -> Target:
        """Weights only: one tensor per parameter and buffer, as `ckpt.plan.precision` chooses them."""
        if layout.world_size is not None:
            raise UsageError("a Hugging Face folder has no ranks", found=f"--world-size {layout.world_size}")
        names = kept_names(checkpoint)
        chosen = {names.get(fqn, fqn): choice for fqn, choice in choices(checkpoint, layout.dtype).items()}
        files = _weight_targets(chosen, layout.max_shard_size)
        quantized = parts(chosen)
        plain = [choice for name, choice in chosen.items() if name not in quantized]
        beside, notes = model_files(checkpoint, layout.dtype, num_elements(plain), plain=_is_plain(chosen))
        if all(file.name != CONFIG for file in beside):
            notes = ["no config.json was found, so none is written; --config names the folder that has it"]
        notes = (
            describe(chosen, checkpoint, layout.dtype) + _tie_notes(checkpoint, names) + _adapter_notes(chosen) + notes
        )
        return Target(
            files=(*files, *beside),
            dropped=tuple(_dropped(checkpoint)),
            notes=tuple(notes),
        )


HF = HuggingFace()


# -- reading -------------------------------------------------------------------------------------------------


def _weights(folder: Path) -> list[str] | str | None:
    """The weights of a folder: the name of its one file or index, or the names of a set without an index."""
    for name in (SINGLE, INDEX):
        if (folder / name).is_file() or (folder / name).is_symlink():
            return name
    with translate_os_errors(folder):
        names = sorted(p.name for p in folder.iterdir() if p.name.endswith((".safetensors", ".safetensors.index.json")))
    indexes = [name for name in names if name.endswith(".index.json")]
    if len(indexes) == 1:
        return indexes[0]
    if (folder / "adapter_config.json").exists():
        return None  # a PEFT adapter: not a model
    names = [name for name in names if name not in indexes and not _ADAPTER.match(name)]
    if len(names) == 1 and not names[0].startswith("shard-"):
        return names
    return names if _is_one_set(names) else None


def _is_one_set(names: list[str]) -> bool:
    """Whether the names are shards of one set.  Gaps in it are an error later on, not another format."""
    shards = [_SHARD.fullmatch(name) for name in names]
    # `shard-00001-model-00001-of-00001` is PyTorch's sharded writer, one set of files per rank
    return (
        bool(shards)
        and len({(m["stem"], m["count"]) if m else None for m in shards}) == 1
        and all(m and not m["stem"].startswith("shard-") for m in shards)
    )


@dataclass(frozen=True)
class _Index:
    """`model.safetensors.index.json`: the file of each tensor, and what it says of their size."""

    name: str
    weight_map: Mapping[str, str]
    total_size: object

    def size_notes(self, total: int) -> list[str]:
        """A wrong total_size is worth a note only: older tools counted elements, or tied tensors twice."""
        if self.total_size is None or self.total_size == total:
            return []
        return [f"{self.name}: total_size says {self.total_size!r} bytes, the tensors have {total}"]


def _weight_files(path: Path, folder: Path) -> tuple[_Index | None, list[str], list[str]]:
    """The index where there is one, the names of the files, and notes."""
    found = path.name if path.is_file() else _weights(folder)
    if found is None:
        adapter = (folder / "adapter_config.json").exists()
        raise NotFoundError(
            "there are no safetensors weights of a model here",
            path=path,
            hint="an adapter alone is no model; see `ckpt merge-lora`" if adapter else None,
        )
    if isinstance(found, list):
        _check_set(found, folder)
        return None, found, []
    if not found.endswith(".json"):
        both = not path.is_file() and (folder / INDEX).exists()
        notes = [f"{SINGLE} and {INDEX} both stand in the folder; {SINGLE} is read, as transformers does"]
        return None, [found], notes if both else []
    index = _read_index(confined(folder, found))
    return index, sorted(set(index.weight_map.values())), []


def _check_set(names: list[str], folder: Path) -> None:
    first = _SHARD.fullmatch(names[0])
    if first is None:
        return
    count = int(first["count"])
    numbers = {int(m["number"]) for name in names if (m := _SHARD.fullmatch(name))}
    missing = next((n for n in range(1, count + 1) if n not in numbers), None)
    if missing is not None or len(numbers) != count:
        raise CorruptError(
            "the set of shards is not complete",
            path=folder,
            expected=f"{count} shards, from 1 on",
            found=f"{len(names)} shards" + (f", number {missing} is missing" if missing is not None else ""),
        )


def _read_index(path: Path) -> _Index:
    index = read_json(path, unique=True, max_bytes=_MAX_INDEX)
    weight_map = index.get("weight_map") if isinstance(index, dict) else None
    if not isinstance(weight_map, dict) or not weight_map:
        raise CorruptError("the index has no weight_map", path=path)
    for fqn, name in weight_map.items():
        if not isinstance(name, str):
            raise CorruptError("the index does not give a file name", path=path, fqn=fqn, found=repr(name))
        if not name or "\0" in name or os.path.isabs(name) or ".." in Path(name).parts:
            raise UnsafeError("the index names a file outside its folder", path=path, fqn=fqn, found=repr(name))
        if not name.endswith(".safetensors") or not name.isprintable():
            raise CorruptError("the index names a file that is no safetensors", path=path, fqn=fqn, found=repr(name))
    metadata = index.get("metadata")
    total_size = metadata.get("total_size") if isinstance(metadata, dict) else None
    return _Index(path.name, weight_map, total_size)


def _missing(file: Path, weight_map: Mapping[str, str] | None) -> CorruptError:
    lost = [fqn for fqn, name in (weight_map or {}).items() if name == file.name]
    return CorruptError(
        "a file of weights is missing",
        path=file,
        expected=f"a file with {len(lost)} tensors" if lost else "a file",
        found="no file",
        fqn=", ".join(lost[:3]) + (", ..." if len(lost) > 3 else "") if lost else None,
        hint="fetch it again, or wait until the folder is written completely",
    )


def _collect(
    tensors: dict[Key, Tensor], header: Header, path: str, name: str, weight_map: Mapping[str, str] | None
) -> None:
    """Add a file's tensors, each of which must be there for the first time and where the index says."""
    if DCP_KEY in header.metadata:
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
            raise CorruptError("the tensor stands in two files", path=path, fqn=entry.name)
        extent = Extent.contiguous(path, entry.start, entry.dtype, entry.shape)
        tensors[entry.name, WEIGHT] = Tensor(entry.name, WEIGHT, entry.dtype, entry.shape, Whole(extent))


def _check_all_found(tensors: Mapping[Key, Tensor], weight_map: Mapping[str, str], folder: Path) -> None:
    for fqn, name in weight_map.items():
        if (fqn, WEIGHT) not in tensors:
            raise CorruptError("the index names a tensor that its file does not hold", path=folder / name, fqn=fqn)


# -- writing -------------------------------------------------------------------------------------------------


def natural_key(name: str) -> list[tuple[int, str, int]]:
    """Sorts `layers.2` before `layers.10`, as transformers does (`dot_natural_key`)."""
    return [_natural_part(part) for part in name.split(".")]


def _natural_part(part: str) -> tuple[int, str, int]:
    text = part.rstrip("0123456789")
    digits = part[len(text) :]
    number = int(digits) if 0 < len(digits) < 1000 else -1
    return (1, text, number) if text else (0, "", number)


def shards(sizes: Mapping[str, int], max_size: int) -> list[list[str]]:
    """Greedy packing in the given order, as huggingface_hub does; a tensor above the limit stands alone."""
    result: list[list[str]] = []
    current: list[str] = []
    filled = 0
    for name, size in sizes.items():
        if size > max_size:
            result.append([name])
            continue
        if filled + size > max_size:
            result.append(current)
            current, filled = [], 0
        current.append(name)
        filled += size
    return [*result, current] if current or not result else result


def _weight_targets(chosen: Mapping[str, Choice], max_size: int) -> list[TargetFile]:
    names = sorted(chosen, key=natural_key)
    planned = {name: Planned(name, chosen[name].dtype, chosen[name].tensor.shape) for name in names}
    packed = shards({name: planned[name].nbytes for name in names}, max_size)
    if len(packed) == 1:
        return [_weight_target(SINGLE, packed[0], planned, chosen)]
    files, weight_map = [], {}
    for number, members in enumerate(packed, start=1):
        name = f"model-{number:05d}-of-{len(packed):05d}.safetensors"
        files.append(_weight_target(name, members, planned, chosen))
        weight_map.update(dict.fromkeys(members, name))
    parameters = sum(choice.tensor.numel for choice in chosen.values() if choice.tensor.role != BUFFER)
    index = {
        "metadata": {"total_parameters": parameters, "total_size": sum(p.nbytes for p in planned.values())},
        "weight_map": weight_map,
    }
    content = (json.dumps(index, indent=2, sort_keys=True) + "\n").encode()
    return [*files, TargetFile.of_bytes(INDEX, content)]


def _weight_target(
    name: str, members: Iterable[str], planned: Mapping[str, Planned], chosen: Mapping[str, Choice]
) -> TargetFile:
    header, placed = build_header((planned[member] for member in members), METADATA)
    slots = []
    end = len(header)
    for tensor, offset in placed:
        extent = Extent.contiguous(name, offset, tensor.dtype, tensor.shape)
        slots.append(Slot(chosen[tensor.name].key, whole(tensor.shape), extent))
        end = offset + tensor.nbytes
    return TargetFile(name, end, ((0, header),), tuple(slots))


def _is_plain(chosen: Mapping[str, Choice]) -> bool:
    return all(choice.dtype in CAST_SOURCES for choice in chosen.values() if choice.tensor.role != BUFFER)


def _tie_notes(checkpoint: Checkpoint, names: Mapping[str, str]) -> list[str]:
    if not checkpoint.ties:
        return []
    groups: dict[str, list[str]] = {}
    for alias, owner in checkpoint.ties.items():
        kept = names.get(owner, owner)
        groups.setdefault(kept, []).append(owner if alias == kept else alias)
    return [f"tied: written once as {kept}, not again as {', '.join(sorted(g))}" for kept, g in groups.items()]


def _adapter_notes(chosen: Iterable[str]) -> list[str]:
    """A model that PEFT wraps is not one that from_pretrained loads."""
    if not any(fqn.startswith("base_model.model.") for fqn in chosen):
        return []
    return [
        "this is a model with PEFT adapters: its tensors keep the names they have in training (base_model.model. and "
        "so on), under which from_pretrained finds neither a model nor an adapter"
    ]


def _dropped(checkpoint: Checkpoint) -> list[str]:
    """What safetensors weights have no place for, a line per kind."""
    return [*training_left_out(checkpoint), *run_files_left_out(checkpoint)]
