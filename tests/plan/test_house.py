"""The house order: each folder's allowed imports, and the module under test in each test module."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

from tests.support.places import REPOSITORY

ROOMS = sorted(path.parent for root in ("ckpt", "converters") for path in (REPOSITORY / root).glob("*/__init__.py"))


def imported(room: Path) -> set[str]:
    """Return the packages and sibling modules imported by a room."""
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
    """A room is a folder or module at the top, except for the package itself; all imports count."""
    top = [path for path in (REPOSITORY / "ckpt").iterdir() if path.suffix == ".py" or (path / "__init__.py").exists()]
    names = {path.stem for path in top}
    top = [path for path in top if path.stem != "__init__"]
    arrows = {
        (room.stem, other if other in names else "__init__")
        for room in top
        for other in (name.partition(".")[2] for name in imported(room) if name.split(".")[0] == "ckpt")
        if other != room.stem
    }
    assert len(arrows) <= 85, sorted(arrows)


def test_five_modules_at_most_stand_at_the_top() -> None:
    assert len([path for path in (REPOSITORY / "ckpt").glob("*.py") if path.name != "_version.py"]) <= 5


#: Roots for modules under test.
ROOTS = ("ckpt", "converters", "train", "fixtures", "benchmarks")


def about(test: Path) -> set[str]:
    """Return the modules under test: the docstring begins with them, the first of a folder in full."""
    found, folder = set(), ""
    first = test.read_text().partition(": ")[0]
    for name in re.findall(r"`([\w/]+\.py)`", first):
        in_full = name.startswith(tuple(f"{root}/" for root in ROOTS))
        folder = name.rpartition("/")[0] if in_full else folder
        found.add(name if in_full else f"{folder}/{name}")
    return found


def test_every_large_module_has_a_test_module_that_names_it() -> None:
    tests = [path for path in (REPOSITORY / "tests").rglob("test_*.py") if path != Path(__file__)]
    named = set().union(*map(about, tests))
    modules = {str(path.relative_to(REPOSITORY)): path for root in ROOTS for path in (REPOSITORY / root).rglob("*.py")}
    assert sorted(named - modules.keys()) == [], "what a test module names is there"
    large = {name for name, path in modules.items() if name.startswith(("ckpt/", "converters/"))}
    large = {name for name in large if len(modules[name].read_text().splitlines()) > 150}
    assert sorted(large - named) == []
