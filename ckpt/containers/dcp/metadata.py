"""DCP's `.metadata`: the tensors and their chunks' places.

Facts from torch's `distributed/checkpoint/metadata.py` and `filesystem.py` (2.1, 2.3 and 2.13). The file is a plain
pickle with a `Metadata` object:

    state_dict_metadata   key -> TensorStorageMetadata(properties, size, chunks) or BytesStorageMetadata
    planner_data          key -> the value's path in the nested state dict, a tuple with names and list indices;
                          None or missing if the state dict was not flattened
    storage_data          MetadataIndex(fqn, offset, index) -> _StorageInfo(relative_path, offset, length); the index is
                          only a hint, and the offset is None for plain values
    storage_meta          since 2.3: the original path, and a random id
    version               since 2.9

`_StorageInfo.transform_descriptors` (since 2.7) exists only if a stream was transformed (for example compressed). If
saved without collectives (since 2.9), each rank writes a `__{rank}.metadata` with only its own part.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from operator import eq
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn

from ckpt.base.errors import CkptError, CorruptError, IncompleteError, NotFoundError
from ckpt.base.text import pluralize
from ckpt.containers.dcp.runs import Columns, IrregularError, Runs
from ckpt.containers.torchfile.unpickle import load_pickle
from ckpt.containers.torchfile.values import Record
from ckpt.move.files import confined
from ckpt.move.listing import names_in
from ckpt.plan.dtypes import DType
from ckpt.plan.tensors import Box, Shape

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

METADATA = ".metadata"
PER_RANK = re.compile(r"__(\d+)\.metadata")
DATA_FILE = re.compile(r"__(\d+)_\d+\.distcp")

Path_ = tuple[str | int, ...]

#: A tensor's dtype, shape, chunks, and the minimum bytes per chunk item.
_Described = tuple[DType, Shape, dict[Box, float]]

_MAX_DIMS = 64
_MAX_DEPTH = 32
_MODULE = "torch.distributed.checkpoint."
_TENSOR = "TensorStorageMetadata"
_MANY = 50_000  # minimum keys for numpy


class ItemPlace(NamedTuple):
    path: str
    offset: int
    length: int


@dataclass(slots=True)
class Places:
    """Places of items, in columns because there may be millions."""

    paths: list[str] = field(default_factory=list)
    offsets: list[int] = field(default_factory=list)
    lengths: list[int] = field(default_factory=list)

    def __getitem__(self, row: int) -> ItemPlace:
        return ItemPlace(self.paths[row], self.offsets[row], self.lengths[row])

    def __iadd__(self, other: Places) -> Places:
        self.paths += other.paths
        self.offsets += other.offsets
        self.lengths += other.lengths
        return self

    def by_file(self) -> Iterator[tuple[str, list[int]]]:
        found: dict[str, list[int]] = {}
        for row, path in enumerate(self.paths):
            found.setdefault(path, []).append(row)
        for path, rows in sorted(found.items()):
            rows.sort(key=self.offsets.__getitem__)
            yield path, rows


@dataclass(slots=True)
class TensorEntry:
    key: str
    dtype: DType
    shape: Shape
    chunks: dict[Box, int]
    replicas: list[tuple[Box, int]] = field(default_factory=list)


@dataclass(slots=True)
class Metadata:
    """Content of one or several metadata files. Values and tensors are numbered from 0.

    For each number, `keys` holds its key, `steps` its path, and `rows` its item's row (-1 for a tensor). `order` lists
    all numbers in state dict order if known.
    """

    path: str
    keys: list[str]
    steps: list[Path_]
    rows: list[int]
    entries: dict[int, TensorEntry]
    order: list[int]
    is_nested: bool
    places: Places

    def chunks(self, number: int) -> dict[Box, ItemPlace]:
        return {box: self.places[row] for box, row in self.entries[number].chunks.items()}

    def paths(self) -> Iterator[tuple[int, str, Path_]]:
        return ((number, self.keys[number], self.steps[number]) for number in self.order)

    def owners(self) -> tuple[list[int | None], list[Box | None], set[int]]:
        """Return each row's owner (None: an empty item) and box (None: a value), and all replica rows."""
        numbers: list[int | None] = [None] * len(self.places.paths)
        boxes: list[Box | None] = [None] * len(numbers)
        replicas = set()
        for number, row in enumerate(self.rows):
            if row >= 0:
                numbers[row] = number
        for number, entry in self.entries.items():
            for box, row in entry.chunks.items():
                numbers[row], boxes[row] = number, box
            for box, row in entry.replicas:
                numbers[row], boxes[row] = number, box
                replicas.add(row)
        return numbers, boxes, replicas


def read_metadata(folder: Path, classes: tuple[str, ...] = (f"{_MODULE}metadata.Metadata",)) -> Metadata:
    """Return a folder's metadata: its `.metadata`, or the ranks' merged files.

    `classes` are allowed for the metadata object. Raise UnsafeError if the pickle names a forbidden object or a path
    leaves the folder, CorruptError if the metadata contradicts itself, NotFoundError if a feature is not supported.
    """
    path = folder / METADATA
    if path.exists():
        return _read_metadata(folder, METADATA, classes)
    names = per_rank_names(folder)
    for rank, name in enumerate(names):
        if name != f"__{rank}{METADATA}":
            raise CorruptError(
                "the metadata of a rank is missing", path=folder, rank=rank, expected=f"__{rank}{METADATA}", found=name
            )
    if not names:
        what = "the metadata is missing: `.metadata` is a hidden file that `cp *` skips"
        hint = f"copy the whole folder, for example `cp -r {folder.name} TO`; if the source has no {METADATA}, "
        raise IncompleteError(what, path=path, expected=METADATA, hint=f"{hint}the save was not finished")
    merged = _read_metadata(folder, names[0], classes)
    numbers = {key: number for number, key in enumerate(merged.keys)}
    for name in names[1:]:
        _merge(merged, numbers, _read_metadata(folder, name, classes))
    return merged


def per_rank_names(folder: Path) -> list[str]:
    found = [(int(match[1]), name) for name in names_in(folder) if (match := PER_RANK.fullmatch(name))]
    return [name for _, name in sorted(found)]


def _read_metadata(folder: Path, name: str, classes: tuple[str, ...]) -> Metadata:
    path = str(confined(folder, name))
    runs = Runs()
    try:
        return _Parser(folder, path).parse(runs.load(path), classes, runs)
    except (IrregularError, CkptError):  # the slow reader reports errors with their position
        return _Parser(folder, path).parse(load_pickle(path), classes, Runs())


def _merge(first: Metadata, numbers: dict[str, int], other: Metadata) -> None:
    """`numbers` maps keys to numbers in `first`. A repeated chunk is a replica. The first rank's plain value wins."""
    before = len(first.places.paths)
    first.places += other.places
    for number, key, steps in other.paths():
        row, entry = other.rows[number], other.entries.get(number)
        if entry is not None:
            entry.chunks = {box: before + row for box, row in entry.chunks.items()}
        mine = numbers.setdefault(key, len(first.keys))
        if mine == len(first.keys):
            first.keys.append(key)
            first.steps.append(steps)
            first.rows.append(-1 if row < 0 else before + row)
            first.order.append(mine)
            if entry is not None:
                first.entries[mine] = entry
            continue
        _add_chunks(first.entries.get(mine), entry, other.path, key)
    first.is_nested = first.is_nested or other.is_nested


def _add_chunks(mine: TensorEntry | None, other: TensorEntry | None, path: str, key: str) -> None:
    said = [f"{entry.dtype} of shape {list(entry.shape)}" if entry else "no tensor" for entry in (mine, other)]
    if said[0] != said[1]:
        raise CorruptError(
            "two ranks describe a tensor in different ways", path=path, fqn=key, expected=said[0], found=said[1]
        )
    if mine is not None and other is not None:
        for box, row in other.chunks.items():
            if mine.chunks.setdefault(box, row) != row:
                mine.replicas.append((box, row))


class _Parser:
    def __init__(self, folder: Path, path: str) -> None:
        self.folder = folder
        self.path = path
        self.files: dict[str, str] = {}
        self.places = Places()
        self.known: dict[int, _Described] = {}  # by record id

    def fault(self, what: str, key: str | None = None, expected: object = None, found: object = None) -> NoReturn:
        raise CorruptError(what, path=self.path, fqn=key, expected=expected, found=found)

    def parse(self, root: Any, classes: tuple[str, ...], runs: Runs) -> Metadata:
        """Raise IrregularError if `runs` holds unexpected content."""
        if not isinstance(root, Record) or root.typename not in classes:
            kind = root.typename if isinstance(root, Record) else type(root).__name__
            if kind.startswith("megatron."):
                raise NotFoundError("this is a Megatron checkpoint, not a plain torch checkpoint", path=self.path)
            self.fault("this is not torch distributed checkpoint metadata", expected="Metadata", found=kind)
        described = _columns(root.get("state_dict_metadata"))
        if described is None:
            self.fault("the metadata lists no tensors", expected="state_dict_metadata")
        keys, descriptions = described
        if odd := {*map(type, keys)} - {str}:
            self.fault("a metadata key is not text", found=odd.pop().__name__)
        numbers = _Numbers(keys)
        ids = [*map(id, descriptions)]  # equal descriptions are mostly one object
        kinds = {name: _kind_of_object(what) for name, what in dict(zip(ids, descriptions, strict=True)).items()}
        if strange := set(kinds.values()) - {_TENSOR, "BytesStorageMetadata"}:
            key, kind = next((key, kinds[name]) for key, name in zip(keys, ids, strict=True) if kinds[name] in strange)
            self.fault("the metadata has an entry of unknown type (neither tensor nor value)", key, found=kind)
        rows, chunks = self._rows(root.get("storage_data"), runs, numbers)
        tensors = [number for number, name in enumerate(ids) if kinds[name] == _TENSOR]
        entries = {
            number: self._entry(number, keys[number], self._described(keys[number], descriptions[number]), chunks)
            for number in tensors
        }
        for number in tensors:
            rows[number] = -1
        if rows.count(-1) > len(tensors):
            without = next(number for number, row in enumerate(rows) if row < 0 and number not in entries)
            self.fault("a part is stored nowhere", keys[without], expected="a place for the part")
        steps, order = self._paths(_columns(root.get("planner_data")), keys, numbers)
        is_nested = steps is not None
        return Metadata(
            self.path, keys, steps or [(key,) for key in keys], rows, entries, order, is_nested, self.places
        )

    # -- storage -------------------------------------------------------------------------------------------------

    def _rows(self, stored: Any, runs: Runs, numbers: _Numbers) -> tuple[list[int], dict[tuple[int, Shape], int]]:
        if not isinstance(stored, Mapping):
            self.fault("the metadata has no storage locations", expected="storage_data")
        self._take_places(runs)
        rows = [-1] * len(numbers.keys)
        chunks: dict[tuple[int, Shape], int] = {}
        for row, (number, where) in enumerate(zip(numbers.of(runs.fqns), runs.wheres, strict=True)):
            if number < 0:
                raise IrregularError
            if where is None:
                rows[number] = row
            else:
                chunks[number, where] = row
        if len(runs.fqns) != len(chunks) + len(rows) - rows.count(-1):
            raise IrregularError
        fqns = []
        for index, info in stored.items():
            if not isinstance(index, Record) or index.name != "MetadataIndex" or not isinstance(info, Record):
                self.fault("the storage data is not from torch's file writer")
            fqns.append(index.get("fqn"))
            if type(fqns[-1]) is not str:
                self.fault("a storage data key is not text")
        unknown = set()
        for fqn, number, (index, info) in zip(fqns, numbers.of(fqns), stored.items(), strict=True):
            row, offset = len(self.places.paths), index.get("offset")
            where = None if offset is None else self._numbers(offset, fqn, "an offset")
            if number < 0:
                is_known = (fqn, where) in unknown
                unknown.add((fqn, where))
            elif where is None:
                is_known = rows[number] >= 0
                rows[number] = row
            else:
                is_known = chunks.setdefault((number, where), row) != row
            if is_known:
                at = fqn if where is None else (fqn, where)
                self.fault("the storage data have two places for one part", fqn, found=str(at))
            self._add(fqn, info)
        return rows, chunks

    def _take_places(self, runs: Runs) -> None:
        """Raise IrregularError if `_add` would reject a place."""
        if not runs.fqns:
            return
        wheres = dict(zip(map(id, runs.wheres), runs.wheres, strict=True))
        for where in wheres.values():
            if where is not None and self._numbers(where, runs.fqns[0], "an offset") is not where:
                raise IrregularError
        if min(runs.offsets) < 0 or min(runs.lengths) < 0:
            raise IrregularError
        self.files = {name: str(confined(self.folder, name)) for name in set(runs.files)}
        self.places = Places([self.files[name] for name in runs.files], runs.offsets, runs.lengths)

    def _add(self, key: str, info: Record) -> None:
        name, offset, length = info.get("relative_path"), info.get("offset"), info.get("length")
        if transforms := info.get("transform_descriptors"):
            raise NotFoundError(
                "the data was transformed during the save (compressed, for example); this is not supported",
                path=self.path,
                fqn=key,
                found=", ".join(map(str, transforms)) if isinstance(transforms, list | tuple) else None,
                hint="load and save it again in torch, without extensions",
            )
        if type(name) is not str or type(offset) is not int or type(length) is not int:
            self.fault("an item's storage location is damaged", key)
        if not (0 <= offset < 1 << 63 and 0 <= length < 1 << 63):
            self.fault("an item's storage location is invalid", key, found=f"{pluralize(length, 'byte')} at {offset}")
        path = self.files.get(name)
        if path is None:
            path = self.files[name] = str(confined(self.folder, name))
        self.places += Places([path], [offset], [length])

    # -- tensors -------------------------------------------------------------------------------------------------

    def _described(self, key: str, what: Record) -> _Described:
        if id(what) in self.known:
            return self.known[id(what)]
        properties = what.get("properties")
        dtype = properties.get("dtype") if isinstance(properties, Record) else None
        if type(dtype) is not DType:
            self.fault("a tensor has no dtype", key)
        shape = self._numbers(what.get("size"), key, "a shape")
        listed = what.get("chunks")
        if not isinstance(listed, list | tuple):
            self.fault("a tensor has no list of chunks", key)
        boxes: dict[Box, float] = {}
        for chunk in listed:
            if not isinstance(chunk, Record):
                self.fault("a chunk is damaged", key)
            offsets = self._numbers(chunk.get("offsets"), key, "a chunk's offsets")
            sizes = self._numbers(chunk.get("sizes"), key, "a chunk's sizes")
            if not len(offsets) == len(sizes) == len(shape):
                self.fault(
                    "a chunk has other dims than its tensor",
                    key,
                    f"{pluralize(len(shape), 'dim')}",
                    f"{pluralize(len(sizes), 'dim')}",
                )
            if 0 in shape and 0 not in sizes:  # the plan checks all other tensors
                self.fault("a tensor without elements has a chunk with some", key, f"{list(shape)}", f"{list(sizes)}")
            if 0 in sizes:  # an empty part from FSDP2
                continue
            # Optimizer states with 8 or 4 bits claim to be fp32. A chunk listed twice (replicas before torch 2.2) is
            # one item.
            boxes[Box(offsets, sizes)] = prod(sizes) * (0.5 if dtype.floating else dtype.itemsize)
        if len({box.offsets for box in boxes}) < len(boxes):
            self.fault("two chunks of a tensor begin at the same element", key)
        found = self.known[id(what)] = dtype, shape, boxes
        return found

    def _entry(
        self, number: int, key: str, described: _Described, rows: Mapping[tuple[int, Shape], int]
    ) -> TensorEntry:
        dtype, shape, boxes = described
        chunks = {}
        for box, least in boxes.items():
            row = rows.get((number, box.offsets))
            if row is None:
                place = f"a place for the part at {list(box.offsets)}"
                self.fault("a part is stored nowhere", key, expected=place)
            chunks[box] = row
            if least > self.places.lengths[row]:
                self.fault(
                    "a chunk is larger than its item",
                    key,
                    expected=f"{pluralize(box.numel, 'element')} of {dtype} for {box}",
                    found=f"an item of {pluralize(self.places.lengths[row], 'byte')} in {self.places.paths[row]}",
                )
        return TensorEntry(key, dtype, shape, chunks)

    def _numbers(self, value: Any, key: str, what: str) -> Shape:
        if type(value) is list:
            value = tuple(value)
        if type(value) is not tuple or len(value) > _MAX_DIMS:
            self.fault(f"{what} is not a tuple of numbers", key)
        for n in value:
            if type(n) is not int or not 0 <= n < 1 << 63:
                self.fault(f"{what} is invalid", key, found=str(n)[:40])
        shape: Shape = value
        return shape

    # -- paths ---------------------------------------------------------------------------------------------------

    def _paths(
        self, recorded: Columns | None, keys: Sequence[str], numbers: _Numbers
    ) -> tuple[list[Path_] | None, list[int]]:
        """Return each key's path and the recorded order, or None without recorded paths.

        A key is its path's steps joined with dots (torch 2.13, `_nested_dict.py`).
        """
        found: list[Any] = [None] * len(keys)
        order: list[int] = []
        if recorded is not None:
            order = numbers.of(recorded.keys)
            are_spelled = _spell(recorded)
            for number, key, steps in zip(order, *recorded, strict=True):
                if number >= 0:
                    found[number] = steps if are_spelled else self._steps(key, steps)
            order = [number for number in order if number >= 0]
        if not order:
            return None, list(range(len(keys)))
        if not all(found):
            self.fault("a value has no path in the state dict, and others have one", keys[found.index(None)])
        if len(order) > len(keys):
            raise IrregularError
        return found, order

    def _steps(self, key: str, steps: Any) -> Path_:
        if type(steps) is list:
            steps = tuple(steps)
        good = type(steps) is tuple and 0 < len(steps) <= _MAX_DEPTH
        if not good or not all(type(step) is str or (type(step) is int and 0 <= step < 1 << 31) for step in steps):
            self.fault("a value's state dict path is damaged", key)
        if (joined := ".".join(map(str, steps))) != key:
            self.fault("a value's state dict path contradicts its key", key, key, joined)
        path: Path_ = steps
        return path


class _Numbers:
    """Index from text to list position, sorted because a large dict takes four times as long."""

    def __init__(self, keys: Sequence[str]) -> None:
        """Raise IrregularError for a duplicate key."""
        self.keys = keys
        self._known: dict[str, int] | None = None
        if len(keys) >= _MANY:
            import numpy as np

            hashes = _hashes(keys)
            self._order = np.argsort(hashes)
            self._hashes = hashes[self._order]
        if len(keys) < _MANY or (self._hashes[1:] == self._hashes[:-1]).any():  # perhaps a hash collision
            self._known = dict(zip(keys, range(len(keys)), strict=True))
            if len(self._known) < len(keys):
                raise IrregularError

    def of(self, texts: Sequence[str]) -> list[int]:
        """Return each text's number, or -1."""
        if self._known is not None:
            return [self._known.get(text, -1) for text in texts]
        import numpy as np

        hashes = _hashes(texts)
        order, found = np.argsort(hashes), np.empty(len(hashes), np.int64)
        places = np.searchsorted(self._hashes, hashes[order])
        found[order] = self._order[np.minimum(places, len(self.keys) - 1)]
        numbers: list[int] = found.tolist()
        if all(map(eq, map(self.keys.__getitem__, numbers), texts)):
            return numbers
        return [number if self.keys[number] == text else -1 for number, text in zip(numbers, texts, strict=True)]


def _hashes(texts: Sequence[str]) -> NDArray[np.int64]:
    import numpy as np

    return np.fromiter(map(hash, texts), np.int64, len(texts))


def _columns(found: Any) -> Columns | None:
    if isinstance(found, Mapping):
        return Columns([*found], [*found.values()])
    return found if isinstance(found, Columns) else None


def _kind_of_object(what: Any) -> str:
    return what.name if isinstance(what, Record) else type(what).__name__


def _spell(paths: Columns) -> bool:
    try:
        are_alike = (
            {*map(type, paths.values)} == {tuple} and all(paths.values) and max(map(len, paths.values)) <= _MAX_DEPTH
        )
        return are_alike and all(map(eq, map(".".join, paths.values), paths.keys))
    except TypeError:  # a list index
        return False
