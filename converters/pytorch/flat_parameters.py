"""Flat parameters of FSDP1: which of the model's are in each, and what a rank's optimizer has of them.

With `use_orig_params=False`, verl's default, a wrapped module has one flat parameter: its own and those of the modules
in it that are not wrapped themselves, each as a row, in the order in which modules register them.  The whole is padded
to a multiple of the ranks and cut into as many equal slices; the optimizer's states are of slices, and numbered as
`parameters()` goes: the root's first, then those of the modules within.  No file says which parameters are in which.

verl wraps the layers of a model (`_no_split_modules`).  So the lists of modules in a model are tried, alone and
together, and what is taken is the only choice that has as many flat parameters, each as long, as the file.

Format facts: torch 2.13 (distributed/fsdp/_flat_param.py, `_init_flat_param_and_metadata` without `align_addresses`,
`_get_shard`), verl 0.9.1 (utils/fsdp_utils.py, `get_fsdp_wrap_policy`; workers/engine/fsdp/transformer_impl.py).
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from math import prod
from typing import Any

from ckpt.base.errors import CorruptError
from ckpt.containers.sources import RankFile
from ckpt.containers.torchfile.scalars import number_state
from ckpt.containers.torchfile.values import Record, StoredTensor
from ckpt.plan.assemble import assemble
from ckpt.plan.checkpoint import Key, ParamGroup
from ckpt.plan.tensors import Extent, FlatRange, Fragment, Shape, Tensor

#: A parameter of an element of a list of modules: the list's name, and the element's number.
_IN_LIST = re.compile(r"(?P<list>.*?)\.(?P<number>\d+)\.")
#: More lists than any model has that is split into layers.
_MAX_LISTS = 6

Units = tuple[tuple[str, ...], ...]


@dataclass(frozen=True, slots=True)
class FlatPiece:
    """Elements `start` to `stop` of the parameter `fqn`, from element `at` of a rank's slice on."""

    fqn: str
    start: int
    stop: int
    at: int


def slice_length(unit: Sequence[str], shapes: Mapping[str, Shape], num_ranks: int) -> int:
    """Elements of a flat parameter that each rank has, padding included."""
    return -(-sum(prod(shapes[fqn]) for fqn in unit) // num_ranks)


def slice_pieces(unit: Sequence[str], shapes: Mapping[str, Shape], num_ranks: int, rank: int) -> Iterator[FlatPiece]:
    """What a rank's slice of a flat parameter holds; padding follows the last of all."""
    length = slice_length(unit, shapes, num_ranks)
    first, last, begin = rank * length, (rank + 1) * length, 0
    for fqn in unit:
        end = begin + prod(shapes[fqn])
        start, stop = max(first, begin), min(last, end)
        if start < stop:
            yield FlatPiece(fqn, start - begin, stop - begin, start - first)
        begin = end


def find_units(shapes: Mapping[str, Shape], lengths: Sequence[int], num_ranks: int) -> Units | None:
    """The parameters of each flat one, whose slices are of these `lengths`; None where not exactly one choice fits.

    `shapes` are those of all parameters, in the order in which modules register them.
    """
    lists = dict.fromkeys(match["list"] for fqn in shapes if (match := _IN_LIST.match(fqn)))
    fitting: set[Units] = set()
    for count in range(min(len(lists), _MAX_LISTS) + 1):
        for wrapped in combinations(lists, count):
            units = _units(shapes, frozenset(wrapped))
            if [slice_length(unit, shapes, num_ranks) for unit in units] == list(lengths):
                fitting.add(units)
    return fitting.pop() if len(fitting) == 1 else None


def _units(fqns: Mapping[str, Shape], wrapped: frozenset[str]) -> Units:
    found: dict[str, list[str]] = {"": []}
    for fqn in fqns:
        match = _IN_LIST.match(fqn)
        found.setdefault(match[0] if match and match["list"] in wrapped else "", []).append(fqn)
    return tuple(tuple(unit) for unit in found.values() if unit)


@dataclass(frozen=True, slots=True)
class FlatOptimizer:
    """The states of an optimizer of flat parameters, by those of the model."""

    units: Units
    tensors: Mapping[Key, Tensor]
    scalars: Mapping[str, dict[str, Any]]
    groups: tuple[ParamGroup, ...]


def read_flat(files: Sequence[RankFile], shapes: Mapping[str, Shape]) -> FlatOptimizer | None:
    """The optimizer in ranks' files, if it is one of flat parameters that `find_units` tells; otherwise None."""
    ranks = [_numbered(file) for file in files]
    first = ranks[0]
    if first is None or not first[1] or any(one is None or one[1].keys() != first[1].keys() for one in ranks):
        return None
    states = [one[1] for one in ranks if one is not None]
    lengths: list[int] = []
    for number in range(len(first[1])):
        held = {v.shape for one in states for v in one[number].values() if isinstance(v, StoredTensor) and v.shape}
        if len(held) != 1 or len(shape := held.pop()) != 1:
            return None
        lengths.append(shape[0])
    units = find_units(shapes, lengths, len(files))
    if units is None:
        return None
    tensors: dict[Key, Tensor] = {}
    scalars: dict[str, dict[str, Any]] = {}
    for number, unit in enumerate(units):
        for name in first[1][number]:
            values = [one[number].get(name) for one in states]
            if any(isinstance(value, Mapping | Record | None) for value in values):
                return None
            if all(isinstance(value, StoredTensor) and value.shape for value in values):
                tensors |= _tensors(files, unit, name, values, shapes)
                continue
            numbers = same_numbers(unit[0], name, list(zip(files, values, strict=True)))
            if any(value != numbers[0] for value in numbers):
                return None
            scalars.setdefault(name, {}).update(dict.fromkeys(unit, numbers[0]))
    options = {name: value for name, value in first[0].items() if name not in ("params", "param_names")}
    group = ParamGroup(tuple(fqn for unit in units for fqn in unit), options)
    return FlatOptimizer(units, tensors, scalars, (group,))


def _numbered(file: RankFile) -> tuple[Mapping[str, Any], Mapping[int, Mapping[str, Any]]] | None:
    """A rank's only param group and its states, where each parameter of the group has some."""
    groups, states = file.content.get("param_groups"), file.content.get("state")
    if not isinstance(groups, list) or len(groups) != 1 or not isinstance(states, Mapping):
        return None
    (group,) = groups
    if not isinstance(group, Mapping) or group.get("params") != list(range(len(states))):
        return None
    if any(type(key) is not int or not isinstance(value, Mapping) for key, value in states.items()):
        return None
    return (group, states) if states.keys() == set(range(len(states))) else None


def _tensors(
    files: Sequence[RankFile], unit: Sequence[str], name: str, values: Sequence[Any], shapes: Mapping[str, Shape]
) -> dict[Key, Tensor]:
    parts: dict[str, list[tuple[Shape, Fragment]]] = {fqn: [] for fqn in unit}
    for rank, (file, value) in enumerate(zip(files, values, strict=True)):
        for piece in slice_pieces(unit, shapes, len(files), rank):
            extent = value.extent.flat(piece.at, piece.at + piece.stop - piece.start)
            region = FlatRange(piece.start, piece.stop)
            parts[piece.fqn].append((shapes[piece.fqn], Fragment(region, extent, file.rank)))
    return {(fqn, name): assemble(fqn, name, held) for fqn, held in parts.items() if held}


def in_turn(shape: Shape, held: Sequence[tuple[RankFile, Extent]]) -> list[tuple[Shape, Fragment]]:
    """The parts of a parameter whose elements are dealt out to the ranks in turn."""
    parts, at = [], 0
    for file, extent in held:
        parts.append((shape, Fragment(FlatRange(at, at := at + extent.numel), extent, file.rank)))
    return parts


def same_numbers(fqn: str, name: str, values: Sequence[tuple[RankFile, Any]]) -> list[Any]:
    """The numbers that ranks have.  CorruptError where they have not taken the same steps."""
    said = [(f, number_state(name, v.extent) if isinstance(v, StoredTensor) else v) for f, v in values]
    first = said[0][1]
    for file, value in said:
        if value != first and name.endswith("step"):
            raise CorruptError(
                "ranks of different steps in one folder",
                **file.where,
                fqn=fqn,
                expected=f"{name} {first}, as on rank {said[0][0].rank}",
                found=f"{name} {value}",
            )
    return [value for _, value in said]
