"""The optimizer's states of one flat buffer of ZeRO's, as all ranks have them.

Whatever an optimizer keeps beside the buffer: tensors with an element for each of its elements, plain or quantized;
numbers; and what belongs to the whole of a rank's part of the buffer, and so to no parameter.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ckpt.base.errors import CorruptError
from ckpt.containers.sources import RankFile
from ckpt.containers.torchfile.values import Record, StoredTensor
from ckpt.plan.tensors import Extent, Rule
from converters.deepspeed.rank_files import base_state, flat_extent
from converters.optimizers.ranks import different_numbers
from converters.optimizers.states import OptimizerStates
from converters.quantized.states import InBlocks, Quantized, understood

#: Elements that a rank's part of a state may have: as many as are in use, or with the padding.
Sizes = Collection[int]


@dataclass
class GroupStates:
    """The optimizer's states of one flat buffer, on all ranks.

    `buffers` are the ranks' extents of those that have an element for each of the buffer's, by name; `numbers` are
    those that are one number.  Of a buffer in `quantized` the extents are of plain values, which are computed:
    `in_blocks` says where.  `left` says of each other state what it is.
    """

    buffers: dict[str, list[Extent]] = field(default_factory=dict)
    numbers: dict[str, Any] = field(default_factory=dict)
    quantized: dict[str, list[Quantized]] = field(default_factory=dict)
    left: dict[str, str] = field(default_factory=dict)

    def in_blocks(self, rule: Rule, name: str) -> Rule:
        """The rule for the parts of a buffer: of a quantized one it leads to what is computed."""
        paths = frozenset(one.path for one in self.quantized.get(name, ()))
        return InBlocks(rule, paths) if paths else rule

    def add_to(self, found: OptimizerStates, fqns: Iterable[str], file: RankFile, who: str = "ranks") -> None:
        """Add what a buffer of these parameters, in `file` among others, has beside plain elements.

        CorruptError if another of `who` has another number for a parameter that they share.
        """
        fqns = list(fqns)
        for name, parts in self.quantized.items():
            for one in parts:
                found.computed |= one.blocks()
            found.quantized |= dict.fromkeys(((fqn, name) for fqn in fqns), parts[0].method)
        for name, value in self.numbers.items():
            found.agree(fqns, name, value, who, **file.where)
        for name, what in self.left.items():
            found.unread.add(name, f"it is {what}, which is no part of any one parameter", fqns)


def group_states(
    inners: Sequence[RankFile], states: Callable[[RankFile], Mapping[str, Any]], sizes: Sequence[Sizes]
) -> GroupStates:
    """Sort the states of a flat buffer, whose parts may have these `sizes` on each rank.

    CorruptError where a rank lacks a state that others have, or is of another step.
    """
    found = GroupStates()
    ranks = [understood(states(inner)) for inner in inners]
    for name in dict.fromkeys(name for values in ranks for name in values):
        values = [values.get(name) for values in ranks]
        there = [(inner, value) for inner, value in zip(inners, values, strict=True) if value is not None]
        if any(_is_part(value, size) for value, size in zip(values, sizes, strict=True)):
            for inner, value in zip(inners, values, strict=True):
                if value is None:
                    raise CorruptError("a rank lacks an optimizer state", **inner.where, expected=name)
            found.buffers[name] = [_state_extent(value, inner) for inner, value in there]
            if quantized := [value for value in values if isinstance(value, Quantized)]:
                found.quantized[name] = quantized
        elif there and all(_is_number(value) for _, value in there):
            numbers = different_numbers(name, there)
            if len(numbers) == 1:
                found.numbers[name] = numbers[0]
            else:
                found.left[name] = "a number of its own on each rank"
        elif there:
            found.left[name] = f"{_kind_of_state(there[0][1])} on each rank"
    return found


def flat_group_states(inners: Sequence[RankFile], group: int, partition: int) -> GroupStates:
    """The states of a group of stages 1 and 2: padded as its partitions are, or not with `elastic_checkpoint`."""
    sizes: list[Sizes] = []
    for inner in inners:
        kept = flat_extent(inner.need("single_partition_of_fp32_groups")[group], inner).numel
        is_elastic = not isinstance(inner.content.get("base_optimizer_state"), Mapping)
        sizes.append((kept,) if is_elastic else (kept, partition))
    return group_states(inners, lambda inner: base_state(inner, group), sizes)


def _is_part(value: Any, sizes: Sizes) -> bool:
    """Whether a state can be a rank's part.  One element is a number, where the part is longer."""
    if not isinstance(value, StoredTensor | Quantized) or len(value.shape) != 1:
        return False
    return value.shape[0] in sizes and (value.shape[0] > 1 or max(sizes) == 1)


def _state_extent(value: Any, inner: RankFile) -> Extent:
    return value.extent if isinstance(value, Quantized) else flat_extent(value, inner)


def _is_number(value: Any) -> bool:
    return value.shape in ((), (1,)) if isinstance(value, StoredTensor) else isinstance(value, int | float | bool)


def _kind_of_state(value: Any) -> str:
    if isinstance(value, StoredTensor | Quantized):
        return f"a tensor of shape {list(value.shape)}"
    return value.typename if isinstance(value, Record) else f"a {type(value).__name__}"
