"""Values and errors as JSON, for messages between processes.

Anyone who reaches the port of the first process can send it a message, and the processes share no secret, so nothing
is unpickled. Messages hold JSON alone, and an error is rebuilt only as one of the classes known here.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any, NoReturn

from ckpt.base.errors import CkptError
from ckpt.base.streams import TerminatedError
from ckpt.base.words import CommandHelp, Keyword, Message


def dump(value: Any) -> str:
    """Raise TypeError for a type that can't be sent."""
    return json.dumps(_encoded(value, _refuse))


def load(message: str | bytes) -> Any:
    """Raise ValueError if `message` doesn't come from `dump`."""
    try:
        return _decoded(json.loads(message))
    except (AttributeError, KeyError, TypeError, RecursionError) as error:
        raise ValueError(f"not a message of ckpt: {error}") from None


def _refuse(value: object) -> NoReturn:
    raise TypeError(f"{type(value).__name__} can't be sent to another process")


def _encoded(value: Any, other: Callable[[object], str]) -> Any:
    if isinstance(value, Message):
        return {"message": [_encoded(part, other) for part in value.parts]}
    if isinstance(value, Keyword | CommandHelp):
        return {"part": type(value).__name__, "values": [_encoded(one, other) for one in vars(value).values()]}
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, list):
        return [_encoded(one, other) for one in value]
    if isinstance(value, tuple):
        return {"tuple": [_encoded(one, other) for one in value]}
    if isinstance(value, dict):
        return {"dict": [[_encoded(key, other), _encoded(one, other)] for key, one in value.items()]}
    if isinstance(value, BaseException):
        names = [kind.__name__ for kind in type(value).__mro__]
        return {"error": names, "args": _encoded([*value.args], str), "facts": _encoded(vars(value), str)}
    return other(value)


def _decoded(value: Any) -> Any:
    if isinstance(value, list):
        return [_decoded(one) for one in value]
    if not isinstance(value, dict):
        return value
    if "tuple" in value:
        return tuple(map(_decoded, value["tuple"]))
    if "dict" in value:
        return {_decoded(key): _decoded(one) for key, one in value["dict"]}
    if "message" in value:
        return Message.of(map(_decoded, value["message"]))
    if "part" in value:
        part = {"Keyword": Keyword, "CommandHelp": CommandHelp}[value["part"]]
        return part(*map(_decoded, value["values"]))
    kinds: list[type[BaseException]] = [*_all_kinds(CkptError), KeyboardInterrupt, TerminatedError, MemoryError]
    known = {kind.__name__: kind for kind in kinds}
    kind = next((known[name] for name in value["error"] if name in known), RuntimeError)
    error = kind.__new__(kind)
    error.args = tuple(_decoded(value["args"]))
    vars(error).update(_decoded(value["facts"]))
    return error


def _all_kinds(kind: type[CkptError]) -> Iterator[type[CkptError]]:
    yield kind
    for one in kind.__subclasses__():
        yield from _all_kinds(one)
