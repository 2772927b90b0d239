"""Entry points that other installed packages register with ckpt."""

from __future__ import annotations

import contextlib
import os
import sys
from functools import cache
from glob import glob
from importlib import import_module
from typing import Any

from ckpt.base.errors import UsageError


@cache
def entries(group: str) -> dict[str, str]:
    """Return `module:object` by name. Raise UsageError if two packages register different objects under one name."""
    if not _others_register():
        return {}
    from importlib.metadata import entry_points

    found: dict[str, str] = {}
    for entry in entry_points(group=group):
        if found.setdefault(entry.name, entry.value) != entry.value:
            raise UsageError(
                f"two installed packages register {entry.name!r} in {group}",
                found=f"{found[entry.name]} and {entry.value}",
                hint="uninstall one of them",
            )
    return found


@cache
def _others_register() -> bool:
    """Avoid `importlib.metadata`: it takes longer than planning most commands."""
    for folder in sys.path:
        if os.path.isfile(folder):  # a zip file
            return True
        for path in glob(os.path.join(folder, "*-info", "entry_points.txt")):
            with contextlib.suppress(OSError), open(path, "rb") as file:
                if b"[ckpt." in file.read():
                    return True
    return False


def load(where: str) -> Any:
    """Raise UsageError if another package's entry cannot be imported."""
    module, _, attribute = where.partition(":")
    try:
        return getattr(import_module(module), attribute)
    except (ImportError, AttributeError) as error:
        if module.startswith(("converters.", "ckpt.")):
            raise
        raise UsageError(
            f"an installed package registers {where!r}, but Python can't import it",
            found=f"{type(error).__name__}: {error}",
            hint="update that package, or uninstall it",
        ) from error


class Late:
    def __init__(self, name: str) -> None:
        self.name = name

    def __getattr__(self, name: str) -> Any:
        return getattr(import_module(self.name), name)


def lazy_module(name: str) -> Any:
    """Return the module `name`, imported on first use."""
    return Late(name)
