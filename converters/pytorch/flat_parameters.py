"""FSDP1's flat parameters, and a rank's optimizer states for them.

With `use_orig_params=False`, verl's default, each wrapped module has one flat parameter. It joins the module's own
parameters and those in unwrapped submodules, flattened, in registration order. It is padded to a multiple of the ranks
and cut into equal slices. The optimizer's states are slices, too, numbered in the order of `parameters()`: first the
root's, then the inner modules'. No file lists a flat parameter's members.

verl wraps a model's layers (`_no_split_modules`). So combinations of module lists are tried, and the only one to match
is accepted.

Format facts: torch 2.13 (distributed/fsdp/_flat_param.py, `_init_flat_param_and_metadata` without `align_addresses`,
`_get_shard`), verl 0.9.1 (utils/fsdp_utils.py, `get_fsdp_wrap_policy`; workers/engine/fsdp/transformer_impl.py).
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from math import prod

from ckpt.containers.sources import RankFile
from ckpt.containers.torchfile.values import Record, StoredTensor
from ckpt.plan.assemble import assemble
from ckpt.plan.tensors import Extent, FlatRange, Fragment, Shape, Tensor
from converters.optimizers.ranks import different_numbers
from converters.optimizers.state_dicts import take_apart
from converters.optimizers.states import OptimizerStates

#: Parameter in a module list.
_IN_LIST = re.compile(r"(?P<list>.*?)\.(?P<number>\d+)\.")
#: Limit on tried lists; no layered model has more.
_MAX_LISTS = 6

Units = tuple[tuple[str, ...], ...]


@dataclass(frozen=True, slots=True)
class FlatPiece:
    """Elements `start` to `stop` of the parameter `fqn`, at offset `at` in a rank's slice."""

    fqn: str
    start: int
    stop: int
    at: int


def slice_length(unit: Sequence[str], shapes: Mapping[str, Shape], num_ranks: int) -> int:
    """Return the number of elements, padding included."""
    return -(-sum(prod(shapes[fqn]) for fqn in unit) // num_ranks)


def slice_pieces(unit: Sequence[str], shapes: Mapping[str, Shape], num_ranks: int, rank: int) -> Iterator[FlatPiece]:
    """Yield pieces. Padding only follows the last parameter."""
    length = slice_length(unit, shapes, num_ranks)
    first, last, begin = rank * length, (rank + 1) * length, 0
    for fqn in unit:
        end = begin + prod(shapes[fqn])
        start, stop = max(first, begin), min(last, end)
        if start < stop:
            yield FlatPiece(fqn, start - begin, stop - begin, start - first)
        begin = end


def find_units(shapes: Mapping[str, Shape], lengths: Sequence[int], num_ranks: int) -> Units | None:
    """Return each flat parameter's members. None unless exactly one combination fits the slice `lengths`.

    `shapes` are all parameters' shapes in registration order.
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


def read_flat(files: Sequence[RankFile], shapes: Mapping[str, Shape]) -> tuple[Units, OptimizerStates] | None:
    """Read an optimizer of flat parameters. None if it is another kind or `find_units` fails."""
    ranks = [take_apart(file.content, file.path) for file in files]
    first, states = ranks[0], [one.states for one in ranks]
    every = list(range(len(first.states)))
    if not every or any(len(one.groups) != 1 or one.members != every for one in ranks):
        return None
    if any(held.keys() != set(every) for held in states):
        return None
    lengths: list[int] = []
    for number in every:
        known = {v.shape for one in states for v in one[number].values() if isinstance(v, StoredTensor) and v.shape}
        if len(known) != 1 or len(shape := known.pop()) != 1:
            return None
        lengths.append(shape[0])
    units = find_units(shapes, lengths, len(files))
    if units is None:
        return None
    found = OptimizerStates()
    for number, unit in enumerate(units):
        for name in first.states[number]:
            values = [one[number].get(name) for one in states]
            if any(isinstance(value, Mapping | Record | None) for value in values):
                return None
            held = [value.extent for value in values if isinstance(value, StoredTensor) and value.shape]
            if len(held) == len(values):
                slices = [Slice(f, f.rank * lengths[number], extent) for f, extent in zip(files, held, strict=True)]
                found.tensors |= {tensor.key: tensor for tensor in from_slices(slices, unit, shapes, name)}
                continue
            numbers = different_numbers(name, list(zip(files, values, strict=True)), unit[0])
            if len(numbers) > 1:
                return None
            for fqn in unit:
                found.add_number(fqn, name, numbers[0])
    found.groups = (replace(first.without_names()[0], fqns=tuple(fqn for unit in units for fqn in unit)),)
    return units, found


@dataclass(frozen=True, slots=True)
class Slice:
    file: RankFile
    start: int
    extent: Extent


def from_slices(
    slices: Sequence[Slice], unit: Sequence[str], shapes: Mapping[str, Shape], role: str
) -> Iterator[Tensor]:
    begin = 0
    for fqn in unit:
        shape, end = shapes[fqn], begin + prod(shapes[fqn])
        parts = [(shape, Fragment(FlatRange(0, 0), slices[0].extent.flat(0, 0), slices[0].file.rank))]
        for one in slices:
            start, stop = max(begin, one.start), min(end, one.start + one.extent.numel)
            if start < stop:
                extent = one.extent.flat(start - one.start, stop - one.start)
                parts.append((shape, Fragment(FlatRange(start - begin, stop - begin), extent, one.file.rank)))
        yield assemble(fqn, role, parts)
        begin = end


def in_turn(shape: Shape, held: Sequence[tuple[RankFile, Extent]]) -> list[tuple[Shape, Fragment]]:
    """Return a parameter's parts in rank order."""
    parts, at = [], 0
    for file, extent in held:
        parts.append((shape, Fragment(FlatRange(at, at := at + extent.numel), extent, file.rank)))
    return parts
