"""One rank's DeepSpeed file, and the structure of ZeRO's optimizer files.

Facts: see `converters.deepspeed.zero`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from math import prod
from pathlib import Path
from typing import Any

from ckpt.base.errors import CorruptError
from ckpt.base.text import pluralize
from ckpt.containers.sources import RankFile, structure
from ckpt.containers.torchfile.values import Record, StoredTensor
from ckpt.plan.checkpoint import ParamGroup
from ckpt.plan.tensors import Extent, Shape
from converters.optimizers.state_dicts import GROUPS, groups_of


def known_structure(path: Path, framework: Callable[[], str] = lambda: "deepspeed") -> AbstractContextManager[None]:
    return structure(
        "the files match no known version of DeepSpeed",
        path,
        expected="the structure written by versions up to 0.19.8",
        found=lambda: f"{framework()}; ",
    )


def inner_file(file: RankFile) -> RankFile:
    content = file.need("optimizer_state_dict")
    if not isinstance(content, Mapping):
        raise CorruptError("this is not a DeepSpeed optimizer file", **file.where)
    return RankFile(file.path, file.rank, content)


def partition_counts(inner: RankFile) -> tuple[int, ...]:
    """Count ranks that share a partition, per param group. Expert groups have fewer.

    This is not `dp_world_size`: MiCS partitions over some of the data-parallel ranks.
    """
    recorded = inner.need("partition_count")
    counts = tuple(recorded) if isinstance(recorded, Sequence) and not isinstance(recorded, str) else (recorded,)
    if not counts or not all(type(count) is int and count >= 1 for count in counts):
        raise CorruptError("the number of partitions is not recorded", path=inner.path, found=recorded)
    return counts


def in_group_order(inner: RankFile, counts: Sequence[int]) -> RankFile:
    """Order a rank's param groups like `counts`, another rank's partition counts.

    The order of expert groups differs per process. Groups with equal counts keep their order.
    """
    own = partition_counts(inner)
    if own == tuple(counts):
        return inner
    places = {count: iter([i for i, one in enumerate(own) if one == count]) for count in own}
    order = [next(places[count]) for count in counts]

    def ordered(value: Any) -> Any:
        is_list = isinstance(value, Sequence) and not isinstance(value, str) and len(value) == len(order)
        return [value[i] for i in order] if is_list else value

    content = {key: ordered(value) for key, value in inner.content.items()}
    base = content.get("base_optimizer_state")
    if isinstance(base, Mapping):
        content["base_optimizer_state"] = {**base, GROUPS: ordered(base.get(GROUPS))}
    return RankFile(inner.path, inner.rank, content)


def expect_groups(inners: list[RankFile], key: str, count: int) -> None:
    for inner in inners:
        found = inner.need(key)
        if len(found) != count:
            raise CorruptError(
                "the optimizer file and the model file do not match",
                **inner.where,
                expected=f"{pluralize(count, 'parameter group')}",
                found=f"{len(found)}",
            )


def base_state(inner: RankFile, group: int) -> Mapping[str, Any]:
    """Return a group's states; empty before the first step."""
    base = inner.content.get("base_optimizer_state")
    if isinstance(base, Mapping):
        state = base.get("state") or {}
        ids = [i for one in base_groups(inner)[group : group + 1] for i in one.fqns]
        return state.get(ids[0] if ids else group) or {}
    if isinstance(base, Sequence) and group < len(base):  # elastic_checkpoint
        state = dict(base[group])
        if "base_optimizer_state_step" in inner.content:  # per group, if the optimizer does not count itself
            state.setdefault("step", inner.content["base_optimizer_state_step"])
        return state
    return {}


def partition_size(inners: list[RankFile], group: int) -> int:
    """Return elements per rank, padding included.

    The size is rank 0's kept elements plus its recorded padding. Before DeepSpeed 0.16.4 the last rank recorded all
    ranks' padding. BF16_Optimizer strips nothing.
    """
    first = inners[0]
    size = flat_extent(first.need("single_partition_of_fp32_groups")[group], first).numel
    paddings = first.content.get("group_paddings")
    if paddings and "zero_stage" in first.content:
        size += int(paddings[group])
    for inner in inners:
        kept = flat_extent(inner.need("single_partition_of_fp32_groups")[group], inner).numel
        if kept > size:
            raise CorruptError(
                "ranks hold partitions of different sizes",
                **inner.where,
                expected=f"at most {pluralize(size, 'element')} in group {group}",
                found=f"{pluralize(kept, 'element')}",
            )
    return size


def parameter_starts(shapes: Mapping[str, Shape], inner: RankFile, group: int, size: int) -> dict[str, int]:
    """Return parameters' starts in the flat buffer, with `parameter_alignment` paddings."""
    recorded = inner.content.get("param_alignment_paddings")
    paddings = list(recorded[group]) if recorded else [0] * len(shapes)
    if len(paddings) != len(shapes) or not all(type(padding) is int and padding >= 0 for padding in paddings):
        raise CorruptError(
            "parameter paddings and parameters do not match",
            path=inner.path,
            expected=f"{pluralize(len(shapes), 'padding')}",
            found=f"{len(paddings)} in group {group}",
        )
    starts, position = {}, 0
    for (fqn, shape), padding in zip(shapes.items(), paddings, strict=True):
        starts[fqn] = position
        position += prod(shape) + padding
    if position > size:
        raise CorruptError(
            "the partitions are too short for their parameters",
            path=inner.path,
            expected=f"{pluralize(position, 'element')} on all ranks together in group {group}",
            found=f"{pluralize(size, 'element')}",
        )
    return starts


def check_places(inners: Sequence[RankFile], group: int, shapes: Mapping[str, Shape], names: Sequence[str]) -> None:
    """Compare the parameters' places with each rank's own record. `names` are the ranks' names for `shapes`.

    stage_1_and_2.py, `_create_param_mapping`. DeepSpeed before 0.7 has no record.
    """
    partition = partition_size(list(inners), group)
    starts = parameter_starts(shapes, inners[0], group, partition * len(inners))
    sizes = {name: (starts[fqn], prod(shape)) for name, (fqn, shape) in zip(names, shapes.items(), strict=True)}
    for index, inner in enumerate(inners):
        recorded = inner.content.get("param_slice_mappings")
        mapping = recorded[group] if isinstance(recorded, Sequence) and group < len(recorded) else None
        for name, record in mapping.items() if isinstance(mapping, Mapping) else ():
            if name not in sizes or not isinstance(record, Record):
                continue
            start, numel = sizes[name]
            first, last = (min(max(at - index * partition, 0), partition) for at in (start, start + numel))
            if (record.get("start"), record.get("numel")) != (first, last - first):
                raise CorruptError(
                    "a parameter's place in the flat buffer contradicts the rank's own record",
                    **inner.where,
                    fqn=name,
                    expected=f"elements {record.get('start')} + {record.get('numel')}, in param_slice_mappings",
                    found=f"elements {first} + {last - first}, by the order and shapes in param_shapes",
                )


def flat_extent(stored: Any, inner: RankFile) -> Extent:
    if not isinstance(stored, StoredTensor) or len(stored.extent.shape) != 1 or not stored.extent.is_contiguous:
        raise CorruptError("a rank's partition is not a flat tensor", **inner.where, found=type(stored).__name__)
    return stored.extent


def base_groups(inner: RankFile) -> tuple[ParamGroup, ...]:
    """Return a rank's param groups. They list flat buffers in place of parameters."""
    return groups_of(inner.content.get("base_optimizer_state") or inner.content.get("optimizer_state_dict"), inner.path)


def in_sub_groups(groups: Iterable[ParamGroup], sub_groups: Sequence[Mapping[str, Shape]]) -> tuple[ParamGroup, ...]:
    """Replace stage 3 sub-groups by their parameters."""
    return tuple(replace(group, fqns=tuple(fqn for i in group.fqns for fqn in sub_groups[int(i)])) for group in groups)


def check_lengths(files: Sequence[RankFile], extents: Sequence[Extent], length: int, role: str) -> None:
    for file, extent in zip(files, extents, strict=True):
        if extent.numel < length:
            raise CorruptError(
                "a rank's partition is too short for its parameters",
                **file.where,
                expected=f"{pluralize(length, 'element')} of {role}",
                found=f"{pluralize(extent.numel, 'element')}",
            )
