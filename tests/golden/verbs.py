"""Changes to files that sessions make without the shell."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import yaml

#: libyaml's, which are six times faster, if it is there.
LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
DUMPER = getattr(yaml, "CSafeDumper", yaml.SafeDumper)


def flip(file: str, at: str) -> None:
    """Change the lowest bit in one byte; a negative place counts from the end."""
    content = bytearray(Path(file).read_bytes())
    content[int(at)] ^= 1
    Path(file).write_bytes(content)


def half(file: str) -> None:
    os.truncate(file, Path(file).stat().st_size // 2)


def zero(file: str) -> None:
    Path(file).write_bytes(bytes(Path(file).stat().st_size))


def edit(content: Any, entries: Sequence[str]) -> Any:
    """Set entries: `name=value`, with dots between nested names; `name-` removes one."""
    for entry in entries:
        path, equals, value = entry.partition("=")
        *outer, name = (path if equals else path.removesuffix("-")).split(".")
        place = content
        for one in outer:
            place = place[one]
        if equals:
            place[name] = json.loads(value)
        else:
            del place[name]
    return content


def edit_json(file: str, *entries: str) -> None:
    Path(file).write_text(json.dumps(edit(json.loads(Path(file).read_text()), entries)))


def edit_yaml(file: str, *entries: str) -> None:
    content = yaml.load(Path(file).read_text(), LOADER)
    Path(file).write_text(yaml.dump(edit(content, entries), Dumper=DUMPER))


VERBS: dict[str, Callable[..., object]] = {
    "flip": flip,
    "half": half,
    "zero": zero,
    "edit-json": edit_json,
    "edit-yaml": edit_yaml,
}
