"""Options that a format adds to commands: for writing (`Layout`) and for reading (`ReadRequest`).

Each is a field made by `option` in a frozen dataclass. The writer gets typed options from `layout.read(TheDataclass)`.
`ckpt convert --help` imports the module, so it must stay small, without numpy or torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from functools import cache
from types import NoneType
from typing import Any, TypeVar, cast, get_args, get_type_hints

from ckpt.base.errors import UsageError

#: More ranks than any real run or axis has, and few enough for a loop.
MAX_SIZE = 1 << 16

#: Options for cutting a target into files, and the reason if a format does not take them.
OF_FILES = {
    "world_size": "any number of ranks can load its output",
    "max_shard_size": "its files are not cut by size",
}

Options = TypeVar("Options")


@dataclass(frozen=True, slots=True)
class Option:
    """An option: `--name` on the command line, `Layout(name=...)` in Python.

    `type` is bool, int, float or str. A reading option has `applies_to` (the checkpoints it applies to) and `absent`
    (the error for others).
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
        return f"--{self.name.replace('_', '-')}"

    def check(self, value: Any) -> None:
        """Raise UsageError if `value` is not allowed."""
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
    """Declare a field in a format's options."""
    return field(default=default, metadata={"help": help, **more})


def read_options(declaration: type[Options], requested: Mapping[str, Any]) -> Options:
    names = {one.name for one in fields(cast(Any, declaration))}
    return declaration(**{name: value for name, value in requested.items() if name in names})


@cache
def options_of(declaration: type) -> tuple[Option, ...]:
    hints = get_type_hints(declaration)
    return tuple(
        Option(one.name, _plain_hint(hints[one.name]), one.default, **one.metadata)
        for one in fields(declaration)
        if "help" in one.metadata
    )


def _plain_hint(hint: Any) -> Any:
    return next(kind for kind in get_args(hint) or (hint,) if kind is not NoneType)
