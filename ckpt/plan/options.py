"""Options that a format adds to commands: for writing (`Layout`) and for reading (`ReadRequest`).

A format declares them as frozen dataclasses, each field made by `option`.  Its writer reads the given options with
`layout.read(TheDataclass)`, its reader with `request.read(TheDataclass)`, both typed.  The module of the dataclass is
imported for `ckpt convert --help`, so it stays small: neither numpy nor torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from types import NoneType
from typing import Any, TypeVar, cast, get_args, get_type_hints

from ckpt.base.errors import UsageError

#: Ranks of a run, and of any axis of it: more than the largest have had, and few enough to be counted one by one.
MAX_SIZE = 1 << 16

#: Options that say into which files a target is cut, with what is so of formats that do not take them.
OF_FILES = {
    "world_size": "any number of ranks loads what it writes",
    "max_shard_size": "its files are not cut by size",
}

Options = TypeVar("Options")


@dataclass(frozen=True, slots=True)
class Option:
    """`--name` on the command line, `Layout(name=...)` in Python.

    `type` is bool, int, float or str; `choices` are all values that a str may have, if not any.  Options for reading
    have `applies_to`, the checkpoints for which they have a meaning, and `absent`, the error for all others.
    """

    name: str
    type: type
    default: Any
    help: str
    min: int | None = None
    max: int | None = None
    metavar: str | None = None
    choices: tuple[str, ...] = ()
    applies_to: str | None = None
    absent: str = ""

    @property
    def is_for_reading(self) -> bool:
        return self.applies_to is not None

    @property
    def flag(self) -> str:
        """The option on the command line."""
        return f"--{self.name.replace('_', '-')}"

    def check(self, value: Any) -> None:
        """Raise UsageError where `value` is none that the option takes; the command line has looked before."""
        is_kind = type(value) is self.type or (self.type is float and type(value) is int)
        if is_kind and self.choices:
            is_kind = value in self.choices
        elif is_kind and (self.min is not None or self.max is not None):
            is_kind = (self.min is None or value >= self.min) and (self.max is None or value <= self.max)
        if not is_kind:
            limits = [f"{word} {end}" for word, end in (("from", self.min), ("to", self.max)) if end is not None]
            expected = " or ".join(map(repr, self.choices)) or " ".join([self.type.__name__, *limits])
            raise UsageError(f"{self.name} cannot be {value!r}", expected=expected)


def option(help: str, *, default: Any = None, **more: Any) -> Any:
    """A field of a format's options: its help text, and what else an `Option` has."""
    return field(default=default, metadata={"help": help, **more})


def read_options(declaration: type[Options], asked: Mapping[str, Any]) -> Options:
    """Return the `asked` options as the dataclass that declares them, without all others."""
    names = {one.name for one in fields(cast(Any, declaration))}
    return declaration(**{name: value for name, value in asked.items() if name in names})


def options_of(declaration: type) -> tuple[Option, ...]:
    """The options that a dataclass declares.  A field of type `int | None` takes an int."""
    hints = get_type_hints(declaration)
    return tuple(
        Option(one.name, _plain_hint(hints[one.name]), one.default, **one.metadata)
        for one in fields(declaration)
        if "help" in one.metadata
    )


def _plain_hint(hint: Any) -> Any:
    return next(kind for kind in get_args(hint) or (hint,) if kind is not NoneType)
