"""Checkpoints of other programs that no format reads: their names, and a way to convert them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from ckpt.base.errors import NotFoundError
from ckpt.move.listing import names_in
from ckpt.runs.steps import searched_folders

#: Files that Orbax writes into a step or an item in a step.
_ORBAX = {"_CHECKPOINT_METADATA", "manifest.ocdbt", "_METADATA", "_sharding", "commit_success.txt"}
_WAYS = {
    "Orbax (JAX)": "load it with orbax.checkpoint, and save the arrays with "
    "safetensors.numpy.save_file as model.safetensors",
}


def foreign(path: Path) -> NotFoundError | None:
    """Return the error for another program's checkpoint at `path`, or None."""
    found = next((one for place in _places(path) for one in _program(place)), None)
    if found is None:
        return None
    return NotFoundError(f"ckpt doesn't read this format: {found}", path=path, hint=_WAYS[found])


def _places(path: Path) -> Iterator[Path]:
    """Yield `path` and two levels of folders: a run, its steps, and their content."""
    yield path
    if path.is_dir():
        inside = [one for one in searched_folders(path) if not one.name.startswith(".")]
        yield from inside
        for one in inside:
            yield from searched_folders(one)


def _program(path: Path) -> Iterator[str]:
    names = names_in(path) if path.is_dir() else [path.name]
    if _ORBAX & set(names):
        yield from _WAYS
