"""Python keywords for options, from the declarations of commands and formats."""

from __future__ import annotations

import inspect
from importlib import import_module
from typing import Any, Literal, get_args, get_origin

from ckpt.base.entries import load
from ckpt.base.flags import Positional, flag_of, type_of
from ckpt.base.words import Keyword
from ckpt.options.command import split_groups
from ckpt.plan import registry
from ckpt.plan.options import options_of


def keywords() -> dict[str, Keyword]:
    found: dict[str, Keyword] = {}
    for place in import_module("ckpt.commands").places().values():
        command = load(place)
        taken = inspect.signature(load(command.python)).parameters if command.python else {}
        for parameter in split_groups(command.function)[0].values():
            if parameter.name not in taken or (flag := flag_of(parameter)) is None or isinstance(flag, Positional):
                continue
            for option in flag.names or (f"--{parameter.name.replace('_', '-')}",):
                add(found, option, parameter.name, type_of(parameter.annotation.__origin__), flag.metavar)
    for owner in registry.declared_options():
        for one in options_of(owner):
            add(found, one.flag, one.name, Literal[one.choices] if one.choices else one.type, one.metavar)
    return found


def add(found: dict[str, Keyword], option: str, name: str, kind: Any, metavar: str | None) -> None:
    """Add an option. Several commands may have it, with different choices."""
    option = option.partition("/")[0].removeprefix("--")
    choices = get_args(kind) if get_origin(kind) is Literal else ()
    known = found.get(option)
    if known is not None and known.name != name and option != name.replace("_", "-"):
        return  # this name belongs to another command's option
    plain = str if choices else list if get_origin(kind) is list else kind if isinstance(kind, type) else str
    if known is not None:
        choices = (*known.choices, *choices)
    found[option] = Keyword(name, plain, choices, is_free=metavar in ("NAME", "TAG"))
