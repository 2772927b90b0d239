"""Changing what DeepSpeed's model files hold."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch


def edit(path: Path, change: Callable[[dict[str, Any]], None]) -> None:
    """Change a model file, which holds nothing that torch's own safe loader refuses."""
    saved = torch.load(path, weights_only=True)
    change(saved)
    torch.save(saved, path)
