"""The unpickler that imports nothing.

A pickle is a program.  This machine runs it over inert things only: a global is looked up in the table below by
its exact (module, name), never imported; what is "called" is one of our own functions that checks its arguments
and makes a plain value, a `Record` or a `StoredTensor`.  Any other global is refused by name.

`Decoder` is the machine, `GLOBALS` the table, `load_pickle` reads a plain pickle file (DCP's `.metadata`);
`ckpt.containers.torchfile.read` reads torch's containers with the same machine.

`ckpt.containers.torchfile.values` lists what comes out.

The machine is total: whatever the bytes, it returns or raises a `CkptError`.  Its memory is linear in the length
of the pickle (at most some 250 bytes per byte, which takes a pickle of nothing but empty sets), it does not
recurse, and what it returns is a tree that naive recursive code can walk: at most `MAX_DEPTH` deep, free of
cycles other than through a `Record`, and not much larger unfolded than the pickle is.

Opcodes after Python 3.13's `pickletools` (protocols 0 to 5); what torch writes after torch 2.13's `_utils.py`,
`_tensor.py`, `serialization.py` and `storage.py`.
"""

from __future__ import annotations

import codecs
import datetime
import os
import struct
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from itertools import chain
from pathlib import PurePosixPath, PureWindowsPath
from typing import Any, NoReturn, cast

from ckpt.containers.torchfile.values import (
    MAX_DEPTH,
    MAX_DIMS,
    MAX_EXPANDED,
    MAX_LINE,
    MAX_LONG,
    MAX_PICKLE,
    Array,
    CutShortError,
    Global,
    MalformedError,
    Record,
    Storage,
    StorageType,
    StoredDict,
    StoredTensor,
    Unsupported,
    short,
)
from ckpt.errors import CorruptError, UnsafeError
from ckpt.move.source import open_file, read_at
from ckpt.plan import dtypes
from ckpt.plan.dtypes import DType
from ckpt.plan.tensors import Extent

_TOO_DEEP_A_KEY = 8
_MAX_INT64 = (1 << 63) - 1


# --- the machine ---------------------------------------------------------------------------------------------


Handler = Callable[["Decoder", int], int]
_OPCODES: dict[int, Handler] = {}


def _opcode(code: bytes) -> Callable[[Handler], Handler]:
    """Register the handler of an opcode: it takes the position behind the opcode and returns the next one's."""

    def register(handler: Handler) -> Handler:
        _OPCODES[code[0]] = handler
        return handler

    return register


# One number at a position of a buffer, in a tuple.
_u16: Callable[[bytes, int], tuple[int]] = struct.Struct("<H").unpack_from
_i32: Callable[[bytes, int], tuple[int]] = struct.Struct("<i").unpack_from
_u32: Callable[[bytes, int], tuple[int]] = struct.Struct("<I").unpack_from
_u64: Callable[[bytes, int], tuple[int]] = struct.Struct("<Q").unpack_from
_f64: Callable[[bytes, int], tuple[float]] = struct.Struct(">d").unpack_from

#: What the operations of the machine raise when a pickle does not make sense: stack or memo empty, a value of a
#: wrong type, a number out of range, text that is not UTF-8.
_MEANT_AS_MALFORMED = (
    LookupError,
    TypeError,
    ValueError,
    ArithmeticError,
    AttributeError,
    struct.error,
    MalformedError,
)


#: How many bytes must follow an opcode in any case: its number, or the length of what follows.
_ARGUMENT_BYTES = dict.fromkeys(b"K\x8aUC\x8chq\x80\x82", 1) | dict.fromkeys(b"M\x83", 2)
_ARGUMENT_BYTES |= dict.fromkeys(b"J\x8bTBXjr\x84", 4) | dict.fromkeys(b"G\x8e\x8d\x96\x95", 8)


class Decoder:
    """One run of the machine over one pickle.

    `persistent` resolves a persistent id (torch's storages); without it, persistent ids are refused.
    """

    __slots__ = ("_allowance", "_ended", "_marks", "_memo", "_persistent", "data", "name", "path", "stack")

    def __init__(
        self,
        data: bytes,
        *,
        path: str,
        name: str = "pickle",
        persistent: Callable[[Any], Any] | None = None,
    ) -> None:
        self.data = data
        self.path = path
        self.name = name
        self.stack: list[Any] = []
        self._marks: list[int] = []
        self._memo: dict[int, Any] = {}
        self._persistent = persistent
        self._ended = False
        # Elements that may be copied.  A pickler emits each container once, so copies are bounded by the length;
        # a bomb copies one long list again and again.
        self._allowance = 4 * len(data) + (1 << 16)

    def run(self, start: int = 0) -> tuple[Any, int]:
        """Run the pickle that begins at `start`; return its object and the position behind it.

        Raises UnsafeError for a global outside the table or a call of what is not callable there, CorruptError
        for a pickle that makes no sense, and CutShortError where the bytes end before the pickle does.
        """
        data = self.data
        handlers = _HANDLERS
        at = pos = start
        try:
            while not self._ended:
                at = pos
                pos = handlers[data[at]](self, at + 1)
            if len(self.stack) != 1 or self._marks:
                raise MalformedError(f"{len(self.stack)} objects are left on the stack")
            value = self.stack.pop()
            if type(value) not in _LEAVES:
                _check_tree(value, pos - start)
            return value, pos
        except _MEANT_AS_MALFORMED as error:
            if at >= len(data) or at + _ARGUMENT_BYTES.get(data[at], 0) >= len(data):
                raise CutShortError from None
            self._corrupt(_reason(error), at)

    def _corrupt(self, what: str, at: int) -> NoReturn:
        raise CorruptError(
            f"the pickle is damaged: {what}", path=self.path, found=f"at byte {at} of {self.name}"
        ) from None

    # Small helpers of the opcodes.

    def bytes_at(self, pos: int, length: int) -> bytes:
        """`length` bytes at `pos`; nothing is allocated before they are known to be there."""
        if length > len(self.data) - pos:
            raise CutShortError
        return self.data[pos : pos + length]

    def line_at(self, pos: int, limit: int = MAX_LINE) -> tuple[bytes, int]:
        """The text up to the next newline, and the position behind it."""
        end = self.data.find(b"\n", pos, pos + limit)
        if end < 0:
            if len(self.data) - pos < limit:
                raise CutShortError
            raise MalformedError(f"a line of more than {limit} characters")
        return self.data[pos:end], end + 1

    def pop_mark(self) -> list[Any]:
        """What was pushed since the last mark."""
        stack = self.stack
        mark = self._marks.pop()
        if mark > len(stack):
            raise MalformedError("the stack was emptied beyond a mark")
        items = stack[mark:]
        del stack[mark:]
        return items

    def spend(self, copies: int) -> None:
        """Account for elements that are copied, so that a small pickle cannot make large objects."""
        self._allowance -= copies
        if self._allowance < 0:
            raise MalformedError("it copies more than it holds")

    def check_key(self, key: Any, depth: int = 0) -> None:
        """Refuse a dict key or set element that is unhashable, or whose hash would recurse or take long."""
        kind = type(key)
        if kind is tuple:
            if depth > _TOO_DEEP_A_KEY:
                raise MalformedError("a key of nested tuples")
            self.spend(len(key))
            for item in key:
                self.check_key(item, depth + 1)
        elif kind not in _KEYS:
            raise MalformedError(f"a {kind.__name__} as a key")

    def look_up(self, module: Any, name: Any) -> None:
        """Push the table's entry for a global."""
        if type(module) is not str or type(name) is not str:
            raise MalformedError("the name of a global is no text")
        found = GLOBALS.get((module, name))
        if found is None:
            raise UnsafeError(
                f"the pickle names {module}.{name}, which is not on the list of what checkpoints hold; "
                "nothing was imported and nothing was run",
                path=self.path,
                hint="load the file with the framework that wrote it, only if you trust where it comes from, "
                "and save tensors and plain values",
            )
        if type(found) is Unsupported:
            self.unsupported(found.what)
        self.stack.append(found)

    def unsupported(self, what: str) -> NoReturn:
        raise UnsafeError(f"the file holds {what}, which is not supported", path=self.path)

    def call(self, function: Any, args: Any) -> Any:
        if type(function) is not Global or function.build is None:
            name = function.typename if type(function) is Global else f"an object of type {type(function).__name__}"
            raise UnsafeError(
                f"the pickle calls {name}, which is nothing to call; nothing was run",
                path=self.path,
            )
        if type(args) is not tuple:
            raise MalformedError("the arguments of a call are no tuple")
        return function.build(self, function, args)

    def dict_update(self, target: Any, items: list[Any]) -> None:
        if type(target) is not dict and type(target) is not StoredDict:
            raise MalformedError(f"items are set on a {type(target).__name__}")
        if len(items) % 2:
            raise MalformedError("a key has no value")
        for i in range(0, len(items), 2):
            key = items[i]
            if type(key) is not str:
                self.check_key(key)
            target[key] = items[i + 1]

    def set_update(self, target: set[Any], items: Iterable[Any]) -> None:
        for item in items:
            self.check_key(item)
            target.add(item)

    # Opcodes, in the order of pickletools.

    @_opcode(b"I")
    def _int(self, pos: int) -> int:
        line, pos = self.line_at(pos)
        if line in (b"00", b"01"):
            self.stack.append(line == b"01")
        else:
            self.stack.append(_decimal(line))
        return pos

    @_opcode(b"J")
    def _binint(self, pos: int) -> int:
        self.stack.append(_i32(self.data, pos)[0])
        return pos + 4

    @_opcode(b"K")
    def _binint1(self, pos: int) -> int:
        self.stack.append(self.data[pos])
        return pos + 1

    @_opcode(b"M")
    def _binint2(self, pos: int) -> int:
        self.stack.append(_u16(self.data, pos)[0])
        return pos + 2

    @_opcode(b"L")
    def _long(self, pos: int) -> int:
        line, pos = self.line_at(pos)
        self.stack.append(_decimal(line.removesuffix(b"L")))
        return pos

    @_opcode(b"\x8a")
    def _long1(self, pos: int) -> int:
        end = pos + 1 + self.data[pos]
        self.stack.append(int.from_bytes(self.bytes_at(pos + 1, end - pos - 1), "little", signed=True))
        return end

    @_opcode(b"\x8b")
    def _long4(self, pos: int) -> int:
        length = _i32(self.data, pos)[0]
        if not 0 <= length <= MAX_LONG:
            raise MalformedError(f"an integer of {length} bytes")
        self.stack.append(int.from_bytes(self.bytes_at(pos + 4, length), "little", signed=True))
        return pos + 4 + length

    @_opcode(b"S")
    def _string(self, pos: int) -> int:
        # Python 2's protocol 0; no framework writes it with escapes in what it stores.
        line, pos = self.line_at(pos)
        if len(line) < 2 or line[:1] != line[-1:] or line[:1] not in (b"'", b'"') or b"\\" in line:
            raise MalformedError("a quoted string that is not plain text")
        self.stack.append(line[1:-1].decode("ascii"))
        return pos

    @_opcode(b"T")
    def _binstring(self, pos: int) -> int:
        length = _i32(self.data, pos)[0]
        if length < 0:
            raise MalformedError("a string of negative length")
        self.stack.append(_python2_text(self.bytes_at(pos + 4, length)))
        return pos + 4 + length

    @_opcode(b"U")
    def _short_binstring(self, pos: int) -> int:
        length = self.data[pos]
        self.stack.append(_python2_text(self.bytes_at(pos + 1, length)))
        return pos + 1 + length

    @_opcode(b"B")
    def _binbytes(self, pos: int) -> int:
        length = _u32(self.data, pos)[0]
        self.stack.append(self.bytes_at(pos + 4, length))
        return pos + 4 + length

    @_opcode(b"C")
    def _short_binbytes(self, pos: int) -> int:
        length = self.data[pos]
        self.stack.append(self.bytes_at(pos + 1, length))
        return pos + 1 + length

    @_opcode(b"\x8e")
    def _binbytes8(self, pos: int) -> int:
        length = _u64(self.data, pos)[0]
        self.stack.append(self.bytes_at(pos + 8, length))
        return pos + 8 + length

    @_opcode(b"\x96")
    def _bytearray8(self, pos: int) -> int:
        length = _u64(self.data, pos)[0]
        self.stack.append(bytearray(self.bytes_at(pos + 8, length)))
        return pos + 8 + length

    @_opcode(b"\x97")
    def _next_buffer(self, pos: int) -> int:
        raise MalformedError("it refers to buffers outside the file")

    @_opcode(b"\x98")
    def _readonly_buffer(self, pos: int) -> int:
        raise MalformedError("it refers to buffers outside the file")

    @_opcode(b"N")
    def _none(self, pos: int) -> int:
        self.stack.append(None)
        return pos

    @_opcode(b"\x88")
    def _newtrue(self, pos: int) -> int:
        self.stack.append(True)
        return pos

    @_opcode(b"\x89")
    def _newfalse(self, pos: int) -> int:
        self.stack.append(False)
        return pos

    @_opcode(b"V")
    def _unicode(self, pos: int) -> int:
        line, pos = self.line_at(pos, MAX_PICKLE)
        # By its function, as by its name the codec would be imported.
        self.stack.append(codecs.raw_unicode_escape_decode(line)[0])
        return pos

    @_opcode(b"\x8c")
    def _short_binunicode(self, pos: int) -> int:
        end = pos + 1 + self.data[pos]
        if end > len(self.data):
            raise CutShortError
        self.stack.append(str(self.data[pos + 1 : end], "utf-8", "surrogatepass"))
        return end

    @_opcode(b"X")
    def _binunicode(self, pos: int) -> int:
        end = pos + 4 + _u32(self.data, pos)[0]
        if end > len(self.data):
            raise CutShortError
        self.stack.append(str(self.data[pos + 4 : end], "utf-8", "surrogatepass"))
        return end

    @_opcode(b"\x8d")
    def _binunicode8(self, pos: int) -> int:
        length = _u64(self.data, pos)[0]
        self.stack.append(str(self.bytes_at(pos + 8, length), "utf-8", "surrogatepass"))
        return pos + 8 + length

    @_opcode(b"F")
    def _float(self, pos: int) -> int:
        line, pos = self.line_at(pos)
        self.stack.append(float(line))
        return pos

    @_opcode(b"G")
    def _binfloat(self, pos: int) -> int:
        self.stack.append(_f64(self.data, pos)[0])
        return pos + 8

    @_opcode(b"]")
    def _empty_list(self, pos: int) -> int:
        self.stack.append([])
        return pos

    @_opcode(b"a")
    def _append(self, pos: int) -> int:
        item = self.stack.pop()
        target = self.stack[-1]
        if type(target) is not list and type(target) is not deque:
            raise MalformedError(f"an item is appended to a {type(target).__name__}")
        target.append(item)
        return pos

    @_opcode(b"e")
    def _appends(self, pos: int) -> int:
        items = self.pop_mark()
        target = self.stack[-1]
        if type(target) is not list and type(target) is not deque:
            raise MalformedError(f"items are appended to a {type(target).__name__}")
        target.extend(items)
        return pos

    @_opcode(b"l")
    def _list(self, pos: int) -> int:
        self.stack.append(self.pop_mark())
        return pos

    @_opcode(b")")
    def _empty_tuple(self, pos: int) -> int:
        self.stack.append(())
        return pos

    @_opcode(b"t")
    def _tuple(self, pos: int) -> int:
        self.stack.append(tuple(self.pop_mark()))
        return pos

    @_opcode(b"\x85")
    def _tuple1(self, pos: int) -> int:
        stack = self.stack
        stack[-1] = (stack[-1],)
        return pos

    @_opcode(b"\x86")
    def _tuple2(self, pos: int) -> int:
        stack = self.stack
        last = stack.pop()
        stack[-1] = (stack[-1], last)
        return pos

    @_opcode(b"\x87")
    def _tuple3(self, pos: int) -> int:
        stack = self.stack
        last = stack.pop()
        middle = stack.pop()
        stack[-1] = (stack[-1], middle, last)
        return pos

    @_opcode(b"}")
    def _empty_dict(self, pos: int) -> int:
        self.stack.append({})
        return pos

    @_opcode(b"d")
    def _dict(self, pos: int) -> int:
        made: dict[Any, Any] = {}
        self.dict_update(made, self.pop_mark())
        self.stack.append(made)
        return pos

    @_opcode(b"s")
    def _setitem(self, pos: int) -> int:
        value = self.stack.pop()
        key = self.stack.pop()
        self.dict_update(self.stack[-1], [key, value])
        return pos

    @_opcode(b"u")
    def _setitems(self, pos: int) -> int:
        items = self.pop_mark()
        self.dict_update(self.stack[-1], items)
        return pos

    @_opcode(b"\x8f")
    def _empty_set(self, pos: int) -> int:
        self.stack.append(set())
        return pos

    @_opcode(b"\x90")
    def _additems(self, pos: int) -> int:
        items = self.pop_mark()
        target = self.stack[-1]
        if type(target) is not set:
            raise MalformedError(f"items are added to a {type(target).__name__}")
        self.set_update(target, items)
        return pos

    @_opcode(b"\x91")
    def _frozenset(self, pos: int) -> int:
        made: set[Any] = set()
        self.set_update(made, self.pop_mark())
        self.stack.append(frozenset(made))
        return pos

    @_opcode(b"0")
    def _pop(self, pos: int) -> int:
        if self._marks and self._marks[-1] == len(self.stack):
            self._marks.pop()
        else:
            self.stack.pop()
        return pos

    @_opcode(b"2")
    def _dup(self, pos: int) -> int:
        self.stack.append(self.stack[-1])
        return pos

    @_opcode(b"(")
    def _mark(self, pos: int) -> int:
        self._marks.append(len(self.stack))
        return pos

    @_opcode(b"1")
    def _pop_mark(self, pos: int) -> int:
        self.pop_mark()
        return pos

    @_opcode(b"g")
    def _get(self, pos: int) -> int:
        line, pos = self.line_at(pos)
        self.stack.append(self._memo[_decimal(line)])
        return pos

    @_opcode(b"h")
    def _binget(self, pos: int) -> int:
        self.stack.append(self._memo[self.data[pos]])
        return pos + 1

    @_opcode(b"j")
    def _long_binget(self, pos: int) -> int:
        self.stack.append(self._memo[_u32(self.data, pos)[0]])
        return pos + 4

    @_opcode(b"p")
    def _put(self, pos: int) -> int:
        line, pos = self.line_at(pos)
        self._memo[_decimal(line)] = self.stack[-1]
        return pos

    @_opcode(b"q")
    def _binput(self, pos: int) -> int:
        self._memo[self.data[pos]] = self.stack[-1]
        return pos + 1

    @_opcode(b"r")
    def _long_binput(self, pos: int) -> int:
        self._memo[_u32(self.data, pos)[0]] = self.stack[-1]
        return pos + 4

    @_opcode(b"\x94")
    def _memoize(self, pos: int) -> int:
        self._memo[len(self._memo)] = self.stack[-1]
        return pos

    @_opcode(b"\x82")
    def _ext1(self, pos: int) -> int:
        self.unsupported("an extension code (EXT1)")

    @_opcode(b"\x83")
    def _ext2(self, pos: int) -> int:
        self.unsupported("an extension code (EXT2)")

    @_opcode(b"\x84")
    def _ext4(self, pos: int) -> int:
        self.unsupported("an extension code (EXT4)")

    @_opcode(b"c")
    def _global(self, pos: int) -> int:
        module, pos = self.line_at(pos)
        name, pos = self.line_at(pos)
        self.look_up(module.decode(), name.decode())
        return pos

    @_opcode(b"\x93")
    def _stack_global(self, pos: int) -> int:
        name = self.stack.pop()
        module = self.stack.pop()
        self.look_up(module, name)
        return pos

    @_opcode(b"R")
    def _reduce(self, pos: int) -> int:
        stack = self.stack
        args = stack.pop()
        function = stack[-1]
        # This is the hot path of a file of many tensors; `call` says what is wrong where something is.
        if type(function) is Global and function.build is not None and type(args) is tuple:
            stack[-1] = function.build(self, function, args)
        else:
            stack[-1] = self.call(function, args)
        return pos

    @_opcode(b"b")
    def _build(self, pos: int) -> int:
        state = self.stack.pop()
        target = self.stack[-1]
        kind = type(target)
        if kind is Record:
            if target.state is not None:
                raise MalformedError("the state of an object is set twice")
            target.state = state
        elif kind is Array:
            _set_array(self, target, state)
        elif kind is StoredDict and type(state) is dict:
            target.attributes = state
        else:
            raise UnsafeError(
                f"the pickle sets the state of {target!r}, which has none; nothing was run"
                if kind is Global
                else f"the pickle sets the state of a {kind.__name__}, which has none; nothing was run",
                path=self.path,
            )
        return pos

    @_opcode(b"i")
    def _inst(self, pos: int) -> int:
        module, pos = self.line_at(pos)
        name, pos = self.line_at(pos)
        args = tuple(self.pop_mark())
        self.look_up(module.decode(), name.decode())
        self.stack.append(self.call(self.stack.pop(), args))
        return pos

    @_opcode(b"o")
    def _obj(self, pos: int) -> int:
        cls, *args = self.pop_mark()
        self.stack.append(self.call(cls, tuple(args)))
        return pos

    @_opcode(b"\x81")
    def _newobj(self, pos: int) -> int:
        args = self.stack.pop()
        self.stack[-1] = self.call(self.stack[-1], args)
        return pos

    @_opcode(b"\x92")
    def _newobj_ex(self, pos: int) -> int:
        kwargs = self.stack.pop()
        args = self.stack.pop()
        made = self.call(self.stack[-1], args)
        if type(kwargs) is not dict or (kwargs and type(made) is not Record):
            raise MalformedError("keyword arguments that make no sense")
        if kwargs:
            made.kwargs = kwargs
        self.stack[-1] = made
        return pos

    @_opcode(b"\x80")
    def _proto(self, pos: int) -> int:
        if self.data[pos] > 5:
            raise MalformedError(f"protocol {self.data[pos]}")
        return pos + 1

    @_opcode(b".")
    def _stop(self, pos: int) -> int:
        self._ended = True
        return pos

    @_opcode(b"\x95")
    def _frame(self, pos: int) -> int:
        if _u64(self.data, pos)[0] > len(self.data) - pos - 8:
            raise CutShortError
        return pos + 8

    @_opcode(b"P")
    def _persid(self, pos: int) -> int:
        self.unsupported("a persistent id in text form")

    @_opcode(b"Q")
    def _binpersid(self, pos: int) -> int:
        if self._persistent is None:
            self.unsupported("a persistent id (a part of the object is stored elsewhere)")
        self.stack[-1] = self._persistent(self.stack[-1])
        return pos


def _unknown_opcode(decoder: Decoder, pos: int) -> NoReturn:
    raise MalformedError(f"there is no opcode {decoder.data[pos - 1]:#04x}")


_HANDLERS: list[Handler] = [_OPCODES.get(code, _unknown_opcode) for code in range(256)]


def _reason(error: Exception) -> str:
    if isinstance(error, MalformedError):
        return str(error)
    if isinstance(error, KeyError):
        return "it refers to what it has not stored"
    if isinstance(error, IndexError):
        return "its stack is empty"
    return f"a value makes no sense ({type(error).__name__})"


def _decimal(line: bytes) -> int:
    if len(line) > MAX_LONG:
        raise MalformedError(f"an integer of {len(line)} digits")
    return int(line)


def _python2_text(data: bytes) -> str | bytes:
    """A Python 2 `str`: text in the files that torch wrote under Python 2, else bytes."""
    try:
        return data.decode("ascii")
    except UnicodeDecodeError:
        return data


# --- the tree that comes out ---------------------------------------------------------------------------------


def _children(value: Any) -> Iterable[Any]:
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


_LEAVES = frozenset((str, int, float, bool, type(None), bytes, DType, Storage, Global, complex, bytearray))
_BRANCHES = frozenset((dict, list, tuple, StoredDict, Record, set, frozenset, deque, Array))


def _is_branch(value: Any) -> bool:
    kind = type(value)
    return kind in _BRANCHES or (kind is StoredTensor and value.attributes is not None)


def _check_tree(root: Any, length: int) -> None:
    """Prove that code may walk `root` naively.  Raises MalformedError.

    Nesting would overflow a recursive consumer's stack; a list that holds itself would never end; a list of two
    references to a list of two references to ... is small in the pickle and endless when it is printed.
    """
    budget = 10 * length + (1 << 20)
    done: dict[int, tuple[int, int]] = {}  # id -> (height, elements when unfolded)
    open_: set[int] = set()
    # One frame per open container: [it, the children to come, height so far, elements so far].
    frames: list[list[Any]] = [[root, iter(_children(root)), 1, 1]] if _is_branch(root) else []
    if frames:
        open_.add(id(root))
    while frames:
        frame = frames[-1]
        for child in frame[1]:
            kind = type(child)
            if kind in _LEAVES:
                frame[3] += 1
                continue
            # A shape, by far the most frequent branch; a long one that is shared must not be looked at again.
            if kind is tuple and len(child) <= 8 and _LEAVES.issuperset(map(type, child)):
                frame[2] = max(frame[2], 2)
                frame[3] += 1 + len(child)
                continue
            # So are records of plain fields: DCP's metadata has three for each chunk of a tensor.
            if kind is Record and (elements := _plain_record(child)):
                frame[2] = max(frame[2], 4)
                frame[3] += elements
                continue
            if not _is_branch(child):
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
            frames.append([child, iter(_children(child)), 1, 1])
            break
        else:
            frames.pop()
            value, _, height, elements = frame
            open_.discard(id(value))
            done[id(value)] = (height, elements)
            if height > MAX_DEPTH:
                raise MalformedError(f"objects nested more than {MAX_DEPTH} deep")
            if elements > budget:
                raise MalformedError("an object that is endless when it is unfolded")
            if frames:
                above = frames[-1]
                if height >= above[2]:
                    above[2] = height + 1
                above[3] += elements


def _plain_record(record: Record) -> int:
    """The elements of a record that holds nothing but a few plain fields and shapes, at most 3 deep; otherwise 0."""
    args, state = record.args, record.state
    if args or record.kwargs or type(state) is not dict or len(state) > 8:
        return 0
    elements = 4 + len(state)
    for value in state.values():
        kind = type(value)
        if kind in _LEAVES:
            elements += 1
        elif kind is tuple and len(value) <= 8 and _LEAVES.issuperset(map(type, value)):
            elements += 1 + len(value)
        else:
            return 0
    return elements if _LEAVES.issuperset(map(type, state)) else 0


def _cycle_has_record(frames: list[list[Any]], start: Any) -> bool:
    """Whether the way from the open container `start` to itself leads through a Record (a device mesh's does)."""
    for frame in reversed(frames):
        if type(frame[0]) is Record:
            return True
        if frame[0] is start:
            return False
    return False


# --- what is "called" ----------------------------------------------------------------------------------------
#
# Every function takes the decoder, the global that was named, and the arguments; it trusts none of them.


def _record(decoder: Decoder, cls: Global, args: tuple[Any, ...]) -> Record:
    return Record(cls.module, cls.name, args, fields=cls.fields)


def _getattr(decoder: Decoder, _: Global, args: tuple[Any, ...]) -> Any:
    """Members of an enum (Python 3.11.0 to 3.11.3) and nested classes (protocol 2): names in the table only."""
    if len(args) == 2 and type(args[0]) is Global and type(args[1]) is str:
        cls, name = args
        nested = GLOBALS.get((cls.module, f"{cls.name}.{name}"))
        if nested is not None:
            return nested
        if cls.members is not None and name in cls.members:
            return Record(cls.module, cls.name, (cls.members[name],))
    raise UnsafeError(
        "the pickle calls builtins.getattr on what is neither an enum nor a class with nested ones; nothing was run",
        path=decoder.path,
    )


def _reconstructor(decoder: Decoder, _: Global, args: tuple[Any, ...]) -> Any:
    """`copyreg._reconstructor(cls, object, None)`: how protocols 0 and 1 make an object."""
    cls, base, state = args
    if type(base) is not Global or base.name != "object" or state is not None:
        raise MalformedError("an object of a class that is derived from a built-in one")
    return decoder.call(cls, ())


def _encode(decoder: Decoder, _: Global, args: tuple[Any, ...]) -> bytes:
    """`_codecs.encode(text, 'latin1')`: bytes, as protocol 2 writes them."""
    text, encoding = args
    if type(text) is not str or encoding not in ("latin1", "latin-1"):
        raise MalformedError("bytes in an unknown encoding")
    decoder.spend(len(text))
    return text.encode("latin-1")


def _bytes(decoder: Decoder, _: Global, args: tuple[Any, ...]) -> bytes:
    if args:
        raise MalformedError("arguments of bytes")
    return b""


def _bytearray(decoder: Decoder, _: Global, args: tuple[Any, ...]) -> bytearray:
    if not args:
        return bytearray()
    (data,) = args
    if type(data) is not bytes:  # an int would allocate as many bytes
        raise MalformedError("a bytearray of what is no bytes")
    decoder.spend(len(data))
    return bytearray(data)


def _items(decoder: Decoder, args: tuple[Any, ...]) -> Any:
    """The one list, tuple, set or dict that a container is made from, paid for; () if there is none."""
    if not args:
        return ()
    (items,) = args
    if type(items) not in (list, tuple, set, frozenset, dict, StoredDict):
        raise MalformedError(f"a container made from a {type(items).__name__}")
    decoder.spend(len(items))
    return items


def _set(decoder: Decoder, _: Global, args: tuple[Any, ...]) -> set[Any]:
    made: set[Any] = set()
    decoder.set_update(made, _items(decoder, args))
    return made


def _frozenset(decoder: Decoder, _: Global, args: tuple[Any, ...]) -> frozenset[Any]:
    return frozenset(_set(decoder, _, args))


def _ordered_dict(decoder: Decoder, cls: Global, args: tuple[Any, ...]) -> StoredDict:
    made = StoredDict(cls.name)
    if not args:  # every tensor has one of these for its hooks
        return made
    items = _items(decoder, args)
    if isinstance(items, dict):
        made.update(items)
    else:
        for key, value in items:
            decoder.dict_update(made, [key, value])
    return made


def _defaultdict(decoder: Decoder, cls: Global, args: tuple[Any, ...]) -> StoredDict:
    if args and args[0] is not None and type(args[0]) is not Global:
        raise MalformedError("a default factory that is no class")
    return _ordered_dict(decoder, cls, args[1:])


def _deque(decoder: Decoder, _: Global, args: tuple[Any, ...]) -> deque[Any]:
    maxlen = args[1] if len(args) > 1 else None
    if maxlen is not None and (type(maxlen) is not int or not 0 <= maxlen < 1 << 62):
        raise MalformedError("the length of a deque")
    return deque(_items(decoder, args[:1]), maxlen)


def _complex(decoder: Decoder, _: Global, args: tuple[Any, ...]) -> complex:
    real, imag = args
    if type(real) is not float or type(imag) is not float:
        raise MalformedError("a complex number of what is no number")
    return complex(real, imag)


def _slice(decoder: Decoder, _: Global, args: tuple[Any, ...]) -> slice:
    start, stop, step = args
    if any(part is not None and type(part) is not int for part in args):
        raise MalformedError("a slice of what is no integer")
    return slice(start, stop, step)


def _range(decoder: Decoder, _: Global, args: tuple[Any, ...]) -> range:
    start, stop, step = args
    if any(type(part) is not int for part in args):
        raise MalformedError("a range of what is no integer")
    return range(start, stop, step)


def _path(decoder: Decoder, cls: Global, args: tuple[Any, ...]) -> PurePosixPath | PureWindowsPath:
    if any(type(part) is not str for part in args):
        raise MalformedError("a path of what is no text")
    decoder.spend(sum(map(len, args)))
    return PureWindowsPath(*args) if "Windows" in cls.name else PurePosixPath(*args)


_TIMES: dict[str, Callable[..., Any]] = {
    "datetime": datetime.datetime,
    "date": datetime.date,
    "time": datetime.time,
    "timedelta": datetime.timedelta,
    "timezone": datetime.timezone,
}
_TIME_ARGUMENTS = (bytes, int, str, datetime.timedelta, datetime.timezone)


def _time(decoder: Decoder, cls: Global, args: tuple[Any, ...]) -> Any:
    """The standard library's own immutable times; their constructors take the pickled bytes and check them."""
    if any(type(arg) not in _TIME_ARGUMENTS for arg in args):
        raise MalformedError(f"a {cls.name} of what is no number")
    return _TIMES[cls.name](*args)


# --- numpy ---------------------------------------------------------------------------------------------------

_SCALARS = {"b1": "?", "i1": "b", "u1": "B", "i2": "h", "u2": "H", "i4": "i", "u4": "I", "i8": "q", "u8": "Q"}
_SCALARS |= {"f2": "e", "f4": "f", "f8": "d", "c8": "ff", "c16": "dd"}


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


def _numpy_shape(value: Any) -> tuple[int, ...]:
    if type(value) is int:
        value = (value,)
    if type(value) is not tuple or len(value) > MAX_DIMS or any(type(n) is not int or n < 0 for n in value):
        raise MalformedError("the shape of an array")
    return tuple(value)


def _numel(shape: tuple[int, ...]) -> int:
    numel = 1
    for n in shape:
        numel *= n
    return numel


def _fill_array(decoder: Decoder, array: Array, shape: Any, dtype: Any, data: Any, fortran: bool) -> Array:
    text, itemsize = _dtype_text(dtype)
    shape = _numpy_shape(shape)
    if text == "|O":
        if type(data) is not list or len(data) != _numel(shape):
            raise MalformedError("an array that is not as long as its shape says")
        array.objects = data
    else:
        if type(data) is bytearray:
            decoder.spend(len(data))
            data = bytes(data)
        if type(data) is not bytes or len(data) != _numel(shape) * itemsize:
            raise MalformedError("an array that is not as long as its shape says")
        array.data = data
    array.dtype, array.record, array.shape, array.fortran = text, dtype, shape, fortran
    return array


def _new_array(decoder: Decoder, _: Global, args: tuple[Any, ...]) -> Array:
    """`_reconstruct(ndarray, (0,), b'b')`: an empty array whose state follows."""
    return Array()


def _set_array(decoder: Decoder, array: Array, state: Any) -> None:
    _, shape, dtype, fortran, data = state
    if array.dtype:
        raise MalformedError("the state of an array is set twice")
    _fill_array(decoder, array, shape, dtype, data, bool(fortran))


def _frombuffer(decoder: Decoder, _: Global, args: tuple[Any, ...]) -> Array:
    """`_frombuffer(data, dtype, shape, order)`: an array, as protocol 5 writes it."""
    data, dtype, shape, order = args[:4]
    return _fill_array(decoder, Array(), shape, dtype, data, order == "F")


def _scalar(decoder: Decoder, _: Global, args: tuple[Any, ...]) -> Any:
    """`scalar(dtype, bytes)`: Python's own number where it has one, else an array of no dims."""
    dtype, data = args
    array = _fill_array(decoder, Array(), (), dtype, data, False)
    code = _SCALARS.get(array.dtype[1:])
    if code is None:
        return array
    values = struct.unpack((">" if array.dtype[0] == ">" else "<") + code, array.data)
    return complex(*values) if len(values) == 2 else values[0]


# --- torch ---------------------------------------------------------------------------------------------------


def _size(decoder: Decoder, _: Global, args: tuple[Any, ...]) -> tuple[Any, ...]:
    (size,) = args
    if type(size) is list:
        decoder.spend(len(size))
        return tuple(size)
    if type(size) is not tuple:
        raise MalformedError("a torch.Size of what is no tuple")
    return size


def _extent(storage: Any, dtype: Any, offset: Any, shape: Any, strides: Any) -> Extent:
    """The elements of a tensor, proven to lie within its storage.  Raises MalformedError."""
    if type(storage) is not Storage or type(dtype) is not DType:
        raise MalformedError("a tensor without a storage")
    if type(shape) is not tuple or type(strides) is not tuple or len(shape) != len(strides):
        raise MalformedError("a tensor's shape and strides do not fit")
    if len(shape) > MAX_DIMS or type(offset) is not int or offset < 0:
        raise MalformedError("a tensor's shape or offset makes no sense")
    numel, reach = 1, 0
    for n, step in zip(shape, strides, strict=True):
        if type(n) is not int or type(step) is not int or n < 0 or step < 0 or n > _MAX_INT64 or step > _MAX_INT64:
            raise MalformedError("a tensor's shape or strides are no integers of 64 bits, or negative")
        numel *= n
        reach += (n - 1) * step
    itemsize = dtype.itemsize
    if numel == 0:
        return Extent(storage.path, storage.offset, dtype, shape, strides)
    end = (offset + reach + 1) * itemsize
    if end > storage.nbytes:
        raise MalformedError(
            f"a tensor of shape {short(shape)} and strides {short(strides)} ends at byte {short(end)} "
            f"of a storage of {storage.nbytes} bytes"
        )
    if numel * itemsize > storage.nbytes and numel * itemsize > MAX_EXPANDED:
        raise MalformedError(f"a tensor of shape {short(shape)} over a storage of {storage.nbytes} bytes")
    return Extent(storage.path, storage.offset + offset * itemsize, dtype, shape, strides)


def _plain_bits(decoder: Decoder, metadata: Any) -> None:
    """Refuse a lazily conjugated or negated tensor: its stored bits are not its values."""
    if metadata:
        decoder.unsupported("a tensor whose conjugate or negative bit is set (call resolve_conj() and resolve_neg())")


def _tensor(decoder: Decoder, _: Global, args: tuple[Any, ...]) -> StoredTensor:
    """`_rebuild_tensor(storage, storage_offset, size, stride)`."""
    storage, offset, shape, strides = args
    return StoredTensor(_extent(storage, storage.dtype, offset, shape, strides))


def _tensor_v2(decoder: Decoder, _: Global, args: tuple[Any, ...]) -> StoredTensor:
    """`_rebuild_tensor_v2(storage, storage_offset, size, stride, requires_grad, backward_hooks, metadata=None)`."""
    if len(args) > 6:
        if len(args) > 7:
            raise MalformedError("a tensor of too many arguments")
        _plain_bits(decoder, args[6])
    storage, offset, shape, strides, requires_grad = args[:5]
    return StoredTensor(_extent(storage, storage.dtype, offset, shape, strides), requires_grad is True)


def _tensor_v3(decoder: Decoder, _: Global, args: tuple[Any, ...]) -> StoredTensor:
    """`_rebuild_tensor_v3(storage, storage_offset, size, stride, requires_grad, hooks, dtype, metadata=None)`.

    For dtypes that have no storage class of their own (uint16 and up, fp8, fp4).
    """
    if len(args) > 7:
        _plain_bits(decoder, args[7])
    storage, offset, shape, strides, requires_grad, _hooks, dtype = args[:7]
    return StoredTensor(_extent(storage, dtype, offset, shape, strides), requires_grad is True)


def _parameter(decoder: Decoder, _: Global, args: tuple[Any, ...]) -> Any:
    """`_rebuild_parameter(data, requires_grad, backward_hooks[, state])`."""
    data, requires_grad = args[:2]
    state = args[3] if len(args) > 3 else None
    if type(data) is Record:  # a parameter that is a DTensor
        return data
    if type(data) is not StoredTensor:
        raise MalformedError("a parameter that is no tensor")
    return StoredTensor(data.extent, requires_grad is True, _attributes(decoder, state))


def _attributes(decoder: Decoder, state: Any) -> Mapping[str, Any] | None:
    """A tensor's Python attributes: its `__dict__`, or that and its slots."""
    if state is None or type(state) is dict:
        return state or None
    if type(state) is tuple and len(state) == 2 and all(part is None or type(part) is dict for part in state):
        decoder.spend(sum(len(part) for part in state if part))
        return {**(state[0] or {}), **(state[1] or {})} or None
    raise MalformedError("a tensor's attributes are no dict")


def _from_type(decoder: Decoder, _: Global, args: tuple[Any, ...]) -> Any:
    """`_rebuild_from_type_v2(function, type, args, state)`: a tensor with attributes, or of a subclass."""
    function, cls, inner, state = args
    if type(function) is not Global or type(cls) is not Global or type(inner) is not tuple:
        raise MalformedError("a tensor of a subclass that makes no sense")
    if function.build is _wrapper_subclass:
        # DTensor, ShardedTensor: no elements of their own, all is in the state.
        return Record(cls.module, cls.name, inner, state=state)
    # Only these, so that nothing here calls itself.
    if function.build not in (_tensor, _tensor_v2, _tensor_v3, _parameter, _meta):
        raise MalformedError("a tensor of a subclass that is made by no tensor function")
    made = function.build(decoder, function, inner)
    if (cls.module, cls.name) not in _PLAIN_TENSORS or type(made) is not StoredTensor:
        decoder.unsupported(f"a tensor of class {cls.typename}")
    return StoredTensor(made.extent, made.requires_grad, _attributes(decoder, state))


def _wrapper_subclass(decoder: Decoder, _: Global, args: tuple[Any, ...]) -> Any:
    decoder.unsupported("a tensor subclass without storage")


def _meta(decoder: Decoder, _: Global, args: tuple[Any, ...]) -> Any:
    decoder.unsupported("a tensor on the meta device")


def _from_cpu_tensor(decoder: Decoder, _: Global, args: tuple[Any, ...]) -> StoredTensor:
    """`_rebuild_device_tensor_from_cpu_tensor(data, dtype, device, requires_grad)`: a tensor saved on XLA."""
    data, dtype, _device, requires_grad = args
    if type(data) is not StoredTensor or dtype is not data.dtype:
        raise MalformedError("a device tensor whose data is of another dtype")
    return StoredTensor(data.extent, requires_grad is True)


# --- the table -----------------------------------------------------------------------------------------------
#
# (module, names).  Everything that a pickle may name, and nothing else.  A name is added by adding it here.

_Row = tuple[str, str]

#: Classes whose objects become Records: dataclasses, namespaces, enums, whatever is made by REDUCE or NEWOBJ.
_RECORDS: tuple[_Row, ...] = (
    # Python
    ("argparse", "Namespace"),
    ("types", "SimpleNamespace"),
    ("signal", "Signals"),
    ("_io", "BytesIO"),
    ("uuid", "UUID SafeUUID"),
    ("decimal", "Decimal"),
    ("fractions", "Fraction"),
    # numpy
    ("numpy", "dtype"),
    ("numpy.random._pickle", "__generator_ctor __bit_generator_ctor __randomstate_ctor"),
    ("numpy.random.bit_generator", "SeedSequence __pyx_unpickle_SeedSequence"),
    # torch
    ("torch", "device"),
    ("torch._C", "Generator"),
    ("torch.serialization", "_get_layout"),
    # torch.distributed.checkpoint (`.metadata`)
    ("torch.distributed.checkpoint.metadata", "Metadata MetadataIndex StorageMeta"),
    ("torch.distributed.checkpoint.metadata", "TensorStorageMetadata ChunkStorageMetadata"),
    ("torch.distributed.checkpoint.metadata", "BytesStorageMetadata _MEM_FORMAT_ENCODING"),
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo _StoragePrefix SerializationFormat"),
    ("torch.distributed.checkpoint.planner", "SavePlan WriteItem WriteItemType TensorWriteData"),
    ("torch.distributed.checkpoint.planner", "BytesIOWriteData"),
    # DTensor (FSDP2) and ShardedTensor (FSDP1)
    ("torch.distributed.tensor._dtensor_spec", "DTensorSpec"),
    ("torch.distributed._tensor._dtensor_spec", "DTensorSpec"),
    ("torch.distributed._tensor.placement_types", "Shard Replicate Partial _Partial DTensorSpec"),
    ("torch.distributed.tensor.placement_types", "Shard Replicate Partial _StridedShard _MaskPartial"),
    ("torch.distributed.tensor._ops._embedding_ops", "_MaskPartial"),
    ("torch.distributed.device_mesh", "DeviceMesh _MeshLayout"),
    ("torch.distributed._mesh_layout", "_MeshLayout _FlatLayout"),
    ("torch.distributed._shard.sharded_tensor.api", "ShardedTensor.ProcessGroupState"),
    ("torch.distributed._shard.sharded_tensor.shard", "Shard"),
    ("torch.distributed._shard.sharded_tensor.metadata", "ShardedTensorMetadata MEM_FORMAT_ENCODING"),
    ("torch.distributed._shard.metadata", "ShardMetadata"),
    ("torch.distributed._shard.sharding_spec.api", "EnumerableShardingSpec"),
    ("torch.distributed._shard.sharding_spec.chunk_sharding_spec", "ChunkShardingSpec"),
    ("torch.distributed.remote_device", "_remote_device"),
    # DeepSpeed
    ("deepspeed.runtime.fp16.loss_scaler", "LossScaler DynamicLossScaler LossScalerBase LossScaleProfile"),
    ("deepspeed.utils.tensor_fragment", "fragment_address"),
    ("deepspeed.checkpoint.universal_checkpoint", "SubparamShape"),
    ("deepspeed.runtime.zero.offload_config", "OffloadDeviceEnum OffloadStateTypeEnum"),
    ("deepspeed.runtime.config", "DtypeEnum"),
    # Megatron
    ("megatron.core.enums", "ModelType Fp8Recipe Fp4Recipe"),
    ("megatron.core.transformer.enums", "AttnBackend AttnMaskType AttnType LayerType ModelType"),
    ("megatron.core.transformer.enums", "CudaGraphScope CudaGraphModule InferenceCudaGraphScope"),
    ("megatron.core.transformer.pipeline_parallel_layer_layout", "PipelineParallelLayerLayout"),
    ("megatron.core.optimizer.optimizer_config", "OptimizerConfig"),
    ("megatron.core.rerun_state_machine", "RerunDiagnostic RerunMode RerunState"),
    ("megatron.core.dist_checkpointing.strategies.torch", "MCoreMetadata MCoreSavePlan"),
    ("megatron.model.enums", "LayerType AttnType AttnMaskType PositionEmbeddingType"),
    ("megatron.enums", "ModelType LayerType AttnType AttnMaskType PositionEmbeddingType"),
    # transformers and accelerate, in client states and training arguments of other trainers
    ("transformers.trainer_utils", "IntervalStrategy SaveStrategy HubStrategy SchedulerType FSDPOption"),
    ("transformers.trainer_utils", "EvaluationStrategy HPSearchBackend"),
    ("transformers.training_args", "OptimizerNames ParallelMode TrainingArguments"),
    ("transformers.training_args_seq2seq", "Seq2SeqTrainingArguments"),
    ("transformers.trainer_pt_utils", "AcceleratorConfig"),
    ("transformers.integrations.deepspeed", "HfDeepSpeedConfig HfTrainerDeepSpeedConfig"),
    ("trl.trainer.sft_config", "SFTConfig"),
    ("trl.trainer.dpo_config", "DPOConfig"),
    ("trl.trainer.grpo_config", "GRPOConfig"),
    ("axolotl.core.training_args", "AxolotlTrainingArguments"),
    ("accelerate.state", "PartialState AcceleratorState"),
    ("accelerate.utils.dataclasses", "DeepSpeedPlugin FullyShardedDataParallelPlugin"),
    ("accelerate.utils.dataclasses", "DistributedType PrecisionType DynamoBackend RNGType"),
)

_PROPERTIES = "dtype layout requires_grad memory_format pin_memory"

#: Namedtuples and tuple states: the names of their parts, in order.
_FIELDS: tuple[tuple[str, str, str], ...] = (
    ("torch.distributed.tensor._dtensor_spec", "TensorMeta", "shape stride dtype"),
    ("torch.distributed.tensor._dtensor_spec", "ShardOrderEntry", "tensor_dim mesh_dims"),
    ("torch.distributed._tensor.placement_types", "TensorMeta", "shape stride dtype"),
    ("torch.distributed._tensor._dtensor_spec", "TensorMeta", "shape stride dtype"),
    ("torch.distributed.checkpoint.metadata", "TensorProperties", _PROPERTIES),
    ("torch.distributed._shard.sharded_tensor.metadata", "TensorProperties", _PROPERTIES),
)

#: Enums whose members Python 3.11.0 to 3.11.3 pickles by name.
_ENUMS: tuple[tuple[str, str, str], ...] = (
    ("deepspeed.runtime.zero.config", "ZeroStageEnum", "disabled=0 optimizer_states=1 gradients=2 weights=3"),
)

#: Classes that are only ever named: as a default factory, a tensor's type, an argument.
_NAMES: tuple[_Row, ...] = (
    ("builtins", "int float str bool list dict tuple object type"),
    ("__builtin__", "int long float str unicode bool list dict tuple object type"),
    ("numpy", "ndarray"),
    ("numpy.random._pcg64", "PCG64 PCG64DXSM"),
    ("numpy.random._philox", "Philox"),
    ("numpy.random._sfc64", "SFC64"),
    ("numpy.random._mt19937", "MT19937"),
    ("numpy.dtypes", "BoolDType Int32DType Int64DType UInt8DType UInt32DType UInt64DType"),
    ("numpy.dtypes", "Float32DType Float64DType"),
    ("torch", "Tensor"),
    ("torch", "contiguous_format preserve_format channels_last channels_last_3d"),
    ("torch.nn.parameter", "Parameter Buffer"),
    ("torch.distributed.tensor", "DTensor"),
    ("torch.distributed.tensor._api", "DTensor"),
    ("torch.distributed._tensor.api", "DTensor"),
    ("torch.distributed._shard.sharded_tensor.api", "ShardedTensor"),
)

#: Functions and classes that become a plain value.
_FUNCTIONS: tuple[tuple[str, str, Callable[[Decoder, Global, tuple[Any, ...]], Any]], ...] = (
    ("builtins __builtin__", "set", _set),
    ("builtins __builtin__", "frozenset", _frozenset),
    ("builtins __builtin__", "bytes", _bytes),
    ("builtins __builtin__", "bytearray", _bytearray),
    ("builtins __builtin__", "complex", _complex),
    ("builtins __builtin__", "slice", _slice),
    ("builtins __builtin__", "range xrange", _range),
    ("builtins __builtin__", "getattr", _getattr),
    ("copyreg copy_reg", "_reconstructor", _reconstructor),
    ("_codecs", "encode", _encode),
    ("collections", "OrderedDict Counter", _ordered_dict),
    ("collections", "defaultdict", _defaultdict),
    ("collections", "deque", _deque),
    ("datetime", "datetime date time timedelta timezone", _time),
    # Python 3.13 puts the classes into `pathlib._local`.
    ("pathlib pathlib._local", "PosixPath PurePosixPath WindowsPath PureWindowsPath", _path),
    # numpy 2 renamed `numpy.core` to `numpy._core`.
    ("numpy.core.multiarray numpy._core.multiarray", "_reconstruct", _new_array),
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

#: Constants that are pickled by name.
_VALUES: tuple[tuple[str, str, Any], ...] = (
    ("builtins", "Ellipsis", ...),
    ("__builtin__", "Ellipsis", ...),
)

#: torch's storage classes.  `UntypedStorage` is written for dtypes without one; it counts bytes.
_STORAGES: Mapping[str, str] = {
    "DoubleStorage": "float64",
    "FloatStorage": "float32",
    "HalfStorage": "float16",
    "BFloat16Storage": "bfloat16",
    "ComplexDoubleStorage": "complex128",
    "ComplexFloatStorage": "complex64",
    "LongStorage": "int64",
    "IntStorage": "int32",
    "ShortStorage": "int16",
    "CharStorage": "int8",
    "ByteStorage": "uint8",
    "BoolStorage": "bool",
    "UntypedStorage": "uint8",
}

#: What torch can write and no checkpoint converter should pretend to understand.
_UNSUPPORTED: tuple[tuple[str, str, str], ...] = (
    ("torch._utils", "_rebuild_qtensor", "a quantized tensor"),
    ("torch", "QInt8Storage QUInt8Storage QInt32Storage", "a quantized tensor"),
    ("torch", "QUInt4x2Storage QUInt2x4Storage", "a quantized tensor"),
    ("torch", "qint8 quint8 qint32 quint4x2 quint2x4", "a quantized tensor"),
    ("torch", "per_tensor_affine per_tensor_symmetric per_channel_affine", "a quantized tensor"),
    ("torch", "per_channel_symmetric per_channel_affine_float_qparams", "a quantized tensor"),
    ("torch._utils", "_rebuild_sparse_tensor", "a sparse tensor"),
    ("torch._utils", "_rebuild_sparse_csr_tensor", "a sparse tensor"),
    ("torch._utils", "_rebuild_nested_tensor", "a nested tensor"),
    (
        "torch._utils",
        "_rebuild_device_tensor_from_numpy _rebuild_xla_tensor",
        "a tensor within a numpy array",
    ),
    ("torch.storage", "_load_from_bytes", "a torch file within the pickle"),
    ("torch", "uint1 uint2 uint3 uint4 uint5 uint6 uint7", "a dtype of less than a byte"),
    ("torch", "int1 int2 int3 int4 int5 int6 int7", "a dtype of less than a byte"),
)

_PLAIN_TENSORS = {("torch", "Tensor"), ("torch.nn.parameter", "Parameter"), ("torch.nn.parameter", "Buffer")}


def _table() -> dict[tuple[str, str], Any]:
    table: dict[tuple[str, str], Any] = {("torch", dtype.name): dtype for dtype in dtypes.ALL}
    for module, names in _RECORDS:
        table.update({(module, name): Global(module, name, _record) for name in names.split()})
    for module, name, fields in _FIELDS:
        table[module, name] = Global(module, name, _record, tuple(fields.split()))
    for module, name, members in _ENUMS:
        values = {key: int(value) for key, value in (pair.split("=") for pair in members.split())}
        table[module, name] = Global(module, name, _record, members=values)
    for module, names in _NAMES:
        table.update({(module, name): Global(module, name) for name in names.split()})
    for modules, names, build in _FUNCTIONS:
        for module in modules.split():
            table.update({(module, name): Global(module, name, build) for name in names.split()})
    for module, name, value in _VALUES:
        table[module, name] = value
    for name, dtype_name in _STORAGES.items():
        kind = StorageType(dtypes.BY_NAME[dtype_name])
        # torch.cuda's classes stand in files from before 1.5; the elements are stored alike.
        table.update({(module, name): kind for module in ("torch", "torch.cuda", "torch.storage")})
    for module, names, what in _UNSUPPORTED:
        table.update({(module, name): Unsupported(what) for name in names.split()})
    return table


GLOBALS: Mapping[tuple[str, str], Any] = _table()

#: What may be a key: hashed in constant time, and without calling anything of the file's.
_KEYS = frozenset((str, int, float, bool, type(None), bytes, complex, DType, Record, Global, frozenset, range))
_KEYS |= {PurePosixPath, PureWindowsPath, *_TIMES.values()}


# --- files ---------------------------------------------------------------------------------------------------


def loads(data: bytes, *, path: str, name: str = "pickle", persistent: Callable[[Any], Any] | None = None) -> Any:
    """The object of one pickle that is all of `data`.

    `path` is the file and `name` the part of it, for messages.  Raises UnsafeError and CorruptError as
    `Decoder.run` does, and CorruptError where the pickle ends before or behind the data.
    """
    try:
        value, end = Decoder(data, path=path, name=name, persistent=persistent).run()
    except CutShortError:
        raise CorruptError(f"{name} is cut off", path=path, expected="more bytes", found=f"{len(data)} bytes") from None
    if end != len(data):
        raise CorruptError(
            f"there is something behind the pickle in {name}",
            path=path,
            expected=f"{end} bytes",
            found=f"{len(data)} bytes",
        )
    return value


def load_pickle(path: str | os.PathLike[str]) -> Any:
    """The object in a plain pickle file, such as a DCP `.metadata`.

    Raises NotFoundError, StorageError, CorruptError and UnsafeError.
    """
    path = os.fspath(path)
    fd = open_file(path)
    try:
        size = os.fstat(fd).st_size
        if size > MAX_PICKLE:
            raise CorruptError(
                "the pickle is too large to be one of a checkpoint",
                path=path,
                expected=f"at most {MAX_PICKLE} bytes",
                found=f"{size} bytes",
            )
        if size == 0:
            raise CorruptError("the file is empty", path=path, found="0 bytes")
        data = read_at(fd, path, 0, size)
    finally:
        os.close(fd)
    return loads(data, path=path, name=os.path.basename(path))
