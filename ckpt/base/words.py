"""Messages that name options: `--tp 2` on the command line, `tp=2` in Python."""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from string import Formatter
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from typing_extensions import Self

#: Command-line names that differ from the keyword.
FLAGS = {
    "output": "-o",
    "everything": "--all",
    "every_byte": "--bytes",
    "accept_settings": "--accept-setting",
    "ignore_files": "--ignore-file",
}


@dataclass(frozen=True)
class Keyword:
    """An option in a message. True is a switch, and a list is an option given several times."""

    name: str
    value: object = None

    @classmethod
    def without_value(cls, name: str, value: object) -> Self:
        return cls(name, True if value is True else None)

    @property
    def flag(self) -> str:
        return FLAGS.get(self.name) or f"--{self.name.replace('_', '-')}"

    def on_command_line(self) -> str:
        if self.value is None or self.value is True:
            return self.flag
        values = self.value if isinstance(self.value, list) else [self.value]
        return " ".join(f"{self.flag} {shlex.quote(str(value))}" for value in values)

    def in_python(self) -> str:
        if self.value is None:
            return self.name
        is_plain = isinstance(self.value, int | float | list) or self.value == "N"
        return f"{self.name}={self.value if is_plain else repr(str(self.value))}"


@dataclass(frozen=True)
class CommandHelp:
    """A command's help in a message. In a template: `{help=convert}`."""

    command: str

    def on_command_line(self) -> str:
        return f"`ckpt {self.command} --help`"

    def in_python(self) -> str:
        return f"help(ckpt.{self.command.replace('-', '_')})"


Part = str | Keyword | CommandHelp


class Message(str):
    """Text with options. As a string, it has the command line's words.

    A field with a name is an option, and `{}` is any text. Texts and `+` keep their options, f-strings don't.

        Message("use {dtype=fp32} for {}", "the masters")   # --dtype fp32, or dtype='fp32'
        Message("{tag} takes it", tag=name)
    """

    parts: tuple[Part, ...]

    def __new__(cls, template: str, *texts: object, **values: object) -> Self:
        return cls.of(_parsed(template, iter(texts), values))

    @classmethod
    def of(cls, parts: Iterable[Part]) -> Self:
        flat = [one for part in parts for one in (part.parts if isinstance(part, Message) else (part,))]
        message = super().__new__(cls, cls.text_of(flat))
        message.parts = tuple(flat)
        return message

    def __add__(self, other: str) -> Self:
        return self.of((self, other))

    def __radd__(self, other: str) -> Self:
        return self.of((other, self))

    def __reduce__(self) -> tuple[Any, ...]:
        return self.of, (self.parts,)

    @staticmethod
    def text_of(parts: Iterable[Part]) -> str:
        return "".join(one if isinstance(one, str) else one.on_command_line() for one in parts)


class Note(Message):
    """A message in a result's notes. As a string, it has Python's words, because callers read notes directly."""

    @staticmethod
    def text_of(parts: Iterable[Part]) -> str:
        return "".join(one if isinstance(one, str) else one.in_python() for one in parts)


def joined(separator: str, texts: Iterable[str]) -> Message:
    parts = [part for text in texts for part in (separator, text)]
    return Message.of(parts[1:])


def keywords_in(text: str | None) -> list[Keyword]:
    return [one for one in getattr(text, "parts", ()) if isinstance(one, Keyword)]


def in_python(text: str) -> str:
    """Return `text` with keywords instead of options."""
    return Note.text_of(_parts(text))


def on_command_line(text: str) -> str:
    return Message.text_of(_parts(text))


def _parts(text: str) -> tuple[Part, ...]:
    return text.parts if isinstance(text, Message) else (text,)


def _parsed(template: str, texts: Iterator[object], values: Mapping[str, object]) -> Iterator[Part]:
    for text, field, spec, conversion in Formatter().parse(template):
        yield text
        if field:
            name, _, value = (f"{field}:{spec}" if spec else field).partition("=")
            yield CommandHelp(value) if name == "help" else Keyword(name, _value(value) if value else values.get(name))
        elif field is not None:
            other = next(texts)
            yield (
                other
                if isinstance(other, Message | Keyword | CommandHelp)
                else f"{other!r}"
                if conversion
                else f"{other}"
            )


def _value(text: str) -> object:
    return True if text == "True" else int(text) if text.isdecimal() else text
