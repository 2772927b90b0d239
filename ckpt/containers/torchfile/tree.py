"""Unpickled trees: a check that simple recursive code can walk them, and copies for other ranks' files.

Ranks often write the same pickle with different elements.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import PurePosixPath, PureWindowsPath
from typing import Any, cast

from ckpt.containers.torchfile.values import (
    MAX_DEPTH,
    TIMES,
    Array,
    Global,
    MalformedError,
    Record,
    Storage,
    StorageType,
    StoredDict,
    StoredTensor,
)
from ckpt.plan.dtypes import DType
from ckpt.plan.tensors import Extent


def children(value: Any) -> Iterable[Any]:
    kind = type(value)
    if kind is dict:
        return chain(value.keys(), value.values())
    if kind is StoredDict:
        return chain(value.keys(), value.values(), (value.attributes,))
    if kind is Record:
        return (value.args, value.kwargs, value.state)
    if kind is StoredTensor:
        return (value.attributes,)
    if kind is Array:
        return (value.record, value.objects)
    return cast(Iterable[Any], value)


LEAVES = frozenset((str, int, float, bool, type(None), bytes, DType, Storage, Global, complex, bytearray))
_BRANCHES = frozenset((dict, list, tuple, StoredDict, Record, set, frozenset, deque, Array))


def is_branch(value: Any) -> bool:
    kind = type(value)
    return kind in _BRANCHES or (kind is StoredTensor and value.attributes is not None)


def tensors_in(value: Any) -> Iterator[StoredTensor]:
    """Visit each container once, even if a pickle refers to it many times."""
    left, seen = [value], set()
    while left:
        one = left.pop()
        if isinstance(one, StoredTensor):
            yield one
        elif isinstance(one, Record | Mapping | list | tuple) and id(one) not in seen:
            seen.add(id(one))
            inner = one.attributes if isinstance(one, Record) else one
            left += inner.values() if isinstance(inner, Mapping) else inner


def check_tree(root: Any, length: int) -> None:
    """Raise MalformedError for deep nesting, cycles without a `Record`, and lists that unfold to a huge tree."""
    if is_branch(root):
        _measured(root, {}, {}, 10 * length + (1 << 20))


def _measured(value: Any, above: dict[int, Any], done: dict[int, tuple[int, int]], budget: int) -> tuple[int, int]:
    """Return the height of a container and its number of elements when unfolded.

    `above` holds the containers around it, outermost first, and `done` all finished ones, both by id.
    """
    if len(above) >= MAX_DEPTH:
        raise MalformedError(f"objects nested more than {MAX_DEPTH} deep")
    above[id(value)] = value
    height, elements = 1, 1
    for child in children(value):
        kind = type(child)
        if kind in LEAVES:
            elements += 1
        # A shape, by far the most frequent branch.
        elif kind is tuple and len(child) <= 8 and LEAVES.issuperset(map(type, child)):
            height = max(height, 2)
            elements += 1 + len(child)
        # DCP's metadata has three records with plain fields per chunk.
        elif kind is Record and (few := _plain_record(child)):
            height = max(height, 4)
            elements += few
        elif not is_branch(child):
            elements += 1
        elif id(child) in above:
            if not _cycle_has_record(above, child):
                raise MalformedError("an object that contains itself")
        else:
            inner = done.get(id(child)) or _measured(child, above, done, budget)
            height = max(height, inner[0] + 1)
            elements += inner[1]
    del above[id(value)]
    if height > MAX_DEPTH:
        raise MalformedError(f"objects nested more than {MAX_DEPTH} deep")
    if elements > budget:
        raise MalformedError("an object too large after unfolding")
    done[id(value)] = height, elements
    return height, elements


def _plain_record(record: Record) -> int:
    """Return the number of elements in a small record with plain fields (depth at most 3), otherwise 0."""
    args, state = record.args, record.state
    if state is None:  # DCP's record for a plain value
        return 0 if args or record.kwargs else 4
    if args or record.kwargs or type(state) is not dict or len(state) > 8:
        return 0
    if LEAVES.issuperset(map(type, chain(state, state.values()))):
        return 4 + 2 * len(state)
    elements = 4 + len(state)
    for value in state.values():
        kind = type(value)
        if kind in LEAVES:
            elements += 1
        elif kind is tuple and len(value) <= 8 and LEAVES.issuperset(map(type, value)):
            elements += 1 + len(value)
        else:
            return 0
    return elements if LEAVES.issuperset(map(type, state)) else 0


def _cycle_has_record(above: dict[int, Any], start: Any) -> bool:
    for one in reversed(above.values()):
        if type(one) is Record:
            return True
        if one is start:
            return False
    return False


#: Smaller pickles parse quickly, larger ones would fill the memory.
_MIN_PICKLE, _MAX_PICKLE = 4 << 10, 16 << 20
#: Ranks have a model file and an optimizer file.
_MOST = 4

_UNCHANGED = (LEAVES - {Storage, bytearray}) | {*TIMES.values(), PurePosixPath, PureWindowsPath, StorageType}


@dataclass(frozen=True, slots=True)
class Parsed:
    root: Any
    storages: Mapping[str, Storage]
    table: object
    start: int

    def in_file(self, path: str) -> Any:
        """Return a copy of the root with tensors in `path`, or None if it holds an unknown type."""
        try:
            return _copied(self.root, path, {}, set())
        except _UnknownError:
            return None


class Pickles(dict[bytes, Parsed]):
    def keep(self, pickle: bytes, parsed: Parsed) -> bool:
        """Return False if the pickle is too small or too large to be kept."""
        if is_kept := _MIN_PICKLE <= len(pickle) <= _MAX_PICKLE:
            if len(self) >= _MOST:
                del self[next(iter(self))]
            self[pickle] = parsed
        return is_kept


class _UnknownError(Exception):
    pass


def _copied(value: Any, path: str, done: dict[int, Any], open_: set[int]) -> Any:
    """Copy `value`. A shared mutable object stays shared in the copy."""
    kind = type(value)
    if kind in _UNCHANGED:
        return value
    known = done.get(id(value))
    if known is not None:
        return known
    if kind is StoredTensor:
        attributes = _copied(value.attributes, path, done, open_)
        old = value.extent
        extent = Extent(path, old.offset, old.dtype, old.shape, old.strides)
        copy: Any = StoredTensor(extent, value.requires_grad, attributes)
    elif kind is Storage:
        copy = replace(value, path=path)
    elif kind is tuple or kind is frozenset:
        if _UNCHANGED.issuperset(map(type, value)):
            return value
        if id(value) in open_:  # it contains itself through a record
            raise _UnknownError
        open_.add(id(value))
        copy = kind([_copied(item, path, done, open_) for item in value])
        open_.discard(id(value))
    elif kind is list or kind is set or kind is deque:
        copy = done[id(value)] = kind() if kind is not deque else deque(maxlen=value.maxlen)
        add = copy.add if kind is set else copy.append
        for item in value:
            add(_copied(item, path, done, open_))
    elif kind is dict or kind is StoredDict:
        copy = done[id(value)] = {} if kind is dict else StoredDict(value.kind)
        for key, item in value.items():
            key = key if type(key) is str else _copied(key, path, done, open_)
            copy[key] = item if type(item) in _UNCHANGED else _copied(item, path, done, open_)
        if kind is StoredDict:
            copy.attributes = _copied(value.attributes, path, done, open_)
    elif kind is Record or kind is Array:
        copy = done[id(value)] = object.__new__(kind)
        for name in kind.__slots__:
            setattr(copy, name, _copied(getattr(value, name), path, done, open_))
    else:
        raise _UnknownError
    done[id(value)] = copy
    return copy
