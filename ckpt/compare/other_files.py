"""Comparison of two models' other files, for example the tokenizer."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from ckpt.base.errors import CkptError
from ckpt.base.text import one_line
from ckpt.move.json_files import parse_json
from ckpt.move.listing import names_in
from ckpt.move.source import read_file
from ckpt.plan.checkpoint import Checkpoint
from ckpt.runs.file_table import TRAINING_STATE, FileKind, fits, is_of
from ckpt.runs.model_files import CONFIG, companions, find_config
from ckpt.runs.search import MANIFEST

#: Configs, tokenizers, templates and code.
_SUFFIXES = (".bpe", ".codes", ".jinja", ".json", ".model", ".py", ".spm", ".tiktoken", ".txt", ".vocab", ".yaml")
#: Reports and licenses may differ between two copies.
_PASSED = (
    MANIFEST,
    "*.index.json",
    "*_results.json",
    "LICENSE*",
    "NOTICE*",
    "README*",
    "*requirements*",
)
_MAX_SHOWN = 4
_NAMING = ("_name_or_path", "name_or_path", "transformers_version")


def differing_files(a: Checkpoint, b: Checkpoint) -> Iterator[str]:
    """Yield a note on the files that differ.

    A training checkpoint or a single file may have no config and no tokenizer.
    """
    try:
        one, other = _file_contents(a), _file_contents(b)
    except CkptError as error:
        name = f" ({Path(error.path).name})" if error.path else ""
        yield f"only tensors are compared, not other files in A and B: {error.what}{one_line(name)}"
        return
    if any(not found and not _is_model_folder(side) for side, found in ((a, one), (b, other))):
        return
    both = sorted(one.keys() & other.keys() - {CONFIG})
    groups = {
        "differ": [name for name in both if not _is_same(name, one[name], other[name])],
        "only in A": sorted(one.keys() - other.keys()),
        "only in B": sorted(other.keys() - one.keys()),
    }
    if found := [f"{label}: {first_names(names)}" for label, names in groups.items() if names]:
        yield f"only tensors are compared, and other files differ between A and B: {'; '.join(found)}"


def first_names(found: list[str]) -> str:
    more = [f"{len(found) - _MAX_SHOWN} more"] if len(found) > _MAX_SHOWN else []
    return ", ".join([*map(one_line, found[:_MAX_SHOWN]), *more])


def _file_contents(side: Checkpoint) -> Mapping[str, bytes]:
    """Return files by name. The nearest folder wins."""
    folders = [Path(folder) for folder in side.run_folders]
    own = Path(side.path)
    found = companions(folders)
    adapters = [name for name in names_in(own) if is_of(name, FileKind.ADAPTER)] if own.is_dir() else []
    places = {name: own / name for name in (*adapters, *_model_files(side, own))}
    if config := find_config(folders):
        places[CONFIG] = config
    return {name: read_file(path) for name, path in places.items() if path.is_file()} | found


def is_of_training(checkpoint: Checkpoint) -> bool:
    """Return True for a checkpoint with ranks, a step or an optimizer."""
    state = checkpoint.state
    return bool(checkpoint.world_size or checkpoint.optimizer_states or state.param_groups or state.step is not None)


def _is_model_folder(side: Checkpoint) -> bool:
    return not is_of_training(side) and Path(side.path).is_dir()


def _model_files(side: Checkpoint, folder: Path) -> Iterator[str]:
    if not _is_model_folder(side):
        return
    opened = {file.path for file in side.files}
    for name in names_in(folder):
        is_passed = is_of(name, *TRAINING_STATE) or fits(name, _PASSED)
        if name.endswith(_SUFFIXES) and not is_passed and str(folder / name) not in opened:
            yield name


def _is_same(name: str, one: bytes, other: bytes) -> bool:
    """Return True for equal bytes, or for JSON with equal values."""
    if one == other:
        return True
    if not name.endswith(".json"):
        return False
    try:
        values = [_without_names(parse_json(content, Path(name))) for content in (one, other)]
    except CkptError:
        return False
    return bool(values[0] == values[1])


def _without_names(value: Any) -> Any:
    if not isinstance(value, Mapping):
        return value
    return {name: inner for name, inner in value.items() if name not in _NAMING}
