"""Edits to files of a model: DeepSpeed's pickles, and JSON."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file


def edit(path: Path, change: Callable[[dict[str, Any]], None]) -> None:
    """Edit a model file. Its content must be loadable with torch's safe loader."""
    saved = torch.load(path, weights_only=True)
    change(saved)
    torch.save(saved, path)


@contextmanager
def rewriting(path: Path) -> Iterator[Any]:
    """Yield a torch file's content, and save the file with its changes."""
    content = torch.load(path, weights_only=False)
    yield content
    torch.save(content, path)


def merge_json(path: Path, entries: Mapping[str, Any]) -> None:
    """Add or replace entries at the top of a JSON file."""
    path.write_text(json.dumps({**json.loads(path.read_text()), **entries}))


def save_model(folder: Path, tensors: Mapping[str, torch.Tensor], config: Mapping[str, Any] | None = None) -> Path:
    """Write a Hugging Face folder: a safetensors file and its config."""
    folder.mkdir(parents=True, exist_ok=True)
    save_file(dict(tensors), folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(config or {}))
    return folder
