"""Content of a new DCP checkpoint.

Modelled on torch 2.13: `default_planner.py`, `filesystem.py`, and `distributed/checkpoint/state_dict.py` for the nested
optimizer state. Tensors are cut along dim 0 like FSDP2 (`torch.chunk`). Uncut items (values, scalars, buffers) go to
the emptiest rank. DCP looks up boxes, not ranks, so any world size can load the result.

`storage_meta` (a random id and the original path) is left out: torch's reader allows it, and torch before 2.3 lacks it.

A tied parameter's second name has its own chunks, placed at the first name's items.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from math import prod
from typing import Any

from ckpt.base.errors import CorruptError
from ckpt.containers.dcp.metadata import METADATA, Path_
from ckpt.containers.torchfile.pickler import Size, StreamedDict, dumps
from ckpt.containers.torchfile.values import Record, StoredTensor
from ckpt.containers.torchfile.write import FromSource, NewTensor, pickled, torch_item
from ckpt.plan.checkpoint import Key, Slot, TargetFile
from ckpt.plan.dtypes import DType
from ckpt.plan.tensors import Box, Extent, Region, Shape, whole

_METADATA = "torch.distributed.checkpoint.metadata"
_FILESYSTEM = "torch.distributed.checkpoint.filesystem"
#: Each item's file, offset and length.
_Places = dict[tuple[str, Shape | None], tuple[str, int, int]]
#: Content shared by items that differ only in slots, or a value's pickle.
_Kind = tuple[DType, Shape, Region] | bytes
_VALUE_BYTES = 64  # assumed value size when balancing the ranks


@dataclass(frozen=True, slots=True)
class SourceTensor:
    """A source tensor, given to one rank if not `cut`.

    `part` returns the content for a box if it is not the plain elements.
    """

    key: Key
    dtype: DType
    shape: Shape
    cut: bool = True
    part: Callable[[Box], Any] | None = None


@dataclass(frozen=True, slots=True)
class Alias:
    """A second name for the tied tensor at `path`."""

    path: Path_


@dataclass(frozen=True, slots=True)
class _Item:
    key: str
    box: Box | None
    root: Any


def dim0_boxes(shape: Shape, num_ranks: int) -> Iterator[Box]:
    """Yield a tensor's boxes by rank, cut like `torch.chunk`. A scalar or an empty tensor is one box."""
    if not prod(shape) or not shape:
        yield whole(shape)
        return
    rows = -(-shape[0] // num_ranks)
    for start in range(0, shape[0], rows):
        stop = min(start + rows, shape[0])
        yield Box((start, *(0,) * (len(shape) - 1)), (stop - start, *shape[1:]))


def flatten(value: Any, path: Path_ = ()) -> Iterator[tuple[Path_, Any]]:
    """Yield a nested state dict's values with their paths, like torch's `traverse_state_dict` (since 2.4).

    Lists are entered only if they hold tensors or dicts. An empty dict yields nothing.
    """
    if isinstance(value, Mapping):
        for name, item in value.items():
            yield from flatten(item, (*path, str(name)))
    elif isinstance(value, list) and not _is_terminal(value):
        for number, item in enumerate(value):
            yield from flatten(item, (*path, number))
    else:
        yield path, value


def _is_terminal(value: list[Any]) -> bool:
    for item in value:
        if isinstance(item, Mapping | NewTensor | StoredTensor | SourceTensor):
            return False
        if isinstance(item, list) and not _is_terminal(item):
            return False
    return True


@dataclass
class Writing:
    """A DCP folder under construction. `prefix` is empty or ends with a slash.

    If not `is_nested`, keys are used unchanged and no state dict paths are recorded.
    """

    num_ranks: int
    prefix: str = ""
    is_nested: bool = True
    paths: dict[str, Path_] = field(default_factory=dict)
    tensors: dict[str, tuple[DType, Shape, list[Box]]] = field(default_factory=dict)
    aliases: dict[str, str] = field(default_factory=dict)
    values: list[tuple[int, _Item]] = field(default_factory=list)
    pieces: list[tuple[int, _Item]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._least = [(0, rank) for rank in range(self.num_ranks)]
        self._alike: dict[_Kind, TargetFile] = {}

    def add(self, path: Path_, value: Any) -> None:
        key = ".".join(map(str, path))
        if key in self.paths:
            raise CorruptError("two training state values have the same name", found=key)
        self.paths[key] = path
        if isinstance(value, SourceTensor):
            self._add_sharded(key, value)
        elif isinstance(value, NewTensor | StoredTensor):
            nbytes = prod(value.shape) * value.dtype.itemsize
            self.tensors[key] = (value.dtype, value.shape, [whole(value.shape)])
            self.pieces.append((self._emptiest(nbytes), _Item(key, whole(value.shape), value)))
        else:
            self.values.append((self._emptiest(_VALUE_BYTES), _Item(key, None, value)))

    def add_alias(self, path: Path_, owner: Path_) -> None:
        key, known = (".".join(map(str, steps)) for steps in (path, owner))
        self.paths[key] = path
        self.tensors[key] = self.tensors[known]
        self.aliases[key] = known

    def add_all(self, leaves: Iterable[tuple[Path_, Any]]) -> None:
        for path, value in leaves:
            if isinstance(value, Alias):
                self.add_alias(path, value.path)
            else:
                self.add(path, value)

    def _add_sharded(self, key: str, tensor: SourceTensor) -> None:
        boxes = list(dim0_boxes(tensor.shape, self.num_ranks if tensor.cut else 1))
        self.tensors[key] = (tensor.dtype, tensor.shape, boxes)
        for number, box in enumerate(boxes):
            plain = NewTensor(tensor.dtype, box.sizes, (FromSource(tensor.key, box),))
            new = plain if tensor.part is None else tensor.part(box)
            rank = number if len(boxes) > 1 else self._emptiest(tensor.dtype.itemsize * box.numel)
            self.pieces.append((rank, _Item(key, box, new)))

    def add_tiles(
        self, key: str, dtype: DType, shape: Shape, tiles: Iterable[tuple[Box, tuple[FromSource, ...]]]
    ) -> None:
        self.paths[key] = (key,)
        boxes = []
        for box, fill in tiles:
            boxes.append(box)
            rank = self._emptiest(dtype.itemsize * box.numel)
            self.pieces.append((rank, _Item(key, box, NewTensor(dtype, box.sizes, fill))))
        self.tensors[key] = (dtype, shape, boxes)

    def _emptiest(self, nbytes: int) -> int:
        filled, rank = self._least[0]
        heapq.heapreplace(self._least, (filled + nbytes, rank))
        return rank

    def files(self) -> list[TargetFile]:
        by_rank: list[list[_Item]] = [[] for _ in range(self.num_ranks)]
        for rank, item in (*self.values, *self.pieces):
            by_rank[rank].append(item)
        self.values, self.pieces = [], []  # free memory early
        places: _Places = {}
        files = [self._file(rank, by_rank.pop(0), places) for rank in range(self.num_ranks)]
        content = dumps(self._metadata(places), protocol=4)
        return [*files, TargetFile.of_bytes(self.prefix + METADATA, content)]

    def _file(self, rank: int, items: list[_Item], places: _Places) -> TargetFile:
        name = f"__{rank}_0.distcp"
        path = self.prefix + name
        literals: list[tuple[int, bytes]] = []
        slots: list[Slot] = []
        at = 0
        for item in items:
            only = _only_fill(item.root)
            part = self._laid_out(item.root, only)
            literals += ((at + offset, data) for offset, data in part.literals)
            for slot in part.slots:
                extent = Extent.contiguous(path, at + slot.extent.offset, slot.extent.dtype, slot.extent.shape)
                key, region = (slot.key, slot.region) if only is None else (only.key, only.region)
                slots.append(Slot(key, region, extent))
            where = None if item.box is None else item.box.offsets
            places[item.key, where] = name, at, part.size
            at += part.size
        return TargetFile(path, at, tuple(literals), tuple(slots))

    def _laid_out(self, root: Any, only: FromSource | None) -> TargetFile:
        """Lay out an item. `only` is its content if it is a single source range."""
        kind: _Kind
        if only is None:
            root = pickled(root)
            if root.storages:
                return torch_item(root)
            kind = root.data
        else:
            region = only.region
            kind = root.dtype, root.shape, whole(region.sizes) if isinstance(region, Box) else region
        alike = self._alike.get(kind)
        if alike is None:
            alike = self._alike[kind] = torch_item(root)
        return alike

    def _metadata(self, places: _Places) -> Record:
        sizes = _Sizes()
        state = {
            "state_dict_metadata": StreamedDict((key, self._described(key, sizes)) for key in self.paths),
            "planner_data": self.paths if self.is_nested else None,
            "storage_data": StreamedDict(item for key in self.paths for item in self._stored(key, places, sizes)),
            "storage_meta": None,
            "version": "1.0.0",
        }
        return Record(_METADATA, "Metadata", state=state)

    def _described(self, key: str, sizes: _Sizes) -> Record:
        if key not in self.tensors:
            return Record(_METADATA, "BytesStorageMetadata")
        return _tensor_metadata(*self.tensors[key], sizes)

    def _stored(self, key: str, places: _Places, sizes: _Sizes) -> Iterator[tuple[Record, Record]]:
        if key not in self.tensors:
            yield _index(key, None, None, sizes), _storage_info(*places[key, None])
            return
        for number, box in enumerate(self.tensors[key][2]):
            place = places[self.aliases.get(key, key), box.offsets]
            yield _index(key, box.offsets, number, sizes), _storage_info(*place)


def _only_fill(root: Any) -> FromSource | None:
    fill = root.fill if isinstance(root, NewTensor) else ()
    return fill[0] if len(fill) == 1 and isinstance(fill[0], FromSource) else None


class _Sizes(dict[Shape, Size]):
    def __missing__(self, shape: Shape) -> Size:
        return self.setdefault(shape, Size(shape))


def _tensor_metadata(dtype: DType, shape: Shape, boxes: list[Box], sizes: _Sizes) -> Record:
    layout = Record("torch.serialization", "_get_layout", ("torch.strided",))
    encoding = Record(_METADATA, "_MEM_FORMAT_ENCODING", (0,))  # contiguous
    properties = Record(_METADATA, "TensorProperties", state=(dtype, layout, False, encoding, False))
    chunks = [
        Record(_METADATA, "ChunkStorageMetadata", state={"offsets": sizes[box.offsets], "sizes": sizes[box.sizes]})
        for box in boxes
    ]
    return Record(
        _METADATA, "TensorStorageMetadata", state={"properties": properties, "size": sizes[shape], "chunks": chunks}
    )


def _storage_info(name: str, offset: int, length: int) -> Record:
    info = {"relative_path": name, "offset": offset, "length": length}
    return Record(_FILESYSTEM, "_StorageInfo", state=info)


def _index(key: str, offset: Shape | None, number: int | None, sizes: _Sizes) -> Record:
    where = {} if offset is None else {"offset": sizes[offset]}
    return Record(_METADATA, "MetadataIndex", state={"fqn": key, "index": number, **where})
