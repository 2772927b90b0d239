"""Numbers of parameters in an optimizer's state that records no names: found by order, proved by shapes.

An optimizer numbers parameters as they are handed to it: group after group, and in each in the order in which the model
registers them (torch/optim/optimizer.py, `state_dict`).  Three ways to deal them to groups are known: all in one, and
those with weight decay before those without, which are told by name, as HF Trainer does (transformers 5.23, trainer.py,
`get_decay_parameter_names`), or by having less than two dims, as many scripts do.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence

from ckpt.plan.tensors import Shape

#: Names of parameters that HF Trainer gives no weight decay.
_WITHOUT_DECAY = re.compile(r"bias|layernorm|rmsnorm|(?:^|\.)norm(?:$|\.)|_norm(?:$|\.)")


def has_decay(fqn: str) -> bool:
    """Whether HF Trainer gives a parameter weight decay."""
    return not _WITHOUT_DECAY.search(fqn.lower())


def names_by_shapes(
    parameters: Mapping[str, Shape], groups: Sequence[Sequence[Shape | None]]
) -> list[tuple[str, ...]] | None:
    """The fqns of each group of an optimizer, in the order of their numbers; None where the shapes do not prove them.

    `parameters` are the model's in the order in which it registers them, frozen ones included, each tied one once;
    `groups` are the shapes of the optimizer's states by number, None for one without states.  A proof is that the
    shapes of each group fit, in order, and in one way only.
    """
    for names in _ways(parameters, groups):
        if None not in names:
            return [one for one in names if one is not None]
    return None


def _ways(
    parameters: Mapping[str, Shape], groups: Sequence[Sequence[Shape | None]]
) -> Iterator[list[tuple[str, ...] | None]]:
    if len(groups) == 1:
        yield [_only_way(list(parameters.items()), list(groups[0]))]
    if len(groups) != 2:
        return
    by_name = {fqn for fqn in parameters if not has_decay(fqn)}
    by_dims = {fqn for fqn, shape in parameters.items() if len(shape) < 2}
    for spared in (by_name, by_dims):
        parts = [[item for item in parameters.items() if (item[0] in spared) == without] for without in (False, True)]
        yield [_only_way(part, list(shapes)) for part, shapes in zip(parts, groups, strict=True)]


def _only_way(parameters: list[tuple[str, Shape]], shapes: list[Shape | None]) -> tuple[str, ...] | None:
    """The names that `shapes` belong to as a part of `parameters` in the same order, if that is so in one way only."""
    first = _first_way(parameters, shapes)
    last = _first_way(parameters[::-1], shapes[::-1])
    return first if first is not None and last is not None and first == last[::-1] else None


def _first_way(parameters: list[tuple[str, Shape]], shapes: list[Shape | None]) -> tuple[str, ...] | None:
    names: list[str] = []
    left = iter(parameters)
    for shape in shapes:
        name = next((fqn for fqn, own in left if shape is None or own == shape), None)
        if name is None:
            return None
        names.append(name)
    return tuple(names)
