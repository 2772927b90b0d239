"""Options as functions and the command line share them: declared once, without the library of the command line.

A group is a frozen dataclass that derives from `OptionGroup`.  Its fields are keywords of functions.  A field with
a `Flag` in its annotation is an option of commands, too.

    @dataclass(frozen=True)
    class Work(OptionGroup):
        workers: Annotated[int, Flag(help="Threads that copy.", min=0)] = 0
        progress: Callable[[int], None] | None = None  # of functions only

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

#: Sections of the help texts, in this order.  Options without one come last, under Options.
READ, WRITTEN, HOW, SHOWN, HUB = SECTIONS = (
    "What is read",
    "What is written",
    "How it is done",
    "What is shown",
    "The Hub",
)


@dataclass(frozen=True)
class Flag:
    """An option of a command, in the annotation of a parameter or of a field.

    Attributes:
        names: Words on the command line; none for the parameter's own name.
        help: Its line in the help.
        section: Its section in the help.
        metavar: Its value in the help.
        min: Smallest number.
        max: Largest number.
        complete: Function of `ckpt.options.completion` that completes its value.
        type: Type on the command line, if the annotation allows several.
        parse: Function that makes the value of what was typed.
        hidden: True if the help leaves it out.
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
    """An argument of a command, in the annotation of a parameter or of a field."""


class OptionGroup:
    """Base of groups of options."""

    @classmethod
    def of(cls, keywords: Mapping[str, Any]) -> Self:
        """Return the group with its values from the keywords of a function."""
        names = {one.name for one in fields(cls)}  # type: ignore[arg-type]
        return cls(**{name: value for name, value in keywords.items() if name in names})


def flag_of(parameter: Parameter) -> Flag | None:
    """Return the declaration of an option or argument; None for any other parameter."""
    return next((one for one in getattr(parameter.annotation, "__metadata__", ()) if isinstance(one, Flag)), None)


def type_of(hint: Any) -> Any:
    """Return the type of an option on the command line from its annotation in Python, without None.

    Of a union it is the first type; a sequence is a list of strings.
    """
    if get_origin(hint) in (Union, UnionType):
        return type_of(next(one for one in get_args(hint) if one is not NoneType))
    return list[str] if get_origin(hint) is Sequence else hint


def others(keywords: Mapping[str, Any], *groups: type[OptionGroup]) -> dict[str, Any]:
    """Return the keywords that belong to none of `groups`."""
    known = {one.name for group in groups for one in fields(group)}  # type: ignore[arg-type]
    return {name: value for name, value in keywords.items() if name not in known}
