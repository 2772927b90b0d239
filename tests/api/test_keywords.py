"""`ckpt/plan/keywords.py`, `groups.py`, `ckpt/base/flags.py`, `ckpt/__init__.py`: types for editors and mypy."""

from __future__ import annotations

import inspect
import os
import textwrap
from collections.abc import Iterator
from dataclasses import fields
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import ckpt
from ckpt.base.flags import OptionGroup, _hints
from ckpt.plan import registry
from ckpt.plan.options import options_of
from tests.support.places import REPOSITORY

MODULE = REPOSITORY / "ckpt/plan/keywords.py"
PACKAGE = REPOSITORY / "ckpt/__init__.py"
MARK = "    # tests/api/test_keywords.py writes these imports\n"
HEAD = '''"""Keywords of functions for editors and mypy, by the groups of options in `groups.py`.

`tests/api/test_keywords.py` writes this module.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from os import PathLike
from typing import Any, Literal

from typing_extensions import TypedDict

from ckpt.plan.checkpoint import Checkpoint
'''


def spelled(hint: Any) -> str:
    """Return an annotation in its source form."""
    origin, inner = get_origin(hint), get_args(hint)
    if origin in (Union, UnionType):
        return " | ".join(map(spelled, inner))
    if origin is Literal:
        return f"Literal[{', '.join(map(quoted, inner))}]"
    if hint in (None, NoneType):
        return "None"
    if hint is Any:
        return "Any"
    if isinstance(hint, list):
        return f"[{', '.join(map(spelled, hint))}]"
    return f"{origin.__name__}[{', '.join(map(spelled, inner))}]" if origin else str(hint.__name__)


def quoted(value: str) -> str:
    return f'"{value}"'


def typed_dict(name: str, bases: list[str], keys: dict[str, str]) -> Iterator[str]:
    head = f"class {name}({', '.join([*bases, 'total=False'])}):"
    if len(head) > 120:
        head = f"class {name}(\n" + "".join(f"    {one},\n" for one in [*bases, "total=False"]) + "):"
    lines = [f"{key}: {kind}" for key, kind in keys.items()] or ["pass"]
    yield f"\n\n{head}\n" + textwrap.indent("\n".join(lines), "    ") + "\n"


def module() -> str:
    """Return the source of the types module."""
    functions = {name: one for name in ckpt.__all__ if hasattr(one := getattr(ckpt, name), "groups")}
    groups: dict[type[OptionGroup], None] = dict.fromkeys(
        one for function in functions.values() for one in function.groups
    )
    found = {
        f"{group.__name__}Keywords": {one.name: spelled(hints[one.name]) for one in fields(group)}  # type: ignore[arg-type]
        for group in groups
        for hints in [_hints(group, names_of=ckpt.plan)]
    }
    for title, is_for_reading in (("ReadFormat", True), ("Format", False)):
        found[f"{title}Keywords"] = {
            one.name: f"{spelled(Literal[one.choices]) if one.choices else one.type.__name__} | None"
            for owner in registry.declared_options()
            for one in options_of(owner)
            if one.is_for_reading == is_for_reading
        }
    parts = [part for name, keys in found.items() for part in typed_dict(name, ["TypedDict"], keys)]
    for name, function in functions.items():
        bases = [f"{group.__name__}Keywords" for group in function.groups]
        rest = [one for one in inspect.signature(function).parameters.values() if one.kind is one.VAR_KEYWORD]
        bases += ["ReadFormatKeywords"] if rest else []
        bases += ["FormatKeywords"] if any(get_origin(one.annotation) is not Annotated for one in rest) else []
        title = "".join(map(str.title, name.split("_")))
        parts += typed_dict(f"{title}Keywords", bases, {})
    return HEAD + "".join(parts)


def block() -> str:
    """Return the package's lines for editors and mypy: each public name from its module."""
    by_module: dict[str, list[str]] = {}
    for name in dir(ckpt):
        if (place := ckpt._module_of(name)) is not None:
            by_module.setdefault(place, []).append(name)
    lines = [f"from {module} import {', '.join(names)}" for module, names in sorted(by_module.items())]
    public = ["__all__ = [", *(f'    "{name}",' for name in dir(ckpt)), "]"]
    return textwrap.indent("\n".join([*lines, "", *public]) + "\n", "    ")


def test_public_names_are_typed_by_the_declarations_of_commands() -> None:
    text = PACKAGE.read_text()
    head, tail = text.index(MARK) + len(MARK), text.index("else:\n")
    if os.environ.get("CKPT_GOLDEN") == "write":
        PACKAGE.write_text(text := text[:head] + block() + text[tail:])
    assert text[head : text.index("else:\n")] == block(), "CKPT_GOLDEN=write writes it anew"


def test_keywords_are_typed_by_the_groups_of_options() -> None:
    if os.environ.get("CKPT_GOLDEN") == "write":
        MODULE.write_text(module())
    # each name must be a keyword declared by a group or a format
    assert MODULE.read_text() == module(), "CKPT_GOLDEN=write writes it anew"
