"""Reuse of a parsed pickle for other ranks' files with the same pickle and different elements."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import PurePosixPath, PureWindowsPath
from typing import Any

from ckpt.containers.torchfile.tree import LEAVES
from ckpt.containers.torchfile.values import TIMES, Array, Record, Storage, StorageType, StoredDict, StoredTensor
from ckpt.plan.tensors import Extent

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
    def keep(self, pickle: bytes, parsed: Parsed) -> None:
        if _MIN_PICKLE <= len(pickle) <= _MAX_PICKLE:
            if len(self) >= _MOST:
                del self[next(iter(self))]
            self[pickle] = parsed


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
