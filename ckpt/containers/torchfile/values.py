"""What comes out of a pickle that is read without importing anything, and the limits of what is read.

torch's tensors and parameters      StoredTensor: where the elements are, never the elements
storages on their own               Storage
torch dtypes                        ckpt.plan.dtypes.DType
torch.Size                          tuple
OrderedDict, defaultdict, Counter   StoredDict (a dict that knows its kind and its attributes)
numpy arrays                        Array (dtype, shape, bytes); numpy scalars are Python's own
pathlib paths                       PurePosixPath, PureWindowsPath
enums, dataclasses, namespaces, ... Record
a class or function that is named   Global
"""

from __future__ import annotations

import datetime
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from math import prod
from typing import Any

from ckpt.plan.dtypes import DType
from ckpt.plan.tensors import Extent

#: Bytes of one pickle.  A DCP `.metadata` of a million chunks has some 200 MB.
MAX_PICKLE = 1 << 30
#: Containers within containers.  Real training state stays below 20; naive recursion is safe far above this.
MAX_DEPTH = 100
#: Bytes of an integer.  Seeds and RNG words have 16 at most.
MAX_LONG = 1024
#: Characters of a line of the text opcodes other than text itself (names of globals, decimal numbers).
MAX_LINE = 4096
#: torch itself stops at 64 dims.
MAX_DIMS = 64
#: Bytes of a tensor that is larger than its storage (expanded: a stride of 0).  More is an attack on the disk.
MAX_EXPANDED = 1 << 32

#: The standard library's own immutable times, which are what they are in a pickle.
TIMES: Mapping[str, Callable[..., Any]] = {
    cls.__name__: cls
    for cls in (datetime.datetime, datetime.date, datetime.time, datetime.timedelta, datetime.timezone)
}


@dataclass(frozen=True, slots=True)
class Storage:
    """Where a torch storage's bytes are: `numel` elements of `dtype`, `nbytes` bytes at `offset` of `path`."""

    path: str
    offset: int
    dtype: DType
    numel: int
    nbytes: int
    key: str


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A tensor as it lies in a file.

    `attributes` are the Python attributes that `_rebuild_from_type_v2` and `_rebuild_parameter_with_state` carry
    (DeepSpeed's `ds_id`); None where the tensor has none.
    """

    extent: Extent
    requires_grad: bool = False
    attributes: Mapping[str, Any] | None = None

    @property
    def dtype(self) -> DType:
        return self.extent.dtype

    @property
    def shape(self) -> tuple[int, ...]:
        return self.extent.shape


@dataclass(frozen=True, slots=True, eq=False)
class Global:
    """A class or function that a pickle names: an entry of the table, and inert.

    `build` makes what a call of it gives; None where only the name itself occurs in files.  `fields` names the
    positional arguments (namedtuples) or the parts of a tuple state; `members` the values of an enum by name.
    A class outside the table is not `is_listed`: see `ckpt.containers.torchfile.unlisted`.
    """

    module: str
    name: str
    build: Callable[[Any, Global, tuple[Any, ...]], Any] | None = None
    fields: tuple[str, ...] = ()
    members: Mapping[str, Any] | None = None
    is_listed: bool = True

    @property
    def typename(self) -> str:
        return f"{self.module}.{self.name}"

    def __repr__(self) -> str:
        return f"<{self.typename}>"


@dataclass(slots=True, eq=False, repr=False)
class Record:
    """An object of a class that is known by name only: what it was made from, and its state.

    Compared by identity, so that records can be keys.  The repr shows the class only, so that it never recurses.
    """

    module: str
    name: str
    args: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] | None = None
    state: Any = None
    fields: tuple[str, ...] = ()

    @property
    def typename(self) -> str:
        return f"{self.module}.{self.name}"

    def get(self, key: str, default: Any = None) -> Any:
        """The attribute `key` of the object that was pickled, or `default`."""
        state = self.state
        if type(state) is dict and (key in state or not (self.args or self.kwargs)):
            return state.get(key, default)
        return self.attributes.get(key, default)

    def __contains__(self, key: str) -> bool:
        return key in self.attributes

    @property
    def attributes(self) -> dict[str, Any]:
        """Every attribute by name: named positional arguments, keyword arguments, `__dict__` and slots."""
        found: dict[str, Any] = dict(zip(self.fields, self.args, strict=False))
        found.update(self.kwargs or {})
        # An object with slots has the state (its __dict__ or None, its slots); a namedtuple-like state has names.
        states: tuple[Any, ...] = (self.state,)
        if isinstance(self.state, tuple):
            if self.fields and not self.args:
                found.update(zip(self.fields, self.state, strict=False))
            elif len(self.state) == 2:
                states = self.state
        for state in states:
            if isinstance(state, dict):
                found.update(state)
        return found

    @property
    def value(self) -> Any:
        """The value of an enum's member: enums are pickled as `cls(value)`."""
        return self.args[0] if len(self.args) == 1 else None

    def __repr__(self) -> str:
        return f"<{self.typename} record>"


class StoredDict(dict[Any, Any]):
    """An `OrderedDict`, `defaultdict` or `Counter`: a dict that knows its kind.

    `attributes` are Python attributes set on it, as `nn.Module.state_dict()` does with `_metadata`.
    """

    __slots__ = ("attributes", "kind")

    def __init__(self, kind: str, items: Iterable[tuple[Any, Any]] = ()) -> None:
        super().__init__(items)
        self.kind = kind
        self.attributes: Mapping[str, Any] | None = None


@dataclass(slots=True, eq=False, repr=False)
class Array:
    """A numpy array: `dtype` as numpy writes it (`<f8`, `|b1`, `|S3`, `|O`), and the elements' bytes.

    `fortran` says that the bytes are in column-major order.  An object array has `objects` and no data.  `record`
    is the dtype as it was pickled, with what the string leaves out (fields, units of time).
    """

    dtype: str = ""
    record: Record | None = None
    shape: tuple[int, ...] = ()
    fortran: bool = False
    data: bytes = b""
    objects: list[Any] | None = None

    def set_state(self, state: Any, spend: Callable[[int], None]) -> None:
        """Fill the array as `ndarray.__setstate__` does.  Raises as `fill`, and MalformedError where it is filled."""
        _, shape, dtype, fortran, data = state
        if self.dtype:
            raise MalformedError("the state of an array is set twice")
        self.fill(shape, dtype, data, bool(fortran), spend)

    def fill(self, shape: Any, dtype: Any, data: Any, fortran: bool, spend: Callable[[int], None]) -> Array:
        """Take elements that are as many as `shape` says; return the array.  `spend` accounts for bytes copied.

        Raises MalformedError, or what Python raises where a value has another type than numpy writes.
        """
        text, itemsize = _dtype_text(dtype)
        if type(shape) is int:
            shape = (shape,)
        if type(shape) is not tuple or len(shape) > MAX_DIMS or any(type(n) is not int or n < 0 for n in shape):
            raise MalformedError("an array whose shape is not a tuple of sizes")
        if text == "|O":
            if type(data) is not list or len(data) != prod(shape):
                raise MalformedError("an array that is not as long as its shape says")
            self.objects = data
        else:
            if type(data) is bytearray:
                spend(len(data))
                data = bytes(data)
            if type(data) is not bytes or len(data) != prod(shape) * itemsize:
                raise MalformedError("an array that is not as long as its shape says")
            self.data = data
        self.dtype, self.record, self.shape, self.fortran = text, dtype, shape, fortran
        return self

    def __repr__(self) -> str:
        return f"<numpy array {self.dtype} {self.shape}>"


def _dtype_text(value: Any) -> tuple[str, int]:
    """numpy's string for a dtype record, and its itemsize.  Raises MalformedError."""
    if type(value) is not Record or value.module != "numpy" or not value.args or type(value.args[0]) is not str:
        raise MalformedError("an array without a dtype")
    text = value.args[0]
    if len(text) > 32 or not text[:1].isalpha() or not text[1:].isdigit():
        if text == "O":
            return "|O", 0
        raise MalformedError("an array of an unknown dtype")
    order = value.state[1] if type(value.state) is tuple and len(value.state) > 1 else "|"
    if order not in ("<", ">", "|", "="):
        raise MalformedError("an array of an unknown byte order")
    size = int(text[1:])
    if text[0] == "O":
        return "|O", 0
    return order + text, size * 4 if text[0] == "U" else size


@dataclass(frozen=True, slots=True)
class StorageType:
    """`torch.FloatStorage` and its kind: the dtype of a storage's elements."""

    dtype: DType


@dataclass(frozen=True, slots=True)
class Unsupported:
    """An entry of the table that says what the file holds, and that it is not read."""

    what: str


class CutShortError(Exception):
    """The bytes end within the pickle.  Only of interest to a caller that can get more of them."""


class MalformedError(Exception):
    """What is wrong with a pickle; the machine adds where."""


def short(value: Any) -> str:
    """A number or a tuple of numbers for a message; a huge one is not spelled out (that takes quadratic time)."""
    if type(value) is int:
        return str(value) if value.bit_length() <= 128 else f"2^{value.bit_length() - 1} or more"
    return f"({', '.join(map(short, value[:8]))}{', ...' if len(value) > 8 else ''})"


#: Classes of tensors that are split over several files.
_PARTS = frozenset({"DTensor", "ShardedTensor"})


def is_part(value: Any) -> bool:
    """Whether `value` is one rank's part of a tensor."""
    return isinstance(value, Record) and value.name in _PARTS


def is_state_dict(value: Any) -> bool:
    """Whether `value` is a flat dict of names with tensors among its values."""
    return (
        isinstance(value, Mapping)
        and any(isinstance(item, StoredTensor) or is_part(item) for item in value.values())
        and all(isinstance(name, str) for name in value)
    )
