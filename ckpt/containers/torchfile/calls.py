"""Replacements for the functions that a pickle calls.

The torch functions follow torch 2.13's `_utils.py`, `_tensor.py`, `serialization.py` and `storage.py`.
"""

from __future__ import annotations

import datetime
import struct
from collections import deque
from collections.abc import Callable, Mapping
from pathlib import PurePosixPath, PureWindowsPath
from typing import Any

from ckpt.base.errors import UnsafeError
from ckpt.base.text import pluralize
from ckpt.containers.torchfile.machine import Machine
from ckpt.containers.torchfile.unknown_classes import class_of
from ckpt.containers.torchfile.values import (
    MAX_DIMS,
    MAX_EXPANDED,
    TIMES,
    Array,
    Global,
    MalformedError,
    Record,
    Storage,
    StoredDict,
    StoredTensor,
    short,
)
from ckpt.plan.dtypes import BY_NAME, DType
from ckpt.plan.tensors import Extent

Builder = Callable[[Machine, Global, tuple[Any, ...]], Any]

_MAX_INT64 = (1 << 63) - 1
_PLAIN_TENSORS = {("torch", "Tensor"), ("torch.nn.parameter", "Parameter"), ("torch.nn.parameter", "Buffer")}


def record(machine: Machine, cls: Global, args: tuple[Any, ...]) -> Record:
    return Record(cls.module, cls.name, args, fields=cls.fields)


def _getattr(machine: Machine, _: Global, args: tuple[Any, ...]) -> Any:
    """Resolve enum members (Python 3.11.0 to 3.11.3) and nested classes (protocol 2), only for names in the table."""
    found: str | None = None
    if len(args) == 2 and type(args[0]) is Global and type(args[1]) is str:
        cls, name = args
        key = cls.module, f"{cls.name}.{name}"
        nested = machine.table.get(key) if cls.is_listed else class_of(*key)
        if nested is not None:
            return nested
        members = dict(map(_member, cls.members.split()))
        if name in members:
            return Record(cls.module, cls.name, (members[name],))
        found = f"{cls.typename}, {name}"
    raise UnsafeError(
        "the pickle calls builtins.getattr on an unsupported object; nothing was run",
        path=machine.path,
        found=found,
    )


def _member(word: str) -> tuple[str, Any]:
    """Read a word of `Global.members`."""
    name, given, text = word.partition("=")
    if not text:
        return name, name if given else name.lower()
    if text.startswith("torch."):
        return name, BY_NAME[text.removeprefix("torch.")]
    return name, None if text == "None" else int(text) if text.lstrip("-").isdigit() else text


def _reconstructor(machine: Machine, _: Global, args: tuple[Any, ...]) -> Any:
    """Handle `copyreg._reconstructor(cls, object, None)` (protocols 0 and 1)."""
    cls, base, state = args
    if type(base) is not Global or base.name != "object" or state is not None:
        raise MalformedError("an object of a class derived from a built-in class")
    return machine.new(cls, ()) if type(cls) is Global else machine.call(cls, ())


def _encode(machine: Machine, _: Global, args: tuple[Any, ...]) -> bytes:
    """Handle `_codecs.encode(text, 'latin1')`, protocol 2's form of bytes."""
    text, encoding = args
    if type(text) is not str or encoding not in ("latin1", "latin-1"):
        raise MalformedError("bytes in an unknown encoding")
    machine.spend(len(text))
    return text.encode("latin-1")


def _bytes(machine: Machine, _: Global, args: tuple[Any, ...]) -> bytes:
    if args:
        raise MalformedError("arguments of bytes")
    return b""


def _bytearray(machine: Machine, _: Global, args: tuple[Any, ...]) -> bytearray:
    if not args:
        return bytearray()
    if len(args) == 2:  # protocol 2, Python up to 3.7
        return bytearray(_encode(machine, _, args))
    (data,) = args
    if type(data) is not bytes:  # an int would allocate that many bytes
        raise MalformedError("a bytearray with an argument other than bytes")
    machine.spend(len(data))
    return bytearray(data)


def _items(machine: Machine, args: tuple[Any, ...]) -> Any:
    if not args:
        return ()
    (items,) = args
    if type(items) not in (list, tuple, set, frozenset, dict, StoredDict):
        raise MalformedError(f"a container made from a {type(items).__name__}")
    machine.spend(len(items))
    return items


def _set(machine: Machine, _: Global, args: tuple[Any, ...]) -> set[Any]:
    made: set[Any] = set()
    machine.set_update(made, _items(machine, args))
    return made


def _ordered_dict(machine: Machine, cls: Global, args: tuple[Any, ...]) -> StoredDict:
    made = StoredDict(cls.name)
    if not args:  # every tensor has an empty one for its hooks
        return made
    items = _items(machine, args)
    if isinstance(items, dict):
        made.update(items)
    else:
        for key, value in items:
            machine.dict_update(made, [key, value])
    return made


def _defaultdict(machine: Machine, cls: Global, args: tuple[Any, ...]) -> StoredDict:
    if args and args[0] is not None and type(args[0]) is not Global:
        raise MalformedError("a default factory other than a class")
    return _ordered_dict(machine, cls, args[1:])


def _deque(machine: Machine, _: Global, args: tuple[Any, ...]) -> deque[Any]:
    maxlen = args[1] if len(args) > 1 else None
    if maxlen is not None and (type(maxlen) is not int or not 0 <= maxlen < 1 << 62):
        raise MalformedError("the length of a deque")
    return deque(_items(machine, args[:1]), maxlen)


def _call_builder(kind: Callable[..., Any], num_args: int, types: tuple[type, ...], what: str) -> Builder:
    def build(machine: Machine, cls: Global, args: tuple[Any, ...]) -> Any:
        if len(args) != num_args:
            raise ValueError
        if any(type(arg) not in types for arg in args):
            raise MalformedError(what)
        return kind(*args)

    return build


def _path(machine: Machine, cls: Global, args: tuple[Any, ...]) -> PurePosixPath | PureWindowsPath:
    if any(type(part) is not str for part in args):
        raise MalformedError("a path with parts other than text")
    machine.spend(sum(map(len, args)))
    return PureWindowsPath(*args) if "Windows" in cls.name else PurePosixPath(*args)


_TIME_ARGUMENTS = (bytes, int, str, datetime.timedelta, datetime.timezone)


def _time(machine: Machine, cls: Global, args: tuple[Any, ...]) -> Any:
    if any(type(arg) not in _TIME_ARGUMENTS for arg in args):
        raise MalformedError(f"a {cls.name} with non-numeric arguments")
    return TIMES[cls.name](*args)


# --- numpy ---------------------------------------------------------------------------------------------------

_SCALARS = {"b1": "?", "i1": "b", "u1": "B", "i2": "h", "u2": "H", "i4": "i", "u4": "I", "i8": "q", "u8": "Q"}
_SCALARS |= {"f2": "e", "f4": "f", "f8": "d", "c8": "ff", "c16": "dd"}


def _frombuffer(machine: Machine, _: Global, args: tuple[Any, ...]) -> Array:
    """Handle `_frombuffer(data, dtype, shape, order)`, protocol 5's form of an array."""
    data, dtype, shape, order = args[:4]
    return Array().fill(shape, dtype, data, order == "F", machine.spend)


def _scalar(machine: Machine, _: Global, args: tuple[Any, ...]) -> Any:
    """Handle `scalar(dtype, bytes)`: a Python number if possible."""
    dtype, data = args
    array = Array().fill((), dtype, data, False, machine.spend)
    code = _SCALARS.get(array.dtype[1:])
    if code is None:
        return array
    values = struct.unpack((">" if array.dtype[0] == ">" else "<") + code, array.data)
    return complex(*values) if len(values) == 2 else values[0]


# --- torch ---------------------------------------------------------------------------------------------------


def _size(machine: Machine, _: Global, args: tuple[Any, ...]) -> tuple[Any, ...]:
    (size,) = args
    if type(size) is list:
        machine.spend(len(size))
        return tuple(size)
    if type(size) is not tuple:
        raise MalformedError("a torch.Size with an argument other than a tuple")
    return size


def _tensor_extent(storage: Any, dtype: Any, offset: Any, shape: Any, strides: Any) -> Extent:
    """Raise MalformedError if the tensor leaves its storage."""
    if type(storage) is not Storage or type(dtype) is not DType:
        raise MalformedError("a tensor without a storage")
    if type(shape) is not tuple or type(strides) is not tuple or len(shape) != len(strides):
        raise MalformedError("a tensor's shape and strides do not fit")
    if len(shape) > MAX_DIMS or type(offset) is not int or offset < 0:
        raise MalformedError("a tensor's shape or offset is invalid")
    numel, reach = 1, 0
    for n, step in zip(shape, strides, strict=True):
        if type(n) is not int or type(step) is not int or n < 0 or step < 0 or n > _MAX_INT64 or step > _MAX_INT64:
            raise MalformedError("a tensor's shape or strides are negative, or not 64-bit integers")
        numel *= n
        reach += (n - 1) * step
    itemsize = dtype.itemsize
    if numel == 0:
        return Extent(storage.path, storage.offset, dtype, shape, strides)
    end = (offset + reach + 1) * itemsize
    if end > storage.nbytes:
        raise MalformedError(
            f"a tensor of shape {short(shape)} and strides {short(strides)} ends at byte {short(end)} "
            f"of a storage of {pluralize(storage.nbytes, 'byte')}"
        )
    if numel * itemsize > storage.nbytes and numel * itemsize > MAX_EXPANDED:
        raise MalformedError(f"a tensor of shape {short(shape)} over a storage of {pluralize(storage.nbytes, 'byte')}")
    return Extent(storage.path, storage.offset + offset * itemsize, dtype, shape, strides)


def _plain_bits(machine: Machine, metadata: Any) -> None:
    if metadata:
        machine.unsupported("a tensor with its conjugate or negative bit set (call resolve_conj() and resolve_neg())")


def _tensor(machine: Machine, _: Global, args: tuple[Any, ...]) -> StoredTensor:
    """Handle `_rebuild_tensor_v2(storage, offset, size, stride, requires_grad, backward_hooks, metadata=None)`."""
    storage, offset, shape, strides = args
    return StoredTensor(_tensor_extent(storage, storage.dtype, offset, shape, strides))


def _tensor_v2(machine: Machine, _: Global, args: tuple[Any, ...]) -> StoredTensor:
    """Handle `_rebuild_tensor_v2(storage, offset, size, stride, requires_grad, backward_hooks, metadata=None)`."""
    if len(args) > 6:
        if len(args) > 7:
            raise MalformedError("a tensor with too many arguments")
        _plain_bits(machine, args[6])
    storage, offset, shape, strides, requires_grad = args[:5]
    return StoredTensor(_tensor_extent(storage, storage.dtype, offset, shape, strides), requires_grad is True)


def _tensor_v3(machine: Machine, _: Global, args: tuple[Any, ...]) -> StoredTensor:
    """Handle `_rebuild_tensor_v3(storage, offset, size, stride, requires_grad, hooks, dtype, metadata=None)`.

    torch uses it for dtypes without a storage class.
    """
    if len(args) > 7:
        _plain_bits(machine, args[7])
    storage, offset, shape, strides, requires_grad, _hooks, dtype = args[:7]
    return StoredTensor(_tensor_extent(storage, dtype, offset, shape, strides), requires_grad is True)


def _parameter(machine: Machine, _: Global, args: tuple[Any, ...]) -> Any:
    """Handle `_rebuild_parameter(data, requires_grad, backward_hooks[, state])`."""
    data, requires_grad = args[:2]
    state = args[3] if len(args) > 3 else None
    if type(data) is Record:  # a DTensor parameter
        return data
    if type(data) is not StoredTensor:
        raise MalformedError("a parameter without a tensor")
    return StoredTensor(data.extent, requires_grad is True, _attributes(machine, state))


def _attributes(machine: Machine, state: Any) -> Mapping[str, Any] | None:
    if state is None or type(state) is dict:
        return state or None
    if type(state) is tuple and len(state) == 2 and all(part is None or type(part) is dict for part in state):
        machine.spend(sum(len(part) for part in state if part))
        return {**(state[0] or {}), **(state[1] or {})} or None
    raise MalformedError("a tensor's attributes are not a dict")


def _from_type(machine: Machine, _: Global, args: tuple[Any, ...]) -> Any:
    """Handle `_rebuild_from_type_v2(function, type, args, state)`: a tensor with attributes, or a subclass."""
    function, cls, inner, state = args
    if type(function) is not Global or type(cls) is not Global or type(inner) is not tuple:
        raise MalformedError("an invalid tensor subclass")
    if function.build is _wrapper_subclass:
        if not cls.is_listed:
            machine.unsupported(f"a tensor of class {cls.typename}")
        # DTensor, ShardedTensor: no elements, only a state.
        return Record(cls.module, cls.name, inner, state=state)
    # Only these, so that no function calls itself here.
    if function.build not in (_tensor, _tensor_v2, _tensor_v3, _parameter, _meta, _from_cpu_tensor):
        raise MalformedError("a tensor subclass without a tensor function")
    made = function.build(machine, function, inner)
    if (cls.module, cls.name) not in _PLAIN_TENSORS or type(made) is not StoredTensor:
        machine.unsupported(f"a tensor of class {cls.typename}")
    return StoredTensor(made.extent, made.requires_grad, _attributes(machine, state))


def _unsupported(what: str) -> Builder:
    return lambda machine, cls, args: machine.unsupported(what)


_wrapper_subclass = _unsupported("a tensor subclass without storage")
_meta = _unsupported("a tensor on the meta device")


def _from_cpu_tensor(machine: Machine, _: Global, args: tuple[Any, ...]) -> StoredTensor:
    """Handle `_rebuild_device_tensor_from_cpu_tensor(data, dtype, device, requires_grad)` (XLA)."""
    data, dtype, _device, requires_grad = args
    if type(data) is not StoredTensor or dtype is not data.dtype:
        raise MalformedError("a device tensor with data in another dtype")
    return StoredTensor(data.extent, requires_grad is True)


#: (modules, names, builder) for functions and classes.
FUNCTIONS: tuple[tuple[str, str, Builder], ...] = (
    ("builtins __builtin__", "set", _set),
    ("builtins __builtin__", "frozenset", lambda machine, cls, args: frozenset(_set(machine, cls, args))),
    ("builtins __builtin__", "bytes", _bytes),
    ("builtins __builtin__", "bytearray", _bytearray),
    (
        "builtins __builtin__",
        "complex",
        _call_builder(complex, 2, (float,), "a complex number with non-numeric parts"),
    ),
    (
        "builtins __builtin__",
        "slice",
        _call_builder(slice, 3, (int, type(None)), "a slice with non-integer bounds"),
    ),
    ("builtins __builtin__", "range xrange", _call_builder(range, 3, (int,), "a range with non-integer bounds")),
    ("builtins __builtin__", "getattr", _getattr),
    ("copyreg copy_reg", "_reconstructor", _reconstructor),
    ("_codecs", "encode", _encode),
    ("collections", "OrderedDict Counter", _ordered_dict),
    ("collections", "defaultdict", _defaultdict),
    ("collections", "deque", _deque),
    ("datetime", "datetime date time timedelta timezone", _time),
    # Python 3.13 moved the classes to `pathlib._local`.
    ("pathlib pathlib._local", "PosixPath PurePosixPath WindowsPath PureWindowsPath", _path),
    # numpy 2 renamed `numpy.core` to `numpy._core`.
    # `_reconstruct(ndarray, (0,), b'b')`: an empty array. Its state follows.
    ("numpy.core.multiarray numpy._core.multiarray", "_reconstruct", lambda machine, cls, args: Array()),
    ("numpy.core.multiarray numpy._core.multiarray", "scalar", _scalar),
    ("numpy.core.numeric numpy._core.numeric", "_frombuffer", _frombuffer),
    ("torch", "Size", _size),
    ("torch._utils", "_rebuild_tensor", _tensor),
    ("torch._utils", "_rebuild_tensor_v2", _tensor_v2),
    ("torch._utils", "_rebuild_tensor_v3", _tensor_v3),
    ("torch._utils", "_rebuild_parameter _rebuild_parameter_with_state", _parameter),
    ("torch._utils", "_rebuild_meta_tensor_no_storage", _meta),
    ("torch._utils", "_rebuild_wrapper_subclass", _wrapper_subclass),
    ("torch._utils", "_rebuild_device_tensor_from_cpu_tensor", _from_cpu_tensor),
    # torch renamed `torch.tensor` to `torch._tensor` in 1.8.
    ("torch._tensor torch.tensor", "_rebuild_from_type_v2", _from_type),
)
