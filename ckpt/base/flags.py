"""Options shared by functions and the command line, declared without the command-line library.

A field with a `Flag` in its annotation is also a command-line option.

    @dataclass(frozen=True)
    class Work(OptionGroup):
        workers: Annotated[int, Flag(help="Threads that copy.", min=0)] = 0
        progress: Callable[[int], None] | None = None  # only for functions

    def copy(path: str, **keywords: Unpack[WorkKeywords]) -> None:
        work = Work.of(keywords)
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from inspect import Parameter
from types import NoneType, UnionType
from typing import TYPE_CHECKING, Any, Union, get_args, get_origin

if TYPE_CHECKING:
    from typing_extensions import Self

#: In order. Options without a section come last, under Options.
READ, WRITTEN, HOW, SHOWN, HUB = SECTIONS = (
    "What is read",
    "What is written",
    "How it is done",
    "What is shown",
    "The Hub",
)


@dataclass(frozen=True)
class Flag:
    """A command-line option, in the annotation of a parameter or a field.

    `names` are its command-line names, by default the parameter's own. `complete` names a function in
    `ckpt.options.completion`. `type` is needed if the annotation allows several. `parse` turns the typed text into the
    value.
    """

    names: tuple[str, ...] = ()
    help: str = ""
    section: str | None = None
    metavar: str | None = None
    min: float | None = None
    max: float | None = None
    complete: str | None = None
    type: Any = None
    parse: Callable[[str], Any] | None = None
    hidden: bool = False


@dataclass(frozen=True)
class Positional(Flag):
    """A command-line argument, in the annotation of a parameter or a field."""


class OptionGroup:
    """Base class for option groups."""

    @classmethod
    def of(cls, keywords: Mapping[str, Any]) -> Self:
        """Ignore keywords without a field."""
        names = {one.name for one in fields(cls)}  # type: ignore[arg-type]
        return cls(**{name: value for name, value in keywords.items() if name in names})


def flag_of(parameter: Parameter) -> Flag | None:
    return next((one for one in getattr(parameter.annotation, "__metadata__", ()) if isinstance(one, Flag)), None)


def type_of(hint: Any) -> Any:
    """Return an option's command-line type for its Python annotation.

    The first type in a union counts. A sequence becomes a list of strings.
    """
    if get_origin(hint) in (Union, UnionType):
        return type_of(next(one for one in get_args(hint) if one is not NoneType))
    return list[str] if get_origin(hint) is Sequence else hint


def others(keywords: Mapping[str, Any], *groups: type[OptionGroup]) -> dict[str, Any]:
    known = {one.name for group in groups for one in fields(group)}  # type: ignore[arg-type]
    return {name: value for name, value in keywords.items() if name not in known}
