"""Nested state dict from a DCP checkpoint's values and paths: the inverse of `write.flatten`."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from ckpt.base.errors import CorruptError
from ckpt.containers.dcp.metadata import Path_

#: Maximum length for lists with gaps.
_LONGEST_LIST = 1 << 20


def nest(leaves: Iterable[tuple[Path_, Any]], path: str) -> dict[str | int, Any]:
    """Return the nested state dict, like torch's `unflatten_state_dict`.

    Raise CorruptError, with the file `path`, if two values have the same path.
    """
    root: dict[str | int, Any] = {}
    node = root
    above: Path_ = ()
    for steps, value in leaves:
        if steps[:-1] != above:  # leaves of one node mostly follow each other
            node, above = root, steps[:-1]
            for step in above:
                inner = node.setdefault(step, _Node())
                if type(inner) is not _Node:
                    raise _conflict(steps, path)
                node = inner
        if steps[-1] in node:
            raise _conflict(steps, path)
        node[steps[-1]] = value
    return {name: _with_lists(value) for name, value in root.items()}


class _Node(dict[str | int, Any]):
    pass


def _conflict(steps: Path_, path: str) -> CorruptError:
    return CorruptError("two values have the same place in the state dict", path=path, fqn=".".join(map(str, steps)))


def _with_lists(value: Any) -> Any:
    if type(value) is not _Node:
        return value
    is_inner = _Node in set(map(type, value.values()))
    inner = {name: _with_lists(item) for name, item in value.items()} if is_inner else dict(value)
    indices = [name for name in inner if type(name) is int]
    if len(indices) != len(inner) or not inner or max(indices) > max(2 * len(inner), _LONGEST_LIST):
        return {str(name): item for name, item in inner.items()}
    return [inner.get(index) for index in range(max(indices) + 1)]
