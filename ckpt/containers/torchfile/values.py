"""Values from a pickle read without imports, and limits.

torch's tensors and parameters      StoredTensor: the position of the elements, never the elements
storages on their own               Storage
torch dtypes                        ckpt.plan.dtypes.DType
torch.Size                          tuple
OrderedDict, defaultdict, Counter   StoredDict (a dict that knows its kind and its attributes)
numpy arrays                        Array (dtype, shape, bytes); numpy scalars become Python's
pathlib paths                       PurePosixPath, PureWindowsPath
enums, dataclasses, namespaces, ... Record
a named class or function           Global
"""

from __future__ import annotations

import codecs
import datetime
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from math import prod
from typing import Any

from ckpt.base.text import pluralize
from ckpt.plan.dtypes import DType
from ckpt.plan.tensors import Extent

#: A DCP `.metadata` with a million chunks has about 200 MB.
MAX_PICKLE = 1 << 30
#: Real training state stays below 20; recursion is safe far above 100.
MAX_DEPTH = 100
#: Seeds and RNG words have at most 16 bytes.
MAX_LONG = 1024
#: Characters per line in text opcodes: global names, decimal numbers.
MAX_LINE = 4096
#: torch's own limit.
MAX_DIMS = 64
#: Bytes in a tensor larger than its storage (stride 0). More may fill the disk.
MAX_EXPANDED = 1 << 32

TIMES: Mapping[str, Callable[..., Any]] = {
    cls.__name__: cls
    for cls in (datetime.datetime, datetime.date, datetime.time, datetime.timedelta, datetime.timezone)
}


@dataclass(frozen=True, slots=True)
class Storage:
    """Position of a torch storage."""

    path: str
    offset: int
    dtype: DType
    numel: int
    nbytes: int
    key: str


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A tensor in a file.

    `attributes` are Python attributes such as DeepSpeed's `ds_id`, or None.
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
    """An inert class or function in the table.

    `build` returns the result of a call, None if files only contain the name. `fields` names the positional arguments
    of a namedtuple, or the parts of a tuple state. `members` lists an enum's names: `NAME=value`
    gives a value, NAME its lower-case name as the value, `NAME=` its unchanged name.
    """

    module: str
    name: str
    build: Callable[[Any, Global, tuple[Any, ...]], Any] | None = None
    fields: tuple[str, ...] = ()
    members: str = ""
    is_listed: bool = True

    @property
    def typename(self) -> str:
        return f"{self.module}.{self.name}"

    def __repr__(self) -> str:
        return f"<{self.typename}>"


@dataclass(slots=True, eq=False, repr=False)
class Record:
    """An object with a class known only by name. Records compare by identity. The repr never recurses."""

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
        state = self.state
        if type(state) is dict and (key in state or not (self.args or self.kwargs)):
            return state.get(key, default)
        return self.attributes.get(key, default)

    def __contains__(self, key: str) -> bool:
        return key in self.attributes

    @property
    def attributes(self) -> dict[str, Any]:
        """Attributes by name, also from arguments and slots."""
        found: dict[str, Any] = dict(zip(self.fields, self.args, strict=False))
        found.update(self.kwargs or {})
        # State with slots: (`__dict__` or None, slots). A namedtuple-like state has names.
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
        return self.args[0] if len(self.args) == 1 else None

    def __repr__(self) -> str:
        return f"<{self.typename} record>"


class StoredDict(dict[Any, Any]):
    """A dict with its kind: `OrderedDict`, `defaultdict` or `Counter`."""

    __slots__ = ("attributes", "kind")

    def __init__(self, kind: str, items: Iterable[tuple[Any, Any]] = ()) -> None:
        super().__init__(items)
        self.kind = kind
        self.attributes: Mapping[str, Any] | None = None


@dataclass(slots=True, eq=False, repr=False)
class Array:
    """A numpy array: numpy's dtype string (`<f8`, `|b1`, `|S3`, `|O`), and the elements' bytes.

    `fortran` is True for column-major order. An object array has `objects` and no data. `record` is the pickled dtype,
    with details missing in the string (fields, time units).
    """

    dtype: str = ""
    record: Record | None = None
    shape: tuple[int, ...] = ()
    fortran: bool = False
    data: bytes = b""
    objects: list[Any] | None = None

    def set_state(self, state: Any, spend: Callable[[int], None]) -> None:
        """Fill the array like `ndarray.__setstate__`. Raise MalformedError if it is not empty."""
        _, shape, dtype, fortran, data = state
        if self.dtype:
            raise MalformedError("an array's state is set twice")
        self.fill(shape, dtype, data, bool(fortran), spend)

    def fill(self, shape: Any, dtype: Any, data: Any, fortran: bool, spend: Callable[[int], None]) -> Array:
        """Take the elements and check their number. `spend` counts copied bytes."""
        text, itemsize = _dtype_text(dtype)
        if type(shape) is int:
            shape = (shape,)
        if type(shape) is not tuple or len(shape) > MAX_DIMS or any(type(n) is not int or n < 0 for n in shape):
            raise MalformedError("an array with an invalid shape")
        if text == "|O":
            if type(data) is not list or len(data) != prod(shape):
                raise MalformedError("an array's length contradicts its shape")
            self.objects = data
        else:
            if type(data) is bytearray:
                spend(len(data))
                data = bytes(data)
            if type(data) is not bytes or len(data) != prod(shape) * itemsize:
                raise MalformedError("an array's length contradicts its shape")
            self.data = data
        self.dtype, self.record, self.shape, self.fortran = text, dtype, shape, fortran
        return self

    def __repr__(self) -> str:
        return f"<numpy array {self.dtype} {self.shape}>"


def _dtype_text(value: Any) -> tuple[str, int]:
    """Return numpy's string for a dtype record, and its itemsize. Raise MalformedError."""
    if type(value) is not Record or value.module != "numpy" or not value.args or type(value.args[0]) is not str:
        raise MalformedError("an array without a dtype")
    text = value.args[0]
    if len(text) > 32 or not text[:1].isalpha() or not text[1:].isdigit():
        if text == "O":
            return "|O", 0
        raise MalformedError("an array with an unknown dtype")
    order = value.state[1] if type(value.state) is tuple and len(value.state) > 1 else "|"
    if order not in ("<", ">", "|", "="):
        raise MalformedError("an array with an unknown byte order")
    size = int(text[1:])
    if text[0] == "O":
        return "|O", 0
    return order + text, size * 4 if text[0] == "U" else size


@dataclass(frozen=True, slots=True)
class StorageType:
    dtype: DType


@dataclass(frozen=True, slots=True)
class Unsupported:
    what: str


class CutShortError(Exception):
    """The bytes end within the pickle. Catch it if you can read more bytes."""


class MalformedError(Exception):
    """A fault in a pickle. The machine adds the position."""


def short(value: Any) -> str:
    """Format a number or a tuple. Huge numbers are abbreviated: printing takes quadratic time."""
    if type(value) is int:
        return str(value) if value.bit_length() <= 128 else f"2^{value.bit_length() - 1} or more"
    return f"({', '.join(map(short, value[:8]))}{', ...' if len(value) > 8 else ''})"


_PARTS = frozenset({"DTensor", "ShardedTensor"})


def is_part(value: Any) -> bool:
    return isinstance(value, Record) and value.name in _PARTS


def is_state_dict(value: Any) -> bool:
    """Return True for a flat dict with text keys and at least one tensor."""
    return (
        isinstance(value, Mapping)
        and any(isinstance(item, StoredTensor) or is_part(item) for item in value.values())
        and all(isinstance(name, str) for name in value)
    )


def decimal(line: bytes) -> int:
    if len(line) > MAX_LONG:
        raise MalformedError(f"an integer of {pluralize(len(line), 'digit')}")
    return int(line)


def decimal_or_bool(line: bytes) -> int:
    return line == b"01" if line in (b"00", b"01") else decimal(line)


def two_complement(data: bytes) -> int:
    return int.from_bytes(data, "little", signed=True)


def quoted(line: bytes) -> str:
    """Decode a string from Python 2's protocol 0. Escapes are unsupported: no framework writes any."""
    if len(line) < 2 or line[:1] != line[-1:] or line[:1] not in (b"'", b'"') or b"\\" in line:
        raise MalformedError("a quoted string with more than plain text")
    return line[1:-1].decode("ascii")


def python2_text(data: bytes) -> str | bytes:
    try:
        return data.decode("ascii")
    except UnicodeDecodeError:
        return data


def text(data: bytes) -> str:
    return str(data, "utf-8", "surrogatepass")


def escaped(line: bytes) -> str:
    # A lookup by name would import the codec.
    return codecs.raw_unicode_escape_decode(line)[0]
