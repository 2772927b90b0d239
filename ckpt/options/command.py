"""The declaration of a command."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

#: Entry-point group of the commands of other packages.
GROUP = "ckpt.commands"


@dataclass(frozen=True)
class Command:
    """A command, declared in one place: the `command.py` of its folder, or a module of another package.

    Commands of other packages are registered in the entry-point group `ckpt.commands`, as `module:OBJECT`.

    Attributes:
        name: Word on the command line, such as `merge-lora`.
        section: Title in `ckpt --help`, one of `ckpt.options.command.SECTIONS` or a new one.
        function: Function that runs it.  Each parameter is an argument or option in typer's notation, or a dataclass
            with an option for each field.  Its docstring is the help.
        examples: Commands for the end of the help, each with its meaning.
        guide: Page of the documentation about it.
        urls: Parameters that may be URLs.
        texts: Parameters that are no places, whatever they look like.
        writes: True if its work is the files that it writes, not the text that it prints.
        format_options: Kinds of options that formats declare and that it takes, in the parameter `options`.
        place: Place in its section; equal ones come in the order of their names.
    """

    name: str
    section: str
    function: Callable[..., None]
    examples: tuple[tuple[str, str], ...]
    guide: str = "command-line.md"
    urls: tuple[str, ...] = ()
    texts: tuple[str, ...] = ()
    writes: bool = False
    format_options: tuple[Literal["reading", "writing"], ...] = ()
    place: int = 100


#: Titles in `ckpt --help`, in this order; further ones follow.
CONVERT, LOOK, BEFOREHAND = SECTIONS = ("Convert and go on", "Look and compare", "Know beforehand")
