"""Search in a folder of runs: `outputs/RUN/checkpoint-N`."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

from ckpt.base.errors import CkptError, IncompleteError, SeveralRunsError
from ckpt.move.json_files import read_json
from ckpt.move.listing import names_in
from ckpt.runs.half_checkpoints import MODEL_FILE
from ckpt.runs.model_files import CONFIG, is_of_diffusers
from ckpt.runs.sentence_modules import check_has_model
from ckpt.runs.steps import has_record, is_step, run_at, searched_folders
from ckpt.runs.unread_files import may_hold_tensors

MANIFEST = "ckpt-manifest.json"
#: Library and class by folder name (diffusers 0.42, `pipelines/pipeline_utils.py`).
PIPELINE = "model_index.json"
#: Pipeline parts without weights.
_WITHOUT_WEIGHTS = re.compile(r".*(?:Scheduler|Guidance|(?:Tokenizer|Processor)(?:Fast)?|FeatureExtractor)")
_LEVELS = 2
_MAX_FOLDERS = 2000  # folders searched per level


def run_below(path: Path, holds: Callable[[Path], bool]) -> Path | None:
    """Return the only run folder below `path` that `holds` accepts, or None.

    It searches two levels. A folder with steps or a record is a run itself, and no inner folder replaces it. A
    conversion's output counts only if there is nothing else. Raise SeveralRunsError for several runs, or for a pipeline
    of several models, and IncompleteError for a model of diffusers or sentence-transformers without its weights.
    """
    if not path.is_dir() or run_at(path).steps or has_record(path):
        return None
    if not any(map(MODEL_FILE.fullmatch, names_in(path))):
        check_has_model(path)
    runs: list[Path] = []
    level = [path]
    for _ in range(_LEVELS):
        inside = [inner for folder in level for inner in _folders(folder)][:_MAX_FOLDERS]
        level = [folder for folder in inside if not _holds(folder, holds)]
        runs += [folder for folder in inside if folder not in level]
        for folder in level if is_step(path) else ():
            check_has_weights(folder)
    parts = models_of_pipeline(path)
    if len(parts) > 1:
        raise SeveralRunsError(path, sorted({*runs, *parts}))
    if len(runs) > 1:
        runs = [run for run in runs if not _is_converted(run)] or runs
    if len(runs) > 1:
        raise SeveralRunsError(path, sorted(runs))
    return runs[0] if runs else None


def check_has_weights(folder: Path) -> None:
    """Raise IncompleteError if a folder has only the config of a diffusers model."""
    if is_of_diffusers(folder) and not may_hold_tensors(folder):
        raise IncompleteError("the model's weights are missing", path=folder, expected=f"weights next to {CONFIG}")


def models_of_pipeline(path: Path) -> list[Path]:
    """Return the folders of a pipeline's models. They may be missing."""
    if not (path / PIPELINE).is_file():
        return []
    index = read_json(path / PIPELINE)
    parts = index.items() if isinstance(index, dict) else ()
    classes = {name: value[1] for name, value in parts if isinstance(value, list) and len(value) == 2}
    return [
        path / name
        for name, cls in classes.items()
        if isinstance(cls, str) and not _WITHOUT_WEIGHTS.fullmatch(cls) and Path(name).name == name
    ]


def _folders(folder: Path) -> list[Path]:
    try:
        steps = {step.path for step in run_at(folder).steps}
        inside = [p for p in searched_folders(folder) if not p.name.startswith(".") and not p.is_symlink()]
        return [p for p in inside if p not in steps]
    except (OSError, CkptError):
        return []


def _holds(folder: Path, holds: Callable[[Path], bool]) -> bool:
    try:
        return holds(folder)
    except CkptError:  # damaged, but a checkpoint
        return True


def _is_converted(folder: Path) -> bool:
    """Return True if a folder matches its manifest: no run has saved there since the conversion."""
    try:
        files = read_json(folder / MANIFEST)["files"] if (folder / MANIFEST).is_file() else {}
        sizes = {folder / name: file["bytes"] for name, file in files.items()}
        written = {place for name in sizes for place in (name, *name.parents)}
        is_same = all(file.stat().st_size == size for file, size in sizes.items())
        return bool(sizes) and is_same and all(step.path in written for step in run_at(folder).steps)
    except (OSError, CkptError, AttributeError, KeyError, TypeError):
        return False
