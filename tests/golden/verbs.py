"""What sessions do to files beside the shell's own commands."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path


def flip(file: str, at: str) -> None:
    """Change the lowest bit of one byte; a negative place counts from the end."""
    content = bytearray(Path(file).read_bytes())
    content[int(at)] ^= 1
    Path(file).write_bytes(content)


def half(file: str) -> None:
    os.truncate(file, Path(file).stat().st_size // 2)


def zero(file: str) -> None:
    Path(file).write_bytes(bytes(Path(file).stat().st_size))


def edit_json(file: str, *entries: str) -> None:
    """Set entries of a JSON file: `name=value`, with dots between names of nested ones; `name-` removes one."""
    content = json.loads(Path(file).read_text()) if Path(file).exists() else {}
    for entry in entries:
        path, equals, value = entry.partition("=")
        *outer, name = path.removesuffix("-" if not equals else "").split(".")
        place = content
        for one in outer:
            place = place[int(one) if isinstance(place, list) else one]
        if equals:
            place[name] = json.loads(value)
        else:
            del place[name]
    Path(file).write_text(json.dumps(content))


VERBS: dict[str, Callable[..., object]] = {"flip": flip, "half": half, "zero": zero, "edit-json": edit_json}
