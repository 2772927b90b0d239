"""Translation of command-line options in messages into Python keywords."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib import import_module

#: Words after an option that are never its value.
_WORDS = frozenset({"and", "is", "leaves", "lists", "merges", "names", "of", "or", "out", "says", "which"})
_VERBS = re.compile("ignores?|takes?")
_TO_FILL_IN = re.compile(r"[A-Z][A-Z_/]+|N")
_NAMED = re.compile(
    r"`ckpt (?P<command>[\w-]+) --help`"
    r"|`(?!--?[a-z]|[\s,.;:)])[^`]*`"
    r"|(?<![\w-])(?:-o (?P<folder>'[^']*'|[^\s`]*/[^\s`]*)|(?P<place>-o\b)"
    r"|--(?P<option>[a-z][a-z0-9-]*)(?![\w-])(?: (?P<value>'[^']*'|[^\s`;,'-][^\s`;,]*))?)"
)
_TWO_LISTS = re.compile(r"(\w+)=\[([^]]*)\] \1=\[")
#: Words before another program's option.
_OTHER_PROGRAM = re.compile(r"(?:\bMegatron-(?:LM|Bridge)\b|\bcontainer: |\bmegatron-core\b)[^;]*$")


@dataclass(frozen=True)
class Keyword:
    """A function's keyword for an option. `is_free` is True if any word may be the value."""

    name: str
    type: type
    choices: tuple[str, ...] = ()
    is_free: bool = False

    def takes(self, value: str) -> bool:
        if value.startswith("'") or _TO_FILL_IN.fullmatch(value) or value in self.choices:
            return True
        if self.is_free:
            return value not in _WORDS and not _VERBS.fullmatch(value)
        return not self.choices and any(character.isdecimal() or character == "/" for character in value)

    def given(self, value: str) -> str:
        plain = value.strip("'")
        bare = plain == "N" or (self.type in (int, float) and not _TO_FILL_IN.fullmatch(plain))
        said = plain if bare else repr(plain)
        return f"{self.name}={f'[{said}]' if self.type is list else said}"


@cache
def keywords() -> Mapping[str, Keyword]:
    # It is far above this module, and every error needs this module.
    found: Mapping[str, Keyword] = import_module("ckpt.options.keywords").keywords()
    return found


def in_python(text: str) -> str:
    """Return `text` with options as Python keywords: `--tp 2` becomes `tp=2`, and `--dequantize` `dequantize=True`."""
    said = _NAMED.sub(_keyword, text)
    while (joined := _TWO_LISTS.sub(r"\1=[\2, ", said)) != said:
        said = joined
    return said


def _keyword(found: re.Match[str]) -> str:
    if command := found["command"]:
        return f"help(ckpt.{command.replace('-', '_')})"
    if _OTHER_PROGRAM.search(found.string[: found.start()]):
        return found[0]
    if folder := found["folder"]:
        return f"output={folder.strip(chr(39))!r}"
    if found["place"]:
        return "output"
    keyword = keywords().get(found["option"] or "")
    if keyword is None:
        return found[0]  # a command, or an option only for the command line
    value = found["value"] or ""
    word = value.rstrip(".:)")
    rest = f" {value}" if value else ""
    if keyword.type is bool:
        return f"{keyword.name}=True{rest}"
    return f"{keyword.given(word)}{value[len(word) :]}" if word and keyword.takes(word) else f"{keyword.name}{rest}"
