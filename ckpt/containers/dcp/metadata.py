"""DCP's `.metadata`: which tensors there are, of which chunks, and which bytes of which file hold each.

Facts from torch's `distributed/checkpoint/metadata.py` and `filesystem.py`, of 2.1, 2.3 and 2.13.  The file is a plain
pickle of a `Metadata` object:

    state_dict_metadata   key -> TensorStorageMetadata(properties, size, chunks) or BytesStorageMetadata
    planner_data          key -> the path of the value in the nested state dict, a tuple of names and list indices;
                          None or missing where the state dict was not flattened
    storage_data          MetadataIndex(fqn, offset, index) -> _StorageInfo(relative_path, offset, length); the index is
                          a hint only, and the offset None for what is no tensor
    storage_meta          since 2.3: where it was saved, and a random id
    version               since 2.9

`_StorageInfo.transform_descriptors` (since 2.7) is there only where a stream was transformed (compressed).  Without
collectives (since 2.9) each rank writes a `__{rank}.metadata` of what it alone has saved.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from math import prod
from operator import eq
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

from ckpt.containers.dcp.runs import IrregularError, Runs
from ckpt.containers.torchfile.unpickle import load_pickle, read_pickle
from ckpt.containers.torchfile.values import Record
from ckpt.errors import CkptError, CorruptError, IncompleteError, NotFoundError
from ckpt.move.files import confined
from ckpt.plan.dtypes import DType
from ckpt.plan.tensors import Box, Shape

METADATA = ".metadata"
PER_RANK = re.compile(r"__(\d+)\.metadata")
#: A data file: the rank that wrote it, and the number among its files.
DATA_FILE = re.compile(r"__(\d+)_\d+\.distcp")

#: Where a value stands in the nested state dict: names, and indices of lists.
Path_ = tuple[str | int, ...]

#: What an item is of: a value, by its key, or a chunk of a tensor, by its key and offset.
_Index = str | tuple[str, Shape]

#: What is said of a tensor: dtype, shape, its chunks' boxes, and how many bytes the item of each has at least.
_Described = tuple[DType, Shape, dict[Box, float]]

_MAX_DIMS = 64
_MAX_DEPTH = 32
_MODULE = "torch.distributed.checkpoint."


class Place(NamedTuple):
    """An item, which is a torch file of its own: `length` bytes at `offset` of the file `path`."""

    path: str
    offset: int
    length: int


@dataclass(slots=True)
class Places:
    """Where items are: numbers side by side and not objects, as there may be millions.  An item is a row of these."""

    paths: list[str] = field(default_factory=list)
    offsets: list[int] = field(default_factory=list)
    lengths: list[int] = field(default_factory=list)

    def __getitem__(self, row: int) -> Place:
        return Place(self.paths[row], self.offsets[row], self.lengths[row])

    def __iadd__(self, other: Places) -> Places:
        self.paths += other.paths
        self.offsets += other.offsets
        self.lengths += other.lengths
        return self

    def by_file(self) -> Iterator[list[tuple[int, Place]]]:
        """The items of each file in turn, by their offsets, each with its row."""
        found: dict[str, list[int]] = {}
        for row, path in enumerate(self.paths):
            found.setdefault(path, []).append(row)
        for path, rows in sorted(found.items()):
            rows.sort(key=self.offsets.__getitem__)
            yield [(row, Place(path, self.offsets[row], self.lengths[row])) for row in rows]


@dataclass(slots=True)
class Entry:
    """A tensor, and the rows of its chunks, those without elements left out; `replicas` are further copies of these."""

    key: str
    dtype: DType
    shape: Shape
    chunks: dict[Box, int]
    replicas: list[tuple[Box, int]] = field(default_factory=list)


@dataclass(slots=True)
class Metadata:
    """What one or several metadata files say.  `paths` has every key, in the order of the state dict where known.

    `values` are the items that are no tensors; items of `places` that are neither these nor of `entries` have no
    elements.  `is_nested` says that paths are recorded.
    """

    path: str
    entries: dict[str, Entry]
    values: dict[str, int]
    paths: dict[str, Path_]
    is_nested: bool
    places: Places

    def chunks(self, key: str) -> dict[Box, Place]:
        """Where the chunks of a tensor are."""
        return {box: self.places[row] for box, row in self.entries[key].chunks.items()}

    def owners(self) -> list[tuple[str, Box | None, bool] | None]:
        """Of each item its key, its box (None: no tensor), whether it is a replica; None for one without elements."""
        found: list[tuple[str, Box | None, bool] | None] = [None] * len(self.places.paths)
        for key, row in self.values.items():
            found[row] = key, None, False
        for key, entry in self.entries.items():
            for box, row in entry.chunks.items():
                found[row] = key, box, False
            for box, row in entry.replicas:
                found[row] = key, box, True
        return found


def read_metadata(folder: Path, classes: tuple[str, ...] = (f"{_MODULE}metadata.Metadata",)) -> Metadata:
    """The metadata of a checkpoint's folder: its `.metadata`, or what its ranks have written each for itself.

    `classes` are those that the metadata may be of.

    Raises UnsafeError for a pickle that names what it should not and for paths that lead out of the folder,
    CorruptError for one that contradicts itself, NotFoundError for what is not supported.
    """
    path = folder / METADATA
    if path.exists():
        return _read(folder, METADATA, classes)
    names = per_rank_names(folder)
    for rank, name in enumerate(names):
        if name != f"__{rank}{METADATA}":
            raise CorruptError(
                "the metadata of a rank is missing", path=folder, rank=rank, expected=f"__{rank}{METADATA}", found=name
            )
    if not names:
        raise IncompleteError("the metadata is missing: the save was not finished", path=folder, expected=METADATA)
    merged = _read(folder, names[0], classes)
    for name in names[1:]:
        _merge(merged, _read(folder, name, classes))
    return merged


def per_rank_names(folder: Path) -> list[str]:
    """Names of the metadata files of single ranks, by rank."""
    found = [(int(match[1]), entry.name) for entry in folder.iterdir() if (match := PER_RANK.fullmatch(entry.name))]
    return [name for _, name in sorted(found)]


def _read(folder: Path, name: str, classes: tuple[str, ...]) -> Metadata:
    path = str(confined(folder, name))
    runs = Runs()
    try:
        return _Parser(folder, path).parse(runs.load(read_pickle(path), path), classes, runs)
    except (IrregularError, CkptError):  # the machine alone reads all there is, and says what is wrong and where
        return _Parser(folder, path).parse(load_pickle(path), classes, Runs())


def _merge(first: Metadata, other: Metadata) -> None:
    """Add what another rank has saved.  The same chunk again is a replica; of plain values the first rank's stay."""
    before = len(first.places.paths)
    first.places += other.places
    for key, entry in other.entries.items():
        entry.chunks = {box: before + row for box, row in entry.chunks.items()}
        mine = first.entries.setdefault(key, entry)
        if mine is entry:
            continue
        if (mine.dtype, mine.shape) != (entry.dtype, entry.shape) or key in first.values:
            raise CorruptError(
                "two ranks describe a tensor in different ways",
                path=other.path,
                fqn=key,
                expected=f"{mine.dtype} of shape {list(mine.shape)}",
                found=f"{entry.dtype} of shape {list(entry.shape)}",
            )
        for box, row in entry.chunks.items():
            if mine.chunks.setdefault(box, row) != row:
                mine.replicas.append((box, row))
    for key, row in other.values.items():
        first.values.setdefault(key, before + row)
    for key, steps in other.paths.items():
        first.paths.setdefault(key, steps)
    first.is_nested = first.is_nested or other.is_nested


class _Parser:
    """Turns the pickled objects, of which nothing is trusted, into `Metadata`."""

    def __init__(self, folder: Path, path: str) -> None:
        self.folder = folder
        self.path = path
        self.files: dict[str, str] = {}
        self.places = Places()
        self.known: dict[int, _Described] = {}  # by the id of the record

    def fault(self, what: str, key: str | None = None, expected: object = None, found: object = None) -> NoReturn:
        raise CorruptError(what, path=self.path, fqn=key, expected=expected, found=found)

    def parse(self, root: Any, classes: tuple[str, ...], runs: Runs) -> Metadata:
        if not isinstance(root, Record) or root.typename not in classes:
            kind = root.typename if isinstance(root, Record) else type(root).__name__
            if kind.startswith("megatron."):
                raise NotFoundError("this is a checkpoint of Megatron's, not one of torch alone", path=self.path)
            self.fault("this is no metadata of torch's distributed checkpoint", expected="Metadata", found=kind)
        described = root.get("state_dict_metadata")
        if not isinstance(described, Mapping):
            self.fault("the metadata lists no tensors", expected="state_dict_metadata")
        rows = self._rows(root.get("storage_data"), runs)
        entries: dict[str, Entry] = {}
        values: dict[str, int] = {}
        for key, what in described.items():
            if type(key) is not str:
                self.fault("a key of the metadata is no text", found=type(key).__name__)
            kind = what.name if isinstance(what, Record) else type(what).__name__
            if kind == "TensorStorageMetadata":
                entries[key] = self._entry(key, self._described(key, what), rows)
            elif kind == "BytesStorageMetadata":
                values[key] = self._row(rows, key)
            else:
                self.fault("the metadata describes something that is no tensor and no value", key, found=kind)
        paths, is_nested = self._paths(root.get("planner_data"), described)
        return Metadata(self.path, entries, values, paths, is_nested, self.places)

    # -- storage -------------------------------------------------------------------------------------------------

    def _rows(self, stored: Any, runs: Runs) -> dict[_Index, int]:
        """The row of each item.  IrregularError where what is in `runs` is not as it must be."""
        if not isinstance(stored, Mapping):
            self.fault("the metadata does not say where anything is stored", expected="storage_data")
        self._take_places(runs)
        indices = zip(runs.fqns, runs.wheres, strict=True)
        rows = {fqn if where is None else (fqn, where): row for row, (fqn, where) in enumerate(indices)}
        if len(rows) != len(runs.fqns):
            raise IrregularError
        for index, info in stored.items():
            if not isinstance(index, Record) or index.name != "MetadataIndex" or not isinstance(info, Record):
                self.fault("the storage data are not those of torch's file writer")
            fqn, offset = index.get("fqn"), index.get("offset")
            if type(fqn) is not str:
                self.fault("a key of the storage data is no text")
            at = fqn if offset is None else (fqn, self._numbers(offset, fqn, "an offset"))
            if at in rows:
                self.fault("the storage data have two places for one part", fqn, found=str(at))
            rows[at] = len(rows)
            self._add(fqn, info)
        return rows

    def _take_places(self, runs: Runs) -> None:
        """Take the places that are columns.  IrregularError where one of them is not as `_add` has them."""
        if not runs.fqns:
            return
        wheres = {id(where): where for where in runs.wheres}
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
                "the data were transformed when they were saved (compressed, for example), which is not supported",
                path=self.path,
                fqn=key,
                found=", ".join(map(str, transforms)) if isinstance(transforms, list | tuple) else None,
                hint="load and save it again in torch, without extensions",
            )
        if type(name) is not str or type(offset) is not int or type(length) is not int:
            self.fault("the place of an item is damaged", key)
        if not (0 <= offset < 1 << 63 and 0 <= length < 1 << 63):
            self.fault("the place of an item makes no sense", key, found=f"{length} bytes at {offset}")
        path = self.files.get(name)
        if path is None:
            path = self.files[name] = str(confined(self.folder, name))
        self.places += Places([path], [offset], [length])

    def _row(self, rows: Mapping[_Index, int], index: _Index) -> int:
        row = rows.get(index)
        if row is None:
            key, part = (index, "") if isinstance(index, str) else (index[0], f" at {list(index[1])}")
            self.fault("a part is stored nowhere", key, expected=f"a place for the part{part}")
        return row

    # -- tensors -------------------------------------------------------------------------------------------------

    def _described(self, key: str, what: Record) -> _Described:
        """The dtype and shape of a tensor, its chunks, and how many bytes the item of each has at least."""
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
                self.fault("a chunk has other dims than its tensor", key, f"{len(shape)} dims", f"{len(sizes)} dims")
            if 0 in shape and 0 not in sizes:  # the plan proves all other tensors, but this one has nothing to prove
                self.fault("a tensor without elements has a chunk with some", key, f"{list(shape)}", f"{list(sizes)}")
            if 0 in sizes:  # a rank without a part of its own: FSDP2 records one, at the end
                continue
            # An optimizer's states of 8 or 4 bits pose as fp32.  Listed twice (replicas before torch 2.2): one item.
            boxes[Box(offsets, sizes)] = prod(sizes) * (0.5 if dtype.floating else dtype.itemsize)
        if len({box.offsets for box in boxes}) < len(boxes):
            self.fault("two chunks of a tensor begin at the same element", key)
        found = self.known[id(what)] = dtype, shape, boxes
        return found

    def _entry(self, key: str, described: _Described, rows: Mapping[_Index, int]) -> Entry:
        dtype, shape, boxes = described
        chunks = {}
        for box, least in boxes.items():
            row = chunks[box] = self._row(rows, (key, box.offsets))
            if least > self.places.lengths[row]:
                self.fault(
                    "a chunk is larger than the item that holds it",
                    key,
                    expected=f"{box.numel} elements of {dtype} for {box}",
                    found=f"an item of {self.places.lengths[row]} bytes in {self.places.paths[row]}",
                )
        return Entry(key, dtype, shape, chunks)

    def _numbers(self, value: Any, key: str, what: str) -> Shape:
        if type(value) is list:
            value = tuple(value)
        if type(value) is not tuple or len(value) > _MAX_DIMS:
            self.fault(f"{what} is no tuple of numbers", key)
        for n in value:
            if type(n) is not int or not 0 <= n < 1 << 63:
                self.fault(f"{what} makes no sense", key, found=str(n)[:40])
        shape: Shape = value
        return shape

    # -- paths ---------------------------------------------------------------------------------------------------

    def _paths(self, planner_data: Any, keys: Mapping[str, Any]) -> tuple[dict[str, Path_], bool]:
        """Every key's path: as recorded, in the recorded order; where none is recorded, all keys stand at the top.

        A key is its path's steps with dots between them (torch 2.13, `distributed/checkpoint/_nested_dict.py`).
        """
        known: dict[str, Path_] = {}
        if isinstance(planner_data, Mapping) and planner_data:
            if planner_data.keys() == keys.keys() and self._spell_all(planner_data):
                return dict(planner_data), True
            wanted = set(keys)
            for key, steps in planner_data.items():
                if self._spells(steps, key) and key in wanted:
                    known[key] = steps
                elif key in wanted:
                    known[key] = self._steps(key, steps)
                    if (joined := ".".join(map(str, known[key]))) != key:
                        self.fault("the path of a value in the state dict is not that of its key", key, key, joined)
            if known and (without := next((key for key in keys if key not in known), None)) is not None:
                self.fault("a value has no path in the state dict, and others have one", without)
        is_nested = bool(known)
        for key in keys:
            known.setdefault(key, (key,))
        return known, is_nested

    def _spell_all(self, paths: Mapping[Any, Any]) -> bool:
        """`_spells` of all keys and paths, without a step for each."""
        steps = paths.values()
        try:
            alike = set(map(type, steps)) == {tuple} and all(steps) and max(map(len, steps)) <= _MAX_DEPTH
            return alike and all(map(eq, map(".".join, steps), paths))
        except TypeError:  # an index of a list
            return False

    def _spells(self, steps: Any, key: Any) -> bool:
        """Whether these are names alone, as nearly everywhere, and those of the key."""
        try:
            return type(steps) is tuple and 0 < len(steps) <= _MAX_DEPTH and ".".join(steps) == key
        except TypeError:  # an index of a list
            return False

    def _steps(self, key: str, steps: Any) -> Path_:
        if type(steps) is list:
            steps = tuple(steps)
        good = type(steps) is tuple and 0 < len(steps) <= _MAX_DEPTH
        if not good or not all(type(step) is str or (type(step) is int and 0 <= step < 1 << 31) for step in steps):
            self.fault("the path of a value in the state dict is damaged", key)
        path: Path_ = steps
        return path
