"""Folders by torch_checkpointing, PyTorch's asynchronous saver: one file per item and rank.

    step-2/metadata.pkl            for each tensor: shape, mesh, placements, ranks; for each item and rank: the file
    step-2/model_0.pt, ...         ITEM_RANK.pt: a state dict with DTensors, or any other value
    step-2/model_0.safetensors     a rank's local tensors, with a layout of `SafetensorsSerialization`
    tmp_step-2/                    a save that has not ended: renamed after all ranks have written

`metadata.pkl` describes only items with a resharder. Other items are in `ITEM_RANK.pt`: a value that all ranks share, a
dict with each rank's keys (torchtitan's `dp_rank_N`), or each rank's value.

Format facts: torch_checkpointing 0.1.1 (metadata_manager.py, distributed_metadata.py, dtensor_metadata.py,
checkpoint_layout.py, checkpoint_writer.py, state_transformations.py).
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path
from typing import Any

from ckpt.base.errors import CorruptError, IncompleteError, NotFoundError
from ckpt.base.text import pluralize
from ckpt.containers.dcp.metadata import Path_
from ckpt.containers.dcp.tiling import copies, note_of_copy
from ckpt.containers.safetensors import read_header
from ckpt.containers.sources import RankFile, Sources, check_all_there, structure
from ckpt.containers.torchfile.scalars import read_scalar
from ckpt.containers.torchfile.unpickle import load_pickle
from ckpt.containers.torchfile.values import Record, StoredTensor, is_part
from ckpt.move.files import confined
from ckpt.move.listing import names_in
from ckpt.move.source import opened, read_at
from ckpt.plan.assemble import assemble
from ckpt.plan.checkpoint import TRANSFORMERS, WEIGHT, Checkpoint, Format, Layout, ReadRequest, Target
from ckpt.plan.tensors import Box, Extent, Fragment, Shape, whole
from ckpt.runs.finding import Steps, find_step
from ckpt.runs.steps import RANK_FILE, RANKS_METADATA, STAGED, is_ranks_folder
from converters.optimizers.ranks import check_same, check_same_counts
from converters.optimizers.state_dicts import GROUPS, MEMBERS, NAMES, STATE, VERSION
from converters.pytorch.dcp import StateDictReading, same_places
from converters.pytorch.keys import MODEL_NAMES, OPTIMIZER_NAMES, Leaf
from converters.pytorch.rank_parts import Part, local_box, parts_of, placed

_SUFFIXES = {"TorchSerialization": ".pt", "SafetensorsSerialization": ".safetensors"}
_MAX_COMPARED = 1 << 20
#: Content of items, by words in their names: StepLR's may be called `step_lr`. torch's schedulers have these keys
#: (torch 2.13, optim/lr_scheduler.py).
_NUMBER, _SCHEDULE, _OTHER = "a number", "the state of a learning-rate schedule", "other values"
_CONTENT = {"step": _NUMBER, "iteration": _NUMBER, "sched": _SCHEDULE, "_lr": _SCHEDULE, "loader": _OTHER}
_OF_SCHEDULES = ("base_lrs", "_step_count", "_last_lr", "best")


class TorchCheckpointing(Format):
    name = "torch-checkpointing"
    title = "per-rank files of torch_checkpointing"
    namespace = TRANSFORMERS
    #: Its loader fits tensors alone: param groups' options and other items stay behind, or a rank finds no file.
    fits_other_ranks = False
    takes = ("world_size",)

    def find(self, path: Path, tag: str | None) -> Path | None:
        if path.name == RANKS_METADATA and path.is_file():
            path = path.parent
        return find_step(path, tag, _STEPS)

    def read(self, path: Path, request: ReadRequest) -> Checkpoint:
        if path.name.startswith(STAGED):
            final = path.name.removeprefix(STAGED)
            raise IncompleteError(
                f"this save has not ended: torch_checkpointing renames {path.name} to {final} at the end",
                path=path,
                hint=f"use the step before; if the job has ended and no file is missing, rename it to {final}",
            )
        if not (path / RANKS_METADATA).exists():
            raise IncompleteError(f"{RANKS_METADATA} is missing", path=path, expected=RANKS_METADATA)
        return _ItemReading(path).checkpoint(request)

    def lay_out(self, checkpoint: Checkpoint, layout: Layout) -> Target:
        from converters.pytorch.torch_checkpointing_write import lay_out

        return lay_out(checkpoint, layout)


TORCH_CHECKPOINTING = TorchCheckpointing()


_STEPS = Steps(is_ranks_folder)


# -- metadata.pkl --------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Place:
    shape: Shape
    dtype: str
    box: Box


@dataclass(frozen=True, slots=True)
class _DescribedItem:
    files: Mapping[int, str]
    places: Mapping[Path_, Mapping[int, _Place]]


def _read_metadata(path: Path) -> tuple[int, dict[str, _DescribedItem]]:
    try:
        with structure("the metadata matches no known version of torch_checkpointing", path):
            root = load_pickle(path)
            world_size = root["world_size"]
            if type(world_size) is not int or world_size < 1:
                raise ValueError(f"world_size {world_size!r}")
            return world_size, {name: _item(name, one, range(world_size)) for name, one in root["metadata"].items()}
    except NotFoundError as error:
        error.path = str(path)
        raise


def _item(name: str, described: Mapping[str, Any], ranks: range) -> _DescribedItem:
    files = described["rank_to_layout_info"]
    if set(files) != {*ranks}:
        raise ValueError(f"files of {name} for ranks {sorted(files)}")
    places: dict[Path_, dict[int, _Place]] = {}
    for text, groups in described["nested_path_to_metadata"].items():
        of_ranks = places.setdefault(tuple(json.loads(text)), {})
        for group in groups:
            of_ranks |= {rank: place for rank, place in _rank_places(group) if rank in ranks}
    return _DescribedItem({rank: _file_name(name, rank, files[rank]) for rank in ranks}, places)


def _file_name(item: str, rank: int, layout: Mapping[str, Any] | None) -> str:
    if layout is None:
        return f"{item}_{rank}.pt"
    kind = layout["serialization_format"]["type"]
    name: str = layout["file_path"]
    if (kind, name.rpartition(".")[2]) not in (
        ("TorchSerialization", "pt"),
        ("SafetensorsSerialization", "safetensors"),
    ):
        raise NotFoundError("unsupported: an item's file has another format", found=f"{kind} in {name}")
    return name


def _rank_places(group: Mapping[str, Any]) -> Iterator[tuple[int, _Place]]:
    kind, said = group["sharding_metadata"]["type"], group["sharding_metadata"]["data"]
    if kind != "DTensorShardingMetadata":
        raise NotFoundError("unsupported: a tensor is cut in an unknown way", found=kind)
    shape, mesh = tuple(said["global_shape"]), said["mesh_spec"]
    sizes = tuple(mesh["mesh_shape"])
    coordinates = dict(zip(mesh["mesh_data"], product(*map(range, sizes)), strict=True))
    placements = [
        Record("", "_StridedShard" if one["type"] == "StridedShard" else one["type"], state=dict(one))
        for one in said["placements"]
    ]
    for rank in group["ranks"]:
        box = local_box(shape, sizes, coordinates[rank], placements)
        yield rank, _Place(shape, str(said["dtype"]).removeprefix("torch."), box)


# -- files ---------------------------------------------------------------------------------------------------------


@dataclass
class _ItemReading:
    folder: Path
    sources: Sources = field(default_factory=Sources)

    def checkpoint(self, request: ReadRequest) -> Checkpoint:
        metadata = confined(self.folder, RANKS_METADATA)
        self.sources.add(metadata)
        world_size, items = _read_metadata(metadata)
        reading = StateDictReading(TORCH_CHECKPOINTING.name, metadata=str(metadata))
        for name, item in items.items():
            held = [file for rank in range(world_size) if (file := self._content(item, rank)) is not None]
            for file in held:
                _check_content(file, item)
                reading.dtensor = reading.dtensor or _dtensor(file)
            reading.leaves += _tied(name, _leaves(name, held, item))
            reading.notes += self._copied(item)
        others = self._others(items, world_size).items()
        _check_contents({name: self._add_other(reading, name, files, world_size) for name, files in others})
        reading.data.files |= self.sources.by_path
        reading.data.ranks = world_size
        reading.notes += self.sources.notes
        return reading.checkpoint(self.folder, request)

    def _content(self, item: _DescribedItem, rank: int) -> RankFile | None:
        path = confined(self.folder, item.files[rank])
        if not path.is_file():
            if not any(rank in of_ranks for of_ranks in item.places.values()):
                return None
            raise IncompleteError(
                f"a rank's file is missing: {RANKS_METADATA} lists it",
                path=path,
                rank=rank,
                expected=f"{pluralize(len(item.files), 'file')} of this kind",
            )
        if path.suffix == ".pt":
            return RankFile(str(path), rank, dict(_paths_and_values(self.sources.root(path, is_named=True))))
        self.sources.add(path)
        paths = {_dotted(one): one for one in item.places}
        found = _tensors_in(str(path)).items()
        return RankFile(str(path), rank, {paths.get(name, (name,)): value for name, value in found})

    def _copied(self, item: _DescribedItem) -> Iterator[str]:
        """Yield notes on equal safetensors files. A copied torch file contradicts the metadata."""
        ranks = {str(confined(self.folder, name)): rank for rank, name in item.files.items()}
        files = {path: file for path, file in self.sources.by_path.items() if path in ranks and path[-3:] != ".pt"}
        for pair in copies(files):
            held: dict[str, dict[str, tuple[Box, Extent]]] = {path: {} for path in pair}
            for path in pair:
                content = _tensors_in(path)
                for at, of_ranks in item.places.items():
                    if (place := of_ranks.get(ranks[path])) and _dotted(at) in content:
                        held[path][_dotted(at)] = place.box, content[_dotted(at)].extent
            if (note := note_of_copy(*pair, held)) is not None:
                yield note

    def _others(self, items: Mapping[str, _DescribedItem], world_size: int) -> dict[str, dict[int, Path]]:
        described = {name for item in items.values() for name in item.files.values()}
        found: dict[str, dict[int, Path]] = {}
        for name in names_in(self.folder):
            match = RANK_FILE.fullmatch(name)
            if match is None or name in described:
                continue
            if int(match["rank"]) >= world_size:
                raise CorruptError(
                    "the folder mixes saves with different numbers of ranks",
                    path=self.folder / name,
                    expected=f"{pluralize(world_size, 'rank')}, as in {RANKS_METADATA}",
                    hint="move the files of other runs out of the folder",
                )
            if match["kind"] == "pt" and match["item"] not in items:
                found.setdefault(match["item"], {})[int(match["rank"])] = confined(self.folder, name)
        return found

    def _add_other(
        self, reading: StateDictReading, name: str, files: Mapping[int, Path], world_size: int
    ) -> dict[Path, Any]:
        """Add an item without metadata, and return its content by file."""
        is_model = name in (*MODEL_NAMES, *OPTIMIZER_NAMES)
        if is_model:
            check_all_there("rank files are missing", files, world_size, self.folder, f"{name}_0.pt")
        elif len(files) < world_size:
            return {}  # every rank writes each item, so this is another file
        roots = {rank: self.sources.root(path, is_named=True) for rank, path in sorted(files.items())}
        held = [RankFile(str(files[rank]), rank, dict(_paths_and_values(root))) for rank, root in roots.items()]
        shared = None if is_model else _shared(list(roots.values()))
        if is_model or any(is_part(value) for file in held for value in file.content.values()):
            reading.leaves += _tied(name, _leaves(name, held, None))
        elif shared is _DIFFERENT:
            check_same_counts(name, [(file, roots[file.rank]) for file in held])
            reading.per_rank[name] = {str(rank): root for rank, root in roots.items()}
        else:
            reading.leaves.append(((name,), _with_number(shared, name)))
        return {files[rank]: root for rank, root in roots.items()}


# -- values --------------------------------------------------------------------------------------------------------


def _tensors_in(path: str) -> dict[str, StoredTensor]:
    entries = read_header(path).entries
    return {e.name: StoredTensor(Extent.contiguous(path, e.start, e.dtype, e.shape)) for e in entries}


def _is_tensor(value: Any) -> bool:
    return isinstance(value, StoredTensor) or is_part(value)


def _dtensor(file: RankFile) -> Record | None:
    found = (value for value in file.content.values() if isinstance(value, Record) and value.name == "DTensor")
    return next(found, None)


def _paths_and_values(node: Any, at: Path_ = ()) -> Iterator[tuple[Path_, Any]]:
    if isinstance(node, Mapping):
        for name, inner in node.items():
            yield from _paths_and_values(inner, (*at, name))
    elif isinstance(node, list | tuple) and any(isinstance(one, Mapping) or _is_tensor(one) for one in node):
        for number, inner in enumerate(node):
            yield from _paths_and_values(inner, (*at, number))
    else:
        yield at, node


def _named(content: Mapping[Path_, Any]) -> dict[Path_, Path_]:
    """Map paths to paths with parameter names."""

    def listed(key: str) -> dict[Path_, list[Any]]:
        return {at: v for at, v in content.items() if at[:1] == (GROUPS,) and at[2:] == (key,) and isinstance(v, list)}

    names, numbers = listed(NAMES), listed(MEMBERS)
    if not names:
        return {at: at for at in content}
    members, fqns = ([one for value in lists.values() for one in value] for lists in (numbers, names))
    known = dict(zip(members, fqns, strict=True)) if len(members) == len(fqns) else {}
    found = {}
    for at in content.keys() - numbers.keys() - {(VERSION,)}:
        is_state = at[:1] == (STATE,) and len(at) > 2
        found[at] = (STATE, known.get(at[1], at[1]), *at[2:]) if is_state else at
    return {at: (*path[:2], MEMBERS) if at in names else path for at, path in found.items()}


def _leaves(name: str, held: Iterable[RankFile], item: _DescribedItem | None) -> Iterator[tuple[Path_, Any]]:
    found: dict[Path_, list[tuple[RankFile, Path_]]] = {}
    for file in held:
        paths = _named(file.content)
        for at in file.content:
            if at in paths:
                found.setdefault(paths[at], []).append((file, at))
    for path, of_ranks in found.items():
        values = [(file, file.content[at]) for file, at in of_ranks]
        first = values[0][1]
        if any(_is_tensor(value) for _, value in values):
            places = [None if item is None else item.places.get(at, {}).get(file.rank) for file, at in of_ranks]
            if item is not None and None in places:
                odd = of_ranks[places.index(None)][0]
                raise CorruptError(f"{RANKS_METADATA} does not describe a tensor", **odd.where, fqn=_dotted(path))
            yield (name, *path), _leaf(name, path, values, places)
        elif path[-1:] == (MEMBERS,) and isinstance(first, list):  # pipeline stages have their own
            yield (name, *path), list(dict.fromkeys(one for _, value in values for one in value))
        else:
            check_same(
                _dotted(path), [(f, value) for f, value in values if isinstance(value, int | float | str | tuple)]
            )
            yield (name, *path), first


def _tied(item: str, leaves: Iterable[tuple[Path_, Any]]) -> list[tuple[Path_, Any]]:
    """Mark names in a model's torch files that share their bytes."""
    found = list(leaves)
    tensors = {leaf.key: leaf for _, leaf in found if isinstance(leaf, Leaf)} if item in MODEL_NAMES else {}
    for key, owner in same_places((key, leaf.placed) for key, leaf in tensors.items()).items():
        tensors[key].same_as = owner
    return found


def _check_content(file: RankFile, item: _DescribedItem) -> None:
    for at, of_ranks in item.places.items():
        if file.rank in of_ranks and at not in file.content:
            raise CorruptError(f"a tensor listed in {RANKS_METADATA} is missing", **file.where, fqn=_dotted(at))


def _leaf(name: str, path: Path_, values: list[tuple[RankFile, Any]], places: list[_Place | None]) -> Leaf:
    parts: list[Part] = []
    wrapped: dict[Box, Record] = {}
    fqn = _dotted(path)
    for (file, value), place in zip(values, places, strict=True):
        if isinstance(value, Record) and value.name == "DTensor" and isinstance(value.get("_local_tensor"), Record):
            shape, box, local = placed(value)
            wrapped[box] = local
            continue
        own = _bare(value, file, place) if place and isinstance(value, StoredTensor) else parts_of(value, file, fqn)
        for shape, part in own:
            expected = place and (place.shape, place.dtype, place.box)
            if expected and expected != (shape, part.extent.dtype.name, part.region):
                raise CorruptError(
                    f"a file contradicts {RANKS_METADATA}",
                    **file.where,
                    fqn=fqn,
                    expected=f"{expected[1]} {expected[2]} of {list(expected[0])}",
                    found=f"{part.extent.dtype} {part.region} of {list(shape)}",
                    hint="was one rank's file copied over another's?",
                )
        parts += own
    if wrapped:
        first = next(iter(wrapped.values()))
        raise NotFoundError("unsupported: a tensor subclass", **values[0][0].where, fqn=fqn, found=first.typename)
    tensor = assemble(fqn, WEIGHT, parts)
    number = None
    if tensor.shape == ():
        numbers = [(file, read_scalar(part.extent)) for (file, _), (_, part) in zip(values, parts, strict=True)]
        if name in OPTIMIZER_NAMES or path[:1] == (STATE,):
            check_same(fqn, numbers)
        number = numbers[0][1]
    leaf = Leaf(fqn, tensor.dtype, tensor.shape, tensor.source, values[0][0].path, tensor.replicas, number)
    leaf.placed = [
        (part.region, part.extent) for _, part in parts if isinstance(part.region, Box) and part.extent.nbytes
    ]
    return leaf


def _bare(value: StoredTensor, file: RankFile, place: _Place) -> list[Part]:
    if value.shape != place.box.sizes:
        return [(value.shape, Fragment(whole(value.shape), value.extent, file.rank))]
    return [(place.shape, Fragment(place.box, value.extent, file.rank))]


def _dotted(path: Path_) -> str:
    return ".".join(map(str, path))


# -- items without metadata ----------------------------------------------------------------------------------------

_DIFFERENT = object()


def _check_contents(items: Mapping[str, Mapping[Path, Any]]) -> None:
    """Raise CorruptError for another item's content: no metadata describes the step, schedule and data position.

    A schedule is known by its keys. A missing number counts if another item has one in its place.
    """
    odd = {
        path: (kinds[0], found)
        for name, roots in items.items()
        for path, root in roots.items()
        if (kinds := [kind for word, kind in _CONTENT.items() if word in name])
        if (found := _kind_of_item(root)) not in kinds
    }
    for path, (expected, found) in odd.items():
        if found == _SCHEDULE or (expected == _NUMBER and any(other == _NUMBER for _, other in odd.values())):
            raise CorruptError(
                "an item's file has another item's content",
                path=path,
                expected=expected,
                found=found,
                hint="were the files of two items exchanged?",
            )


def _kind_of_item(value: Any) -> str:
    if isinstance(value, Mapping) and "last_epoch" in value and not value.keys().isdisjoint(_OF_SCHEDULES):
        return _SCHEDULE
    is_number = isinstance(value, int | float) or (isinstance(value, StoredTensor) and not value.shape)
    return _NUMBER if is_number else _OTHER


def _shared(values: list[Any]) -> Any:
    """Return the common value, or all ranks' keys without conflicts."""
    first = values[0]
    if all(_is_same(first, one) for one in values[1:]):
        return first
    if not all(isinstance(one, Mapping) for one in values):
        return _DIFFERENT
    merged: dict[Any, Any] = {}
    for one in values:
        for key, value in one.items():
            if key in merged and not _is_same(merged[key], value):
                return _DIFFERENT
            merged.setdefault(key, value)
    return merged


def _is_same(one: Any, other: Any) -> bool:
    if isinstance(one, StoredTensor) and isinstance(other, StoredTensor):
        sizes = [(e.dtype, e.shape, e.strides) for e in (one.extent, other.extent)]
        return (
            sizes[0] == sizes[1] and one.extent.nbytes <= _MAX_COMPARED and _stored_bytes(one) == _stored_bytes(other)
        )
    if isinstance(one, Mapping) and isinstance(other, Mapping):
        return one.keys() == other.keys() and all(_is_same(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple) and isinstance(other, list | tuple):
        return len(one) == len(other) and all(map(_is_same, one, other))
    if isinstance(one, Record) and isinstance(other, Record):
        return one.typename == other.typename and _is_same(
            (one.args, one.kwargs, one.state), (other.args, other.kwargs, other.state)
        )
    return bool(type(one) is type(other) and (one == other or one != one))


def _stored_bytes(value: StoredTensor) -> bytes:
    with opened(value.extent.path) as descriptor:
        return read_at(descriptor, value.extent.path, value.extent.offset, value.extent.nbytes)


def _with_number(value: Any, name: str) -> Any:
    if isinstance(value, Mapping):
        return {key: _with_number(inner, f"{name}.{key}") for key, inner in value.items()}
    if not isinstance(value, StoredTensor) or value.shape:
        return value
    source = assemble(name, WEIGHT, [((), Fragment(whole(()), value.extent, None))]).source
    return Leaf(name, value.dtype, (), source, value.extent.path, number=read_scalar(value.extent))
