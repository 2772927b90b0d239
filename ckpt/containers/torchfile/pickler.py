"""Pickler for the values that `ckpt.containers.torchfile.unpickle` reads. It imports nothing.

Without arguments, NEWOBJ creates a `Record` (`__new__`, never `__init__`). With arguments, REDUCE does (enums,
functions, namedtuples, `torch.device`). Then BUILD sets the state.

A repeated object (by identity), text or size is written once. Sets are sorted, so every process writes the same bytes.

Opcodes follow Python 3.13's `pickle.py`. Tensors follow torch 2.13's `_tensor.py`, `_utils.py`, `nn/parameter.py` and
`serialization.py`. `torch.load(weights_only=True)` accepts every opcode and name in protocol 2 output, if it accepts
the classes themselves.
"""

from __future__ import annotations

import struct
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from itertools import islice
from pathlib import PurePosixPath, PureWindowsPath
from typing import Any

from ckpt.base.errors import LossError
from ckpt.containers.torchfile.table import STORAGES
from ckpt.containers.torchfile.values import TIMES, Array, Global, Record, StoredDict
from ckpt.plan.dtypes import DType

#: Batch length in Python's own picklers.
_BATCH = 1000

#: Other dtypes are written as bytes (`UntypedStorage`).
_STORAGES = {dtype: name for name, dtype in STORAGES.items() if name != "UntypedStorage"}


class Size(tuple[int, ...]):
    __slots__ = ()


@dataclass(frozen=True, slots=True)
class StreamedDict:
    """A dict with many items, each freed after writing. No other object refers to them."""

    made: Iterable[tuple[Any, Any]]


@dataclass(frozen=True, slots=True)
class TensorRef:
    """`key` names the storage with `numel` elements of `dtype`."""

    dtype: DType
    key: str
    numel: int
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    requires_grad: bool = False
    attributes: Mapping[str, Any] | None = None
    parameter: bool = False


def dumps(value: Any, *, protocol: int = 2, tensors: Callable[[Any], TensorRef | None] | None = None) -> bytes:
    """Return the pickle of `value`. torch.save uses protocol 2, DCP's `.metadata` protocol 4.

    `tensors` is called for every object without a rule here, and returns None if it is no tensor. Raise LossError for
    an object that cannot be written.
    """
    if protocol not in (2, 4):
        raise ValueError(f"protocol {protocol}: only 2 and 4 are written")
    encoder = _Encoder(protocol, tensors, bytearray((0x80, protocol)))
    encoder.save(value)
    out = encoder.out
    del encoder  # free its memo before copying a large buffer
    out += b"."
    return bytes(out)


@dataclass(slots=True)
class _Encoder:
    protocol: int
    tensors: Callable[[Any], TensorRef | None] | None
    out: bytearray = field(default_factory=bytearray)
    #: Opcodes that repeat a value: by identity (the objects are kept so that their ids are not reused), or by value.
    memo: dict[int, bytes] = field(default_factory=dict)
    kept: list[Any] = field(default_factory=list)
    texts: dict[str, bytes] = field(default_factory=dict)
    names: dict[tuple[str, str], bytes] = field(default_factory=dict)
    sizes: dict[Size, bytes] = field(default_factory=dict)
    keeps: bool = True

    def save(self, value: Any) -> None:
        kind = type(value)
        if kind is str:
            known = self.texts.get(value)
            if known is None:
                self.text(value)
            else:
                self.out += known
            return
        writer = _PLAIN.get(kind)
        if writer is not None:
            writer(self, value)
            return
        known = self.memo.get(id(value))
        if known is not None:
            self.out += known
            return
        writer = _OBJECTS.get(kind)
        if writer is not None:
            writer(self, value)
            return
        reference = value if kind is TensorRef else self.tensors(value) if self.tensors is not None else None
        if reference is None:
            raise LossError(f"an object of type {kind.__module__}.{kind.__qualname__} cannot be pickled")
        self.tensor(reference)
        self.put(value)

    def remember(self) -> bytes:
        """Write the opcode that remembers the last value, and return the opcode that repeats it."""
        index = len(self.memo) + len(self.texts) + len(self.names) + len(self.sizes)
        if self.protocol >= 4:
            self.out += b"\x94"
        elif index < 256:
            self.out += b"q%c" % index
        else:
            self.out += b"r" + _u32(index)
        return b"h%c" % index if index < 256 else b"j" + _u32(index)

    def put(self, value: Any) -> None:
        if self.keeps:
            self.memo[id(value)] = self.remember()
            self.kept.append(value)

    def text(self, value: str) -> None:
        known = self.texts.get(value)
        if known is not None:
            self.out += known
            return
        data = value.encode("utf-8", "surrogatepass")
        if self.protocol >= 4 and len(data) < 256:
            self.out += b"\x8c%c" % len(data)
        elif len(data) <= 0xFFFFFFFF:
            self.out += b"X" + _u32(len(data))
        else:
            raise LossError("a text of more than 4 GiB cannot be pickled")
        self.out += data
        self.texts[value] = self.remember()

    def name(self, module: str, name: str) -> None:
        """Nested classes have the protocol's own form."""
        if module == "__builtin__":  # Python 2's name, kept by protocol 2
            module, name = "builtins", _PYTHON2_NAMES.get(name, name)
        known = self.names.get((module, name))
        if known is not None:
            self.out += known
            return
        outer, _, inner = name.rpartition(".")
        if self.protocol >= 4:
            self.text(module)
            self.text(name)
            self.out += b"\x93"
        elif outer:
            self.name("builtins", "getattr")
            self.name(module, outer)
            self.text(inner)
            self.out += b"\x86R"
        else:
            self.out += b"c" + f"{module}\n{name}\n".encode()
        self.names[module, name] = self.remember()

    def call(self, module: str, name: str, *args: Any) -> None:
        self.name(module, name)
        self.plain_tuple(args)
        self.out += b"R"

    def plain_tuple(self, items: tuple[Any, ...]) -> None:
        if len(items) > 3:
            self.out += b"("
        for item in items:
            self.save(item)
        self.out += _TUPLES[min(len(items), 4)]

    def list_items(self, items: Iterable[Any]) -> None:
        for batch in _batches(items):
            self.out += b"("
            for item in batch:
                self.save(item)
            self.out += b"e"

    def dict_items(self, items: Iterable[tuple[Any, Any]]) -> None:
        for batch in _batches(items):
            self.out += b"("
            for key, value in batch:
                self.save(key)
                self.save(value)
            self.out += b"u"

    def tensor(self, ref: TensorRef) -> None:
        """Write a tensor like torch's `__reduce_ex__`."""
        if ref.parameter:
            self.name("torch._utils", "_rebuild_parameter_with_state" if ref.attributes else "_rebuild_parameter")
            self.out += b"("
            self.plain(ref, requires_grad=False)
            _bool(self, ref.requires_grad)
            self.no_hooks()
            if ref.attributes:
                self.save(dict(ref.attributes))
            self.out += b"tR"
        elif ref.attributes:
            self.name("torch._tensor", "_rebuild_from_type_v2")
            self.out += b"("
            self.name("torch._utils", _rebuild(ref))
            self.name("torch", "Tensor")
            self.rebuild_args(ref, ref.requires_grad)
            self.save(dict(ref.attributes))
            self.out += b"tR"
        else:
            self.plain(ref, ref.requires_grad)

    def plain(self, ref: TensorRef, requires_grad: bool) -> None:
        self.name("torch._utils", _rebuild(ref))
        self.rebuild_args(ref, requires_grad)
        self.out += b"R"

    def rebuild_args(self, ref: TensorRef, requires_grad: bool) -> None:
        """Write `(storage, offset, shape, strides, requires_grad, hooks[, dtype])`."""
        kind = _STORAGES.get(ref.dtype.name)
        self.out += b"(("
        self.text("storage")
        self.name("torch" if kind else "torch.storage", kind or "UntypedStorage")
        self.text(ref.key)
        self.text("cpu")
        _int(self, ref.numel if kind else ref.numel * ref.dtype.itemsize)
        self.out += b"tQ"
        _int(self, ref.offset)
        self.plain_tuple(ref.shape)
        self.plain_tuple(ref.strides)
        _bool(self, requires_grad)
        self.no_hooks()
        if not kind:
            self.name("torch", ref.dtype.name)
        self.out += b"t"

    def no_hooks(self) -> None:
        self.name("collections", "OrderedDict")
        self.out += b")R"


def _rebuild(ref: TensorRef) -> str:
    return "_rebuild_tensor_v2" if ref.dtype.name in _STORAGES else "_rebuild_tensor_v3"


def _batches(items: Iterable[Any]) -> Iterable[list[Any]]:
    left = iter(items)
    while batch := list(islice(left, _BATCH)):
        yield batch


_PYTHON2_NAMES = {"long": "int", "unicode": "str", "xrange": "range"}
_u32 = struct.Struct("<I").pack
_TUPLES = (b")", b"\x85", b"\x86", b"\x87", b"t")


# --- plain values: immutable, so they may be repeated -----------------------------------------------------------


def _bool(encoder: _Encoder, value: bool) -> None:
    encoder.out += b"\x88" if value else b"\x89"


def _int(encoder: _Encoder, value: int) -> None:
    if 0 <= value < 1 << 8:
        encoder.out += b"K%c" % value
    elif 0 <= value < 1 << 16:
        encoder.out += b"M" + struct.pack("<H", value)
    elif -(1 << 31) <= value < 1 << 31:
        encoder.out += b"J" + struct.pack("<i", value)
    else:
        data = value.to_bytes(value.bit_length() // 8 + 1, "little", signed=True)
        encoder.out += (b"\x8a%c" % len(data) if len(data) < 256 else b"\x8b" + struct.pack("<i", len(data))) + data


def _torch_size(encoder: _Encoder, value: Size) -> None:
    known = encoder.sizes.get(value)
    if known is not None:
        encoder.out += known
        return
    encoder.call("torch", "Size", tuple(value))
    encoder.sizes[value] = encoder.remember()


def _steps(encoder: _Encoder, value: slice | range) -> None:
    encoder.call("builtins", type(value).__name__, value.start, value.stop, value.step)


def _time(encoder: _Encoder, value: Any) -> None:
    made = value.__reduce_ex__(2)  # a class and plain arguments
    encoder.call("datetime", type(value).__name__, *made[1])


_PLAIN: dict[Any, Callable[[_Encoder, Any], None]] = {
    type(None): lambda encoder, _: encoder.out.extend(b"N"),
    bool: _bool,
    int: _int,
    float: lambda encoder, value: encoder.out.extend(b"G" + struct.pack(">d", value)),
    complex: lambda encoder, value: encoder.call("builtins", "complex", value.real, value.imag),
    type(...): lambda encoder, _: encoder.name("builtins", "Ellipsis"),
    DType: lambda encoder, value: encoder.name("torch", value.name),
    Global: lambda encoder, value: encoder.name(value.module, value.name),
    Size: _torch_size,
    slice: _steps,
    range: _steps,
    PurePosixPath: lambda encoder, value: encoder.call("pathlib", "PosixPath", *value.parts),
    PureWindowsPath: lambda encoder, value: encoder.call("pathlib", "PureWindowsPath", *value.parts),
    **dict.fromkeys(TIMES.values(), _time),
}


# --- objects, written once and then referenced -----------------------------------------------------------------


def _bytes(encoder: _Encoder, value: bytes) -> None:
    """Protocol 2 has no opcode for bytes, so Python calls a codec."""
    if encoder.protocol == 2:
        encoder.call("_codecs", "encode", value.decode("latin-1"), "latin1")
    elif len(value) < 256:
        encoder.out += b"C%c" % len(value) + value
    elif len(value) <= 0xFFFFFFFF:
        encoder.out += b"B" + _u32(len(value)) + value
    else:
        encoder.out += b"\x8e" + struct.pack("<Q", len(value)) + value
    encoder.put(value)


def _tuple(encoder: _Encoder, value: tuple[Any, ...]) -> None:
    encoder.plain_tuple(value)
    if not value or all(type(item) in _PLAIN for item in value):
        return
    known = encoder.memo.get(id(value))
    if known is None:
        encoder.put(value)
    else:  # it contains itself through a Record
        encoder.out += b"0" + known


def _list(encoder: _Encoder, value: list[Any]) -> None:
    encoder.out += b"]"
    encoder.put(value)
    encoder.list_items(value)


def _dict(encoder: _Encoder, value: dict[Any, Any]) -> None:
    encoder.out += b"}"
    encoder.put(value)
    encoder.dict_items(value.items())


def _streamed_dict(encoder: _Encoder, value: StreamedDict) -> None:
    encoder.out += b"}"
    kept, encoder.keeps = encoder.keeps, False
    encoder.dict_items(value.made)
    encoder.keeps = kept


def _stored_dict(encoder: _Encoder, value: StoredDict) -> None:
    is_counter = value.kind == "Counter"
    encoder.call("collections", value.kind, *([dict(value)] if is_counter else []))
    encoder.put(value)
    if not is_counter:
        encoder.dict_items(value.items())
    if value.attributes is not None:
        encoder.save(value.attributes)
        encoder.out += b"b"


def _built_in(encoder: _Encoder, value: set[Any] | frozenset[Any] | bytearray) -> None:
    """Sort a set's elements, independent of their hashes."""
    is_set = not isinstance(value, bytearray)
    made_of = sorted(value, key=lambda item: (type(item).__name__, repr(item))) if is_set else bytes(value)
    encoder.call("builtins", type(value).__name__, made_of)
    encoder.put(value)


def _deque(encoder: _Encoder, value: deque[Any]) -> None:
    args = ((),) if value.maxlen is None else ((), value.maxlen)
    encoder.call("collections", "deque", *args)
    encoder.put(value)
    encoder.list_items(value)


def _record(encoder: _Encoder, value: Record) -> None:
    if value.typename in _WRAPPERS:
        raise LossError(f"cannot pickle a {value.name}: other ranks hold parts of the same tensor")
    encoder.name(value.module, value.name)
    encoder.plain_tuple(value.args)
    if value.kwargs:
        encoder.save(dict(value.kwargs))
        encoder.out += b"\x92"
    else:
        encoder.out += b"R" if value.args else b"\x81"
    encoder.put(value)
    if value.state is not None:
        encoder.save(value.state)
        encoder.out += b"b"


#: Tensors without own elements.
_WRAPPERS = frozenset(
    {
        "torch.distributed.tensor.DTensor",
        "torch.distributed.tensor._api.DTensor",
        "torch.distributed._tensor.api.DTensor",
        "torch.distributed._shard.sharded_tensor.api.ShardedTensor",
    }
)


def _array(encoder: _Encoder, value: Array) -> None:
    """Write an array like numpy (1.26 and later)."""
    encoder.call("numpy._core.multiarray", "_reconstruct", Global("numpy", "ndarray"), (0,), b"b")
    encoder.put(value)
    data = value.data if value.objects is None else value.objects
    encoder.plain_tuple((1, value.shape, value.record, value.fortran, data))
    encoder.out += b"b"


_OBJECTS: dict[type, Callable[[_Encoder, Any], None]] = {
    bytes: _bytes,
    bytearray: _built_in,
    tuple: _tuple,
    list: _list,
    dict: _dict,
    StreamedDict: _streamed_dict,
    StoredDict: _stored_dict,
    set: _built_in,
    frozenset: _built_in,
    deque: _deque,
    Record: _record,
    Array: _array,
}
