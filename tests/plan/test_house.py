"""What each folder's `__init__` says of its imports is what it imports: of all of `ckpt` and `converters`."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

from tests.support.places import REPOSITORY

ROOMS = sorted(path.parent for root in ("ckpt", "converters") for path in (REPOSITORY / root).glob("*/__init__.py"))


def imported(room: Path) -> set[str]:
    """Names of our own packages, and of modules beside these, that a room's modules import."""
    found = set()
    for path in room.rglob("*.py") if room.is_dir() else [room]:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and node.module and not node.level:
                names = [f"{node.module}.{alias.name}" for alias in node.names]
            elif isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            else:
                continue
            found |= {".".join(name.split(".")[:2]) for name in names if name.startswith(("ckpt", "converters"))}
    return found - {f"{room.parent.name}.{room.stem}"}


@pytest.mark.parametrize("room", ROOMS, ids=lambda room: f"{room.parent.name}.{room.name}")
def test_a_room_says_what_it_imports(room: Path) -> None:
    document = ast.get_docstring(ast.parse((room / "__init__.py").read_text())) or ""
    said = re.search(r"May import: (.*)\.\Z", document, re.DOTALL)
    assert said is not None, "its docstring ends with what it may import"
    assert imported(room) <= set(re.findall(r"`([\w.]+)`", said[1])), "and that is all that it imports"


def test_arrows_between_the_rooms_of_the_core_stay_few() -> None:
    """A room is a folder or a module at the top; all imports count, those in functions and of types too."""
    top = [path for path in (REPOSITORY / "ckpt").iterdir() if path.suffix == ".py" or (path / "__init__.py").exists()]
    names = {path.stem for path in top}
    arrows = {
        (room.stem, other if other in names else "__init__")
        for room in top
        for other in (name.partition(".")[2] for name in imported(room) if name.split(".")[0] == "ckpt")
        if other != room.stem
    }
    assert len(arrows) <= 110, sorted(arrows)


def test_five_modules_at_most_stand_at_the_top() -> None:
    assert len([path for path in (REPOSITORY / "ckpt").glob("*.py") if path.name != "_version.py"]) <= 5
