"""Check that an unpickled tree is safe to walk with simple recursive code."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from itertools import chain
from typing import Any, cast

from ckpt.containers.torchfile.values import (
    MAX_DEPTH,
    Array,
    Global,
    MalformedError,
    Record,
    Storage,
    StoredDict,
    StoredTensor,
)
from ckpt.plan.dtypes import DType


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
    budget = 10 * length + (1 << 20)
    done: dict[int, tuple[int, int]] = {}  # id -> (height, elements when unfolded)
    open_: set[int] = set()
    # One frame per open container: [container, children left, height, elements].
    frames: list[list[Any]] = [[root, iter(children(root)), 1, 1]] if is_branch(root) else []
    if frames:
        open_.add(id(root))
    while frames:
        frame = frames[-1]
        for child in frame[1]:
            kind = type(child)
            if kind in LEAVES:
                frame[3] += 1
                continue
            # A shape, by far the most frequent branch.
            if kind is tuple and len(child) <= 8 and LEAVES.issuperset(map(type, child)):
                frame[2] = max(frame[2], 2)
                frame[3] += 1 + len(child)
                continue
            # DCP's metadata has three records with plain fields per chunk.
            if kind is Record and (elements := _plain_record(child)):
                frame[2] = max(frame[2], 4)
                frame[3] += elements
                continue
            if not is_branch(child):
                frame[3] += 1
                continue
            known = done.get(id(child))
            if known is not None:
                if known[0] >= frame[2]:
                    frame[2] = known[0] + 1
                frame[3] += known[1]
                continue
            if id(child) in open_:
                if not _cycle_has_record(frames, child):
                    raise MalformedError("an object that contains itself")
                continue
            if len(frames) >= MAX_DEPTH:
                raise MalformedError(f"objects nested more than {MAX_DEPTH} deep")
            open_.add(id(child))
            frames.append([child, iter(children(child)), 1, 1])
            break
        else:
            frames.pop()
            value, _, height, elements = frame
            open_.discard(id(value))
            done[id(value)] = (height, elements)
            if height > MAX_DEPTH:
                raise MalformedError(f"objects nested more than {MAX_DEPTH} deep")
            if elements > budget:
                raise MalformedError("an object too large after unfolding")
            if frames:
                above = frames[-1]
                if height >= above[2]:
                    above[2] = height + 1
                above[3] += elements


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


def _cycle_has_record(frames: list[list[Any]], start: Any) -> bool:
    for frame in reversed(frames):
        if type(frame[0]) is Record:
            return True
        if frame[0] is start:
            return False
    return False
