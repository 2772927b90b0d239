"""Python keywords for options, from the declarations of commands and formats, and messages in the source."""

from __future__ import annotations

import ast
import inspect
from collections.abc import Iterable, Iterator
from functools import cache
from importlib import import_module
from string import Formatter

from ckpt.base.entries import load
from ckpt.base.flags import Positional, flag_of, type_of
from ckpt.base.words import Message
from ckpt.options.command import split_groups
from ckpt.plan import registry
from ckpt.plan.options import options_of


@cache
def keywords() -> dict[str, dict[str, type]]:
    """Return the keywords for each option, with their types. Several commands may have an option."""
    found: dict[str, dict[str, type]] = {}
    for place in import_module("ckpt.commands").places().values():
        command = load(place)
        taken = inspect.signature(load(command.python)).parameters if command.python else {}
        for parameter in split_groups(command.function)[0].values():
            if (flag := flag_of(parameter)) is None or isinstance(flag, Positional):
                continue
            if parameter.name in taken:
                for option in flag.names or (f"--{parameter.name.replace('_', '-')}",):
                    kind = type_of(parameter.annotation.__origin__)
                    found.setdefault(option.partition("/")[0], {})[parameter.name] = kind
    for owner in registry.declared_options():
        for one in options_of(owner):
            found.setdefault(one.flag, {})[one.name] = one.type
    return found


def keyword_of(option: str) -> str:
    """Return an option's keyword, or the option if Python has none."""
    known = keywords().get(option, {})
    same = option.removeprefix("--").replace("-", "_")
    return same if same in known or not known else next(iter(known))


def is_message(node: ast.AST) -> bool:
    return isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in ("Message", "Note")


def rendered(node: ast.Call) -> Message:
    """Return a message from the source, with VALUE for computed parts."""
    assert isinstance(node.args[0], ast.Constant), "the template is a literal"
    template = node.args[0].value
    fields = [field for _, field, _, _ in Formatter().parse(template) if field is not None]
    values = {one.arg: ["VALUE"] if isinstance(one.value, ast.List) else "VALUE" for one in node.keywords if one.arg}
    assert fields.count("") == len(node.args) - 1 and values.keys() <= {*fields}, template
    return Message(template, *["VALUE"] * fields.count(""), **values)


def messages(nodes: Iterable[ast.AST]) -> Iterator[tuple[int, Message]]:
    for node in nodes:
        if isinstance(node, ast.Call) and is_message(node):
            yield node.lineno, rendered(node)
