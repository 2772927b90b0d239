"""Values that somebody else wrote, as text and plain data that are safe to show: bounded, and escaped.

No object that a reader made of a pickle is asked for its own text.
"""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

from ckpt.base.errors import printable
from ckpt.plan.dtypes import DType

_MAX_TEXT = 120  # characters of one value
MAX_MEMBERS = 8  # members shown of one container
_MAX_DEPTH = 4
_MAX_NODES = 200  # values shown of one entry

#: A repository of the Hub.
HUB_ID = re.compile(r"\w[\w.-]*/\w[\w.-]*")

#: A URL, also as what `Path` makes of one.
_URL = re.compile(r"([a-z][a-z0-9+.-]+):/")

JSON = None | bool | int | float | str | list[Any] | dict[str, Any]


def scheme_of(where: object) -> str | None:
    """`s3` of `s3://bucket/run`, and of the `s3:/bucket/run` that `Path` makes of it; None where this is no URL."""
    found = _URL.match(str(where))
    return found[1] if found else None


def one_line(text: str, limit: int = 400) -> str:
    """`text` bounded and with every control character escaped, line ends too."""
    return printable(text, limit).replace("\n", "\\n")


def counted(number: int, what: str, spec: str = "") -> str:
    """`number` and the noun `what`, in the plural where it is not one."""
    return f"{number:{spec}} {what}" + ("s" if number != 1 else "")


def did_you_mean(typed: str, known: Sequence[str]) -> str | None:
    """A hint that names what of `known` is nearly what was typed; None where nothing is."""
    spelled = {name.lower(): name for name in known}
    near = [spelled[name] for name in difflib.get_close_matches(typed.lower(), spelled, 2)]
    return f"did you mean {' or '.join(near)}?" if near else None


def aligned(heads: Sequence[str], rows: Sequence[Sequence[str]], right: Sequence[str] = ()) -> Iterator[str]:
    """A table in lines, the columns called `right` to the right."""
    every = [heads, *rows]
    widths = [max(len(row[column]) for row in every) for column in range(len(heads))]
    for row in every:
        cells = zip(row, widths, heads, strict=True)
        yield "  ".join(t.rjust(width) if head in right else t.ljust(width) for t, width, head in cells).rstrip()


@dataclass(frozen=True, slots=True)
class Bounds:
    """How much is shown of a value: characters of a text, members of a container, depth, and values of all."""

    text: int = _MAX_TEXT
    members: int = MAX_MEMBERS
    depth: int = _MAX_DEPTH
    nodes: int = _MAX_NODES


SHORT = Bounds()
#: Nothing that a framework saves is cut by these, and nothing that is made to harm gets past them.
FULL = Bounds(100_000, 100_000, 50, 1_000_000)


def summarise(value: Any, bounds: Bounds = SHORT) -> JSON:
    """`value` as bounded plain data: long texts cut, large or deep containers shortened, other objects by type only."""
    return _summarise(value, bounds, bounds.depth, [bounds.nodes])


def _summarise(value: Any, bounds: Bounds, depth: int, budget: list[int]) -> JSON:
    budget[0] -= 1
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, int):
        # Digits of a long integer take quadratic time, and Python refuses to print the longest ones.
        return value if value.bit_length() <= 64 else f"<integer of {value.bit_length()} bits>"
    if isinstance(value, float):
        return value if math.isfinite(value) else str(value)
    if isinstance(value, str):
        return one_line(value, bounds.text)
    if isinstance(value, bytes | bytearray):
        return f"<{len(value)} bytes>"
    if isinstance(value, DType):
        return value.name
    if isinstance(value, Mapping):
        return _summarise_mapping(value, bounds, depth, budget)
    if isinstance(value, list | tuple | set | frozenset):
        if depth == 0 or budget[0] <= 0:
            return f"<{len(value)} values>"
        shown = []
        for member in islice(value, bounds.members):
            if budget[0] <= 0:
                break
            shown.append(_summarise(member, bounds, depth - 1, budget))
        left = len(value) - len(shown)
        return [*shown, f"... {left} more"] if left else shown
    return _kind(value)


def _summarise_mapping(value: Mapping[Any, Any], bounds: Bounds, depth: int, budget: list[int]) -> JSON:
    if depth == 0 or budget[0] <= 0:
        return f"<{len(value)} entries>"
    shown: dict[str, JSON] = {}
    for key in islice(value, bounds.members * 2):
        if budget[0] <= 0:
            break
        shown[_key(key)] = _summarise(value[key], bounds, depth - 1, budget)
    left = len(value) - len(shown)
    if left:
        shown["..."] = f"{left} more"
    return shown


def _key(key: Any) -> str:
    return str(summarise(key) if isinstance(key, str | int | float | bytes | None) else _kind(key))


def _kind(value: Any) -> str:
    """What an object is, by the name that it records of its class, or else by its type."""
    name = getattr(value, "typename", None)
    shape = getattr(value, "shape", None)
    dtype = getattr(value, "dtype", None)
    text = one_line(name, _MAX_TEXT) if isinstance(name, str) else type(value).__name__
    if isinstance(shape, tuple) and all(isinstance(size, int) for size in shape) and len(shape) <= 64:
        return f"<{text} {one_line(str(dtype), _MAX_TEXT) if isinstance(dtype, str | DType) else ''}{list(shape)}>"
    return f"<{text}>"


def summary_text(value: Any) -> str:
    """`value` in one short line."""
    return json_text(summarise(value))


def json_text(value: JSON, limit: int = _MAX_TEXT) -> str:
    """What `summarise` returned, in one line of at most `limit` characters."""
    if isinstance(value, list):
        text = "[" + ", ".join(json_text(member, limit) for member in value) + "]"
    elif isinstance(value, dict):
        text = ", ".join(f"{name} {json_text(member, limit)}" for name, member in value.items())
    else:
        return str(value)
    return text if len(text) <= limit else text[: limit - 3] + "..."
