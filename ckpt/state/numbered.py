"""Names for numbered optimizer states, proven by shapes.

An optimizer numbers its parameters by group, then by the order in the model (torch/optim/optimizer.py, `state_dict`).
Three groupings are known: one group; with weight decay before without, chosen by name like HF Trainer (transformers
5.23, trainer.py, `get_decay_parameter_names`); or the same, chosen by having fewer than two dims, like many scripts.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence

from ckpt.plan.tensors import Shape

_WITHOUT_DECAY = re.compile(r"bias|layernorm|rmsnorm|(?:^|\.)norm(?:$|\.)|_norm(?:$|\.)")


def has_decay(fqn: str) -> bool:
    """Return True if HF Trainer applies weight decay to a parameter."""
    return not _WITHOUT_DECAY.search(fqn.lower())


def names_by_shapes(
    parameters: Mapping[str, Shape], groups: Sequence[Sequence[Shape | None]]
) -> list[tuple[str, ...]] | None:
    """Return the fqns in each group by number, or None if the shapes do not prove them.

    `parameters` lists the model's parameters in order, including frozen ones, each tied one once. `groups` lists the
    optimizer states' shapes by number, None for a parameter without states. The proof: each group's shapes fit in
    order, in exactly one way.
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
    """Return the names for `shapes` if exactly one subsequence of `parameters` matches."""
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
