"""Options shared by functions and the command line, declared without the command-line library, and type checks.

A field with a `Flag` in its annotation is also a command-line option.

    @dataclass(frozen=True)
    class Work(OptionGroup):
        workers: Annotated[int, Flag(help="Threads that copy.", min=0)] = 0
        progress: Callable[[int], None] | None = None  # only for functions

    @takes(Work)
    def copy(path: str, **keywords: Unpack[WorkKeywords]) -> None:
        work = Work.of(keywords)
"""

from __future__ import annotations

import builtins
import functools
import inspect
import sys
from collections import ChainMap, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from inspect import Parameter
from types import NoneType, UnionType
from typing import TYPE_CHECKING, Any, Literal, ParamSpec, TypeVar, Union, get_args, get_origin, get_type_hints

from ckpt.base.errors import UsageError
from ckpt.base.text import did_you_mean

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


_DTYPES = {
    **{name: name for name in ("fp32", "fp16", "bf16")},
    "float32": "fp32",
    "float16": "fp16",
    "bfloat16": "bf16",
}

P = ParamSpec("P")
R = TypeVar("R")


def check_types(function: Callable[P, R]) -> Callable[P, R]:
    """Make `function` raise UsageError for an unknown argument or a value its annotation forbids.

    If its `**options` are `Annotated` with a function, only the names returned by this function are known.
    """
    return takes()(function)


def takes(*groups: type[OptionGroup], others: Any = None) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Return a decorator like `check_types` for a function with the fields of `groups` as `**keywords`.

    `others` annotates further keywords, if any are allowed.
    """

    def decorated(function: Callable[P, R]) -> Callable[P, R]:
        signature = _signature(function, groups, others)
        known = [name for name, one in signature.parameters.items() if one.kind is not one.VAR_KEYWORD]
        known = [name for name in known if name != "self"]
        rest = next((name for name, one in signature.parameters.items() if one.kind is one.VAR_KEYWORD), None)
        hints = functools.cache(lambda: _hints(function, *groups, names_of=function))

        def declared() -> Sequence[Callable[[], Iterable[str]]]:
            """Return the functions that name further keywords. Empty if all are allowed."""
            of_rest = others if groups or rest is None else _hints(function, include_extras=True)[rest]
            return getattr(of_rest, "__metadata__", ())

        @functools.wraps(function)
        def run(*args: P.args, **kwargs: P.kwargs) -> R:
            name = f"ckpt.{function.__qualname__}"
            for unknown in kwargs.keys() - {*known}:
                taken = [*known, *(one for names in declared() for one in names())]
                if unknown not in taken and (rest is None or declared()):
                    hint = did_you_mean(unknown, taken)
                    raise UsageError(f"{name} takes no {unknown!r}", expected=", ".join(taken), hint=hint)
            try:
                bound = signature.bind(*args, **kwargs)
            except TypeError as error:
                raise UsageError(f"{name}: {error}", expected=str(signature).partition(" ->")[0]) from None
            for parameter in known:
                if parameter in bound.arguments and parameter in hints():
                    hint, value = hints()[parameter], bound.arguments[parameter]
                    if _allows(hint, value):
                        continue
                    if (dtype := short_dtype(value)) is not None and _allows(hint, dtype):
                        bound.arguments[parameter] = dtype
                    else:
                        near = did_you_mean(value, _choices(hint)) if isinstance(value, str) else None
                        raise UsageError(f"{name} takes no {parameter}={value!r}", expected=_words(hint), hint=near)
            return function(*bound.args, **bound.kwargs)

        if groups:
            vars(run)["__signature__"] = signature
            vars(run)["groups"] = groups
        return run

    return decorated


def _signature(function: Callable[..., Any], groups: Sequence[type[OptionGroup]], others: Any) -> inspect.Signature:
    signature = inspect.signature(function)
    if not groups:
        return signature
    *own, keywords = signature.parameters.values()
    own += [
        inspect.Parameter(one.name, inspect.Parameter.KEYWORD_ONLY, default=one.default, annotation=hints[one.name])
        for group in groups
        for hints in [_hints(group, names_of=function)]
        for one in fields(group)  # type: ignore[arg-type]
    ]
    return signature.replace(parameters=own if others is None else [*own, keywords.replace(annotation=others)])


def _hints(*owners: Any, names_of: Any = None, include_extras: bool = False) -> dict[str, Any]:
    """Names imported only for type checking are looked up in the module of `names_of`, and become Any if missing."""
    found: dict[str, Any] = {}
    for owner in owners:
        modules = [vars(sys.modules[one.__module__]) for one in (owner, names_of or owner)]
        names = ChainMap({"Unpack": defaultdict(lambda: Any)}, *modules, vars(builtins), defaultdict(lambda: Any))
        found |= get_type_hints(inspect.unwrap(owner), localns=names, include_extras=include_extras)
    return found


def short_dtype(value: object) -> str | None:
    """Return `bf16` for `bfloat16`, `torch.bfloat16` or the dtype object, and None for anything else."""
    return _DTYPES.get(str(value).removeprefix("torch."))


def _choices(hint: Any) -> list[str]:
    if get_origin(hint) in (Union, UnionType):
        return [choice for one in get_args(hint) for choice in _choices(one)]
    return [one for one in get_args(hint) if isinstance(one, str)] if get_origin(hint) is Literal else []


def _allows(hint: Any, value: object) -> bool:
    origin = get_origin(hint)
    if origin in (Union, UnionType):
        return any(_allows(one, value) for one in get_args(hint))
    if origin is Literal:
        return value in get_args(hint)
    kind = origin or hint
    if hint is Any or not isinstance(kind, type):
        return True
    if kind is float and isinstance(value, int):
        kind = int
    return isinstance(value, kind) and (kind is not int or not isinstance(value, bool))


def _words(hint: Any) -> str:
    if get_origin(hint) in (Union, UnionType):
        return " or ".join(map(_words, get_args(hint)))
    if get_origin(hint) is Literal:
        return " or ".join(map(repr, get_args(hint)))
    return "None" if hint is NoneType else getattr(hint, "__name__", str(hint))
