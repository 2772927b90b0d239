"""Training state in a folder to push: steps, optimizer, random states, run records."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import suppress
from pathlib import Path

from ckpt import api
from ckpt.base.errors import CkptError, LossError
from ckpt.base.words import Message
from ckpt.runs.file_table import TORCH_SUFFIXES
from ckpt.runs.opening import has_optimizer, holds_optimizer
from ckpt.runs.unread_files import owner_in_run

#: May hold an optimizer next to the model.
_TORCH_FILES = (*TORCH_SUFFIXES, ".tar", ".pkl")
_MAX_OPENED = 100
_MAX_SHOWN = 8


def check_no_run(folder: Path, names: Collection[str]) -> None:
    """Raise LossError if any file belongs to a training run."""
    found = list(dict.fromkeys(_run_files(folder, names)))
    if not found:
        return
    more = f" and {len(found) - _MAX_SHOWN} more" if len(found) > _MAX_SHOWN else ""
    raise LossError(
        "a push would publish the training state in this folder",
        path=folder,
        expected="a model or an adapter alone",
        found=f"{', '.join(found[:_MAX_SHOWN])}{more}",
        hint=Message(
            "`ckpt convert {} {}` writes the model alone; {whole_run=True} pushes everything",
            folder,
            _model_format(folder),
        ),
        code="push-of-a-run",
    )


def _run_files(folder: Path, names: Collection[str]) -> Iterator[str]:
    weights: set[str] = set()
    with suppress(CkptError):
        checkpoint = api.open(folder)
        own = {name for name in names if str(folder / name) in {file.path for file in checkpoint.files}}
        if has_optimizer(checkpoint):
            yield from sorted(own)
        weights = own
    num_opened = 0
    for name in names:
        if (entry := owner_in_run(name, name in weights)) is not None:
            yield entry
        elif name not in weights and name.endswith(_TORCH_FILES) and num_opened < _MAX_OPENED:
            num_opened += 1
            if holds_optimizer(folder / name):
                yield name


def _model_format(folder: Path) -> str:
    with suppress(CkptError):
        return "peft" if api.open(folder).is_adapter else "hf"
    return "hf"
