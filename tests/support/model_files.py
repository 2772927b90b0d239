"""Edits to DeepSpeed's model files."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch


def edit(path: Path, change: Callable[[dict[str, Any]], None]) -> None:
    """Edit a model file. Its content must be loadable with torch's safe loader."""
    saved = torch.load(path, weights_only=True)
    change(saved)
    torch.save(saved, path)
