"""Pickle machine without imports.

A global is looked up in a table by its exact (module, name). A call runs our function. It returns a plain value, a
`Record` or a `StoredTensor`. Any other global is refused.

For any bytes, the machine returns or raises a `CkptError`. Its memory is linear in the pickle's length. The result is a
tree for simple recursive code: at most `MAX_DEPTH` deep, without cycles except through a `Record`, and not much larger
unfolded than the pickle.

Opcodes follow Python 3.13's `pickletools` (protocols 0 to 5).
"""

from __future__ import annotations

import struct
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import KW_ONLY, dataclass, field
from pathlib import PurePosixPath, PureWindowsPath
from typing import Any, NoReturn

from ckpt.base.errors import CorruptError, UnsafeError, printable
from ckpt.base.text import pluralize
from ckpt.containers.torchfile import values
from ckpt.containers.torchfile.tree import LEAVES, check_tree, children, is_branch
from ckpt.containers.torchfile.values import (
    MAX_LINE,
    MAX_LONG,
    MAX_PICKLE,
    TIMES,
    Array,
    CutShortError,
    Global,
    MalformedError,
    Record,
    Storage,
    StoredDict,
    StoredTensor,
    Unsupported,
    is_part,
)
from ckpt.plan.dtypes import DType

Table = Mapping[tuple[str, str], Any]

_TOO_DEEP_A_KEY = 8
#: Comparisons between keys with equal hashes. Real non-text keys are few.
_MAX_ALIKE = 1 << 20
#: Types with a unique hash, or one that no other process can predict.
_UNLIKE = frozenset((str, bytes, bool, type(None), DType, Record, Global, PurePosixPath, PureWindowsPath))
#: Bytes between checks, and growth factor between full tree walks.
_LOOK, _WALK = 1 << 18, 4
#: Containers allowed for any pickle, and bytes per further container. Real pickles have 9 or more.
_FREE_CONTAINERS, _CONTAINER = 1 << 16, 4

#: Key types with a constant-time hash that calls no code from the file.
_KEYS = frozenset((str, int, float, bool, type(None), bytes, complex, DType, Record, Global, frozenset, range))
_KEYS |= {PurePosixPath, PureWindowsPath, *TIMES.values()}

_MEANT_AS_MALFORMED = (LookupError, TypeError, ValueError, ArithmeticError, AttributeError, MalformedError)


@dataclass(slots=True, eq=False)
class Machine:
    """One run over one pickle.

    `persistent` resolves persistent ids (torch's storages); without it, they are refused. `runs` is called with the
    position after each mark and returns the position to continue from. It must have the same effect as the opcodes in
    between, except for `skipped` memo entries that nothing refers to.
    """

    data: bytes
    table: Table
    _: KW_ONLY
    path: str
    name: str = "pickle"
    persistent: Callable[[Any], Any] | None = None
    runs: Callable[[Machine, int], int] | None = None
    skipped: int = 0
    stack: list[Any] = field(default_factory=list)
    marks: list[int] = field(default_factory=list)
    memo: dict[int, Any] = field(default_factory=dict)
    allowance: int = field(init=False)
    containers: int = 0
    alike: dict[tuple[int, int], int] = field(default_factory=dict)
    left_alike: int = _MAX_ALIKE
    look: int = _LOOK
    walk: int = _LOOK
    unlisted: dict[int, Record] = field(default_factory=dict)

    def __post_init__(self) -> None:
        # A pickler emits each container once. A bomb copies one long list repeatedly.
        self.allowance = 4 * len(self.data) + (1 << 16)

    def run(self, start: int = 0) -> tuple[Any, int]:
        """Return the object at `start` and the position after it.

        Raise UnsafeError for a global outside the table or a forbidden call, CorruptError for a senseless pickle, and
        CutShortError if the bytes end before the pickle.
        """
        data, handlers, stack, memo, at = self.data, _HANDLERS, self.stack, self.memo, start
        skipped = self.skipped
        try:
            while True:  # CPython 3.11 specialises only loops that end in a plain jump
                code = data[at]
                if code == _MEMOIZE:
                    memo[len(memo) + skipped] = stack[-1]
                    at += 1
                elif code == _LONG_GET:
                    stack.append(memo[_u32(data, at + 1)[0]])
                    at += 5
                elif code == _GET:
                    stack.append(memo[data[at + 1]])
                    at += 2
                elif code == _BYTE:
                    stack.append(data[at + 1])
                    at += 2
                elif code == _STOP:
                    break
                elif code == _MARK:
                    self.marks.append(len(stack))
                    at += 1
                    if self.runs is not None:
                        at = self.runs(self, at)
                        skipped = self.skipped
                else:
                    at = handlers[code](self, at + 1) or at + 1
                    if at > self.look:
                        self.prove(at)
            if len(self.stack) != 1 or self.marks:
                raise MalformedError(f"{pluralize(len(self.stack), 'object')} left on the stack")
            value = self.stack.pop()
            if type(value) not in LEAVES:
                check_tree(value, at + 1 - start)
            if self.unlisted:
                self.check_unlisted()
            return value, at + 1
        except struct.error:  # an opcode's numeric argument is cut off
            raise CutShortError from None
        except _MEANT_AS_MALFORMED as error:
            if at >= len(data) or (at + 1 == len(data) and data[at] in _ONE_BYTE):
                raise CutShortError from None
            raise CorruptError(
                f"the pickle is damaged: {_reason(error)}", path=self.path, found=f"at byte {at} of {self.name}"
            ) from None

    def prove(self, length: int) -> None:
        self.look = length + _LOOK
        if self.containers > _FREE_CONTAINERS + length // _CONTAINER:
            raise MalformedError("it makes too many objects for its length")
        if length > self.walk:
            self.walk = _WALK * length
            check_tree(self.stack, length)

    def line_at(self, pos: int, limit: int = MAX_LINE) -> tuple[bytes, int]:
        end = self.data.find(b"\n", pos, pos + limit)
        if end < 0:
            if len(self.data) - pos < limit:
                raise CutShortError
            raise MalformedError(f"a line of more than {pluralize(limit, 'character')}")
        return self.data[pos:end], end + 1

    def pop_mark(self) -> list[Any]:
        stack = self.stack
        mark = self.marks.pop()
        if mark > len(stack):
            raise MalformedError("the stack was emptied beyond a mark")
        items = stack[mark:]
        del stack[mark:]
        return items

    def spend(self, copies: int) -> None:
        self.allowance -= copies
        if self.allowance < 0:
            raise MalformedError("it copies more than it holds")

    def check_new_key(self, target: Any, key: Any) -> None:
        """Refuse a key that `check_key` refuses, or too many keys in `target` with equal hashes.

        -1 and -2 have the same hash, and so do all tuples with them.
        """
        self.check_key(key)
        if type(key) in _UNLIKE or (type(key) is int and -2 < key < 1 << 60):
            return
        place = id(target), hash(key)
        alike = self.alike[place] = self.alike.get(place, -1) + 1
        self.left_alike -= alike
        if self.left_alike < 0:
            raise MalformedError("too many keys with equal hashes")

    def check_key(self, key: Any, depth: int = 0) -> None:
        """Refuse a key that is unhashable, or whose hash would recurse or take long."""
        kind = type(key)
        if kind is tuple:
            if depth > _TOO_DEEP_A_KEY:
                raise MalformedError("a key of nested tuples")
            self.spend(len(key))
            for item in key:
                self.check_key(item, depth + 1)
        elif kind not in _KEYS:
            raise MalformedError(f"a {kind.__name__} as a key")

    def look_up(self, module: Any, name: Any) -> Any:
        if type(module) is not str or type(name) is not str:
            raise MalformedError("a global's name is not text")
        try:
            found = self.table[module, name]
        except KeyError:
            raise UnsafeError(
                f"the pickle names {module}.{name}, unknown in checkpoints; nothing was imported and nothing was run",
                path=self.path,
                hint=way_out(module),
            ) from None
        if type(found) is Unsupported:
            self.unsupported(found.what)
        if type(found) is Record:  # a constant: copied, so that a pickle cannot change the table
            return Record(found.module, found.name, found.args)
        return found

    def unsupported(self, what: str) -> NoReturn:
        raise UnsafeError(f"unsupported content in the file: {what}", path=self.path)

    def call(self, function: Any, args: Any) -> Any:
        if type(function) is not Global or function.build is None:
            name = function.typename if type(function) is Global else f"an object of type {type(function).__name__}"
            raise UnsafeError(f"the pickle calls {name}, and this is not callable; nothing was run", path=self.path)
        if type(args) is not tuple:
            raise MalformedError("a call's arguments are not a tuple")
        return function.build(self, function, args)

    def new(self, cls: Global, args: tuple[Any, ...]) -> Any:
        """Create an object of `cls`: a record if its class is outside the table."""
        return self.call(cls, args) if cls.is_listed else self.record(cls, args)

    def record(self, cls: Global, args: tuple[Any, ...]) -> Record:
        made = Record(cls.module, cls.name, args)
        self.unlisted[id(made)] = made
        return made

    def check_unlisted(self) -> None:
        """Refuse a tensor inside an object with a class outside the table."""
        waiting: list[tuple[Record, Any]] = [(one, one) for one in self.unlisted.values()]
        seen: set[int] = set()
        while waiting:
            owner, value = waiting.pop()
            if type(value) in LEAVES and type(value) is not Storage:
                continue
            if isinstance(value, StoredTensor | Storage) or is_part(value):
                raise UnsafeError(
                    f"the pickle holds tensors inside an object of an unknown class, {owner.typename}",
                    path=self.path,
                    hint=way_out(owner.module),
                )
            if id(value) not in seen and is_branch(value):
                seen.add(id(value))
                waiting += ((owner, child) for child in children(value))

    def extend(self, target: Any, items: list[Any], what: str = "items are") -> None:
        if type(target) is not list and type(target) is not deque:
            raise MalformedError(f"{what} appended to a {type(target).__name__}")
        target.extend(items)

    def dict_update(self, target: Any, items: list[Any]) -> Any:
        if id(target) in self.unlisted:  # its class derives from dict
            target.kwargs = target.kwargs or {}
            self.dict_update(target.kwargs, items)
            return target
        if type(target) is not dict and type(target) is not StoredDict:
            raise MalformedError(f"items are set on a {type(target).__name__}")
        if len(items) % 2:
            raise MalformedError("a key has no value")
        for i in range(0, len(items), 2):
            key = items[i]
            if type(key) is not str:
                self.check_new_key(target, key)
            target[key] = items[i + 1]
        return target

    def set_update(self, target: Any, items: Iterable[Any]) -> set[Any]:
        if type(target) is not set:
            raise MalformedError(f"items are added to a {type(target).__name__}")
        for item in items:
            self.check_new_key(target, item)
            target.add(item)
        return target


def way_out(module: str) -> str:
    package = printable(module.partition(".")[0], 100)
    return (
        f"load the file with {package}, only if you trust its origin, and save tensors and plain values (a state_dict)"
    )


def _reason(error: Exception) -> str:
    if isinstance(error, MalformedError):
        return str(error)
    if isinstance(error, KeyError):
        return "it refers to an object that was never stored"
    if isinstance(error, IndexError):
        return "its stack is empty"
    return f"an invalid value ({type(error).__name__})"


# --- opcodes ---------------------------------------------------------------------------------------------------
#
# A handler takes the position after the opcode. It returns the position after the argument, or None without argument.

_Handler = Callable[[Machine, int], int | None]


def _push_number(layout: str) -> _Handler:
    unpack, size = struct.Struct(layout).unpack_from, struct.calcsize(layout)

    def handler(machine: Machine, pos: int) -> int:
        machine.stack.append(unpack(machine.data, pos)[0])
        return pos + size

    return handler


def _push_counted(layout: str, made_from: Callable[[bytes], Any], most: int | None = None, what: str = "") -> _Handler:
    """Refuse a negative count, or one above `most`, with `what`."""
    unpack, size = struct.Struct(layout).unpack_from, struct.calcsize(layout)

    def handler(machine: Machine, pos: int) -> int:
        data = machine.data
        length = unpack(data, pos)[0]
        if most is not None and not 0 <= length <= most:
            raise MalformedError(what.format(length))
        pos += size
        end = pos + length
        if end > len(data):
            raise CutShortError
        machine.stack.append(made_from(data[pos:end]))
        return int(end)

    return handler


def _line(made_from: Callable[[bytes], Any], limit: int = MAX_LINE) -> _Handler:
    def handler(machine: Machine, pos: int) -> int:
        line, pos = machine.line_at(pos, limit)
        machine.stack.append(made_from(line))
        return pos

    return handler


def _numbered() -> MalformedError:
    """Return the error for explicit memo numbers, not supported with `Machine.runs`."""
    return MalformedError("entries of the memo are numbered")


def _put(layout: str) -> _Handler:
    unpack, size = struct.Struct(layout).unpack_from, struct.calcsize(layout)

    def handler(machine: Machine, pos: int) -> int:
        if machine.runs is not None:
            raise _numbered()
        index = unpack(machine.data, pos)[0]
        machine.memo[index] = machine.stack[-1]
        return pos + size

    return handler


def _constant(value: Any) -> _Handler:
    return lambda machine, pos: machine.stack.append(value)


def _empty(kind: type) -> _Handler:
    weight = 4 if kind is set else 1  # as large as four lists

    def handler(machine: Machine, pos: int) -> None:
        machine.containers += weight
        machine.stack.append(kind())

    return handler


def _from_mark(made_from: Callable[[Machine, list[Any]], Any]) -> _Handler:
    def handler(machine: Machine, pos: int) -> None:
        machine.containers += 1
        machine.stack.append(made_from(machine, machine.pop_mark()))

    return handler


def _into_top(put: Callable[[Machine, Any, list[Any]], Any]) -> _Handler:
    def handler(machine: Machine, pos: int) -> None:
        items = machine.pop_mark()
        put(machine, machine.stack[-1], items)

    return handler


def _malformed(what: str) -> _Handler:
    def handler(machine: Machine, pos: int) -> NoReturn:
        raise MalformedError(what)

    return handler


def _unsupported(what: str) -> _Handler:
    return lambda machine, pos: machine.unsupported(what)


def _short_text(machine: Machine, pos: int) -> int:
    end = pos + 1 + machine.data[pos]
    if end > len(machine.data):
        raise CutShortError
    machine.stack.append(str(machine.data[pos + 1 : end], "utf-8", "surrogatepass"))
    return end


def _byte_put(machine: Machine, pos: int) -> int:
    if machine.runs is not None:
        raise _numbered()
    machine.memo[machine.data[pos]] = machine.stack[-1]
    return pos + 1


def _append(machine: Machine, pos: int) -> None:
    item = machine.stack.pop()
    machine.extend(machine.stack[-1], [item], "an item is")


def _tuple1(machine: Machine, pos: int) -> None:
    machine.containers += 1
    machine.stack[-1] = (machine.stack[-1],)


def _tuple2(machine: Machine, pos: int) -> int | None:
    machine.containers += 1
    last = machine.stack.pop()
    machine.stack[-1] = (machine.stack[-1], last)
    return _reduce_of_tuple(machine, pos)


def _tuple3(machine: Machine, pos: int) -> int | None:
    machine.containers += 1
    stack = machine.stack
    last, middle = stack.pop(), stack.pop()
    stack[-1] = (stack[-1], middle, last)
    return _reduce_of_tuple(machine, pos)


def _reduce_of_tuple(machine: Machine, pos: int) -> int | None:
    """Run a torch.Size's usual opcodes in one step if they follow."""
    if not machine.data.startswith(_REDUCE_OF_TUPLE, pos):
        return None
    stack, memo = machine.stack, machine.memo
    next_ = len(memo) + machine.skipped
    memo[next_] = stack[-1]
    memo[next_ + 1] = stack[-1] = (stack[-1],)
    _reduce(machine, pos)
    memo[next_ + 2] = stack[-1]
    return pos + len(_REDUCE_OF_TUPLE)


def _no_arguments(machine: Machine, pos: int) -> int | None:
    """Push (). If the opcodes for an object without arguments follow, create it and begin its state dict."""
    stack, memo = machine.stack, machine.memo
    stack.append(())
    if not machine.data.startswith(_OBJECT_WITH_STATE, pos):
        return None
    _newobj(machine, pos)
    next_ = len(memo) + machine.skipped
    memo[next_] = stack[-1]
    state: dict[Any, Any] = {}
    stack.append(state)
    memo[next_ + 1] = state
    machine.marks.append(len(stack))
    return pos + len(_OBJECT_WITH_STATE)


def _setitem(machine: Machine, pos: int) -> None:
    value, key = machine.stack.pop(), machine.stack.pop()
    machine.dict_update(machine.stack[-1], [key, value])


def _pop(machine: Machine, pos: int) -> None:
    if machine.marks and machine.marks[-1] == len(machine.stack):
        machine.marks.pop()
    else:
        machine.stack.pop()


def _pop_mark(machine: Machine, pos: int) -> None:
    machine.pop_mark()


def _text_get(machine: Machine, pos: int) -> int:
    line, pos = machine.line_at(pos)
    machine.stack.append(machine.memo[values.decimal(line)])
    return pos


def _text_put(machine: Machine, pos: int) -> int:
    if machine.runs is not None:
        raise _numbered()
    line, pos = machine.line_at(pos)
    top = machine.stack[-1]
    machine.memo[values.decimal(line)] = top
    return pos


def _global(machine: Machine, pos: int) -> int:
    module, pos = machine.line_at(pos)
    name, pos = machine.line_at(pos)
    machine.stack.append(machine.look_up(module.decode(), name.decode()))
    return pos


def _stack_global(machine: Machine, pos: int) -> None:
    name, module = machine.stack.pop(), machine.stack.pop()
    machine.stack.append(machine.look_up(module, name))


def _inst(machine: Machine, pos: int) -> int:
    module, pos = machine.line_at(pos)
    name, pos = machine.line_at(pos)
    args = tuple(machine.pop_mark())
    machine.stack.append(machine.call(machine.look_up(module.decode(), name.decode()), args))
    return pos


def _obj(machine: Machine, pos: int) -> None:
    cls, *args = machine.pop_mark()
    machine.stack.append(machine.call(cls, tuple(args)))


def _reduce(machine: Machine, pos: int) -> None:
    stack = machine.stack
    machine.containers += 2  # as large as two containers
    args = stack.pop()
    function = stack[-1]
    if type(function) is Global and function.build is not None and type(args) is tuple:
        stack[-1] = function.build(machine, function, args)
    else:
        stack[-1] = machine.call(function, args)


def _newobj(machine: Machine, pos: int) -> None:
    cls, args = machine.stack[-2], machine.stack[-1]
    if type(cls) is Global and not cls.is_listed and type(args) is tuple:
        machine.containers += 2
        machine.stack.pop()
        machine.stack[-1] = machine.new(cls, args)
    else:
        _reduce(machine, pos)


def _newobj_ex(machine: Machine, pos: int) -> None:
    kwargs, args = machine.stack.pop(), machine.stack.pop()
    cls = machine.stack[-1]
    made = machine.call(cls, args) if type(cls) is not Global or type(args) is not tuple else machine.new(cls, args)
    if type(kwargs) is not dict or (kwargs and type(made) is not Record):
        raise MalformedError("invalid keyword arguments")
    if kwargs:
        made.kwargs = kwargs
    machine.stack[-1] = made


def _is_plain_state(state: Any) -> bool:
    parts = state if type(state) is tuple and len(state) == 2 else (state,)
    return all(part is None or type(part) is dict for part in parts)


def _build(machine: Machine, pos: int) -> None:
    state = machine.stack.pop()
    target = machine.stack[-1]
    kind = type(target)
    if kind is Record:
        if target.state is not None:
            raise MalformedError("an object's state is set twice")
        if id(target) in machine.unlisted and not _is_plain_state(state):
            raise UnsafeError(
                f"the pickle sets a state for {target.typename}, and only its own code understands it; nothing was run",
                path=machine.path,
                hint=way_out(target.module),
            )
        target.state = state
    elif kind is Array:
        target.set_state(state, machine.spend)
    elif kind is StoredDict and type(state) is dict:
        target.attributes = state
    else:
        what = repr(target) if kind is Global else f"a {kind.__name__}"
        raise UnsafeError(
            f"the pickle sets a state for {what}, but this has no state; nothing was run", path=machine.path
        )


def _proto(machine: Machine, pos: int) -> int:
    (version,) = struct.unpack_from("B", machine.data, pos)
    if version > 5:
        raise MalformedError(f"protocol {version}")
    return pos + 1


def _frame(machine: Machine, pos: int) -> int:
    if struct.unpack_from("<Q", machine.data, pos)[0] > len(machine.data) - pos - 8:
        raise CutShortError
    return pos + 8


def _binpersid(machine: Machine, pos: int) -> None:
    if machine.persistent is None:
        machine.unsupported("a persistent id (a part of the object is stored elsewhere)")
    machine.stack[-1] = machine.persistent(machine.stack[-1])


_STOP, _MARK, _MEMOIZE, _LONG_GET, _GET, _BYTE = b".(\x94jhK"
_u32 = struct.Struct("<I").unpack_from
#: Protocol 4's opcodes for every torch.Size and for every object.
_REDUCE_OF_TUPLE = b"\x94\x85\x94R\x94"
_OBJECT_WITH_STATE = b"\x81\x94}\x94("
_ONE_BYTE = b"K\x8chq"

OPCODES: Mapping[bytes, _Handler] = {
    # numbers
    b"I": _line(values.decimal_or_bool),
    b"J": _push_number("<i"),
    b"M": _push_number("<H"),
    b"L": _line(lambda line: values.decimal(line.removesuffix(b"L"))),
    b"\x8a": _push_counted("B", values.two_complement),
    b"\x8b": _push_counted("<i", values.two_complement, MAX_LONG, "an integer of {} bytes"),
    b"F": _line(float),
    b"G": _push_number(">d"),
    # text and bytes
    b"S": _line(values.quoted),
    b"T": _push_counted("<i", values.python2_text, 1 << 31, "a string of negative length"),
    b"U": _push_counted("B", values.python2_text),
    b"B": _push_counted("<I", bytes),
    b"C": _push_counted("B", bytes),
    b"\x8e": _push_counted("<Q", bytes),
    b"\x96": _push_counted("<Q", bytearray),
    b"\x97": _malformed("it refers to buffers outside the file"),
    b"\x98": _malformed("it refers to buffers outside the file"),
    b"V": _line(values.escaped, MAX_PICKLE),
    b"\x8c": _short_text,
    b"X": _push_counted("<I", values.text),
    b"\x8d": _push_counted("<Q", values.text),
    # constants and containers
    b"N": _constant(None),
    b"\x88": _constant(True),
    b"\x89": _constant(False),
    b"]": _empty(list),
    b"a": _append,
    b"e": _into_top(Machine.extend),
    b"l": _from_mark(lambda machine, items: items),
    b")": _no_arguments,
    b"t": _from_mark(lambda machine, items: tuple(items)),
    b"\x85": _tuple1,
    b"\x86": _tuple2,
    b"\x87": _tuple3,
    b"}": _empty(dict),
    b"d": _from_mark(lambda machine, items: machine.dict_update({}, items)),
    b"s": _setitem,
    b"u": _into_top(Machine.dict_update),
    b"\x8f": _empty(set),
    b"\x90": _into_top(Machine.set_update),
    b"\x91": _from_mark(lambda machine, items: frozenset(machine.set_update(set(), items))),
    # stack and memo
    b"0": _pop,
    b"2": lambda machine, pos: machine.stack.append(machine.stack[-1]),
    b"1": _pop_mark,
    b"g": _text_get,
    b"p": _text_put,
    b"q": _byte_put,
    b"r": _put("<I"),
    # globals and calls
    b"\x82": _unsupported("an extension code (EXT1)"),
    b"\x83": _unsupported("an extension code (EXT2)"),
    b"\x84": _unsupported("an extension code (EXT4)"),
    b"c": _global,
    b"\x93": _stack_global,
    b"R": _reduce,
    b"b": _build,
    b"i": _inst,
    b"o": _obj,
    b"\x81": _newobj,
    b"\x92": _newobj_ex,
    # framing
    b"\x80": _proto,
    b"\x95": _frame,
    b"P": _unsupported("a persistent id in text form"),
    b"Q": _binpersid,
}


def _unknown_opcode(machine: Machine, pos: int) -> NoReturn:
    raise MalformedError(f"unknown opcode {machine.data[pos - 1]:#04x}")


_HANDLERS: list[_Handler] = [OPCODES.get(bytes([code]), _unknown_opcode) for code in range(256)]
