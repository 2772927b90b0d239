"""Tensors of a safetensors or a torch file, changed by the libraries that own the formats."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

Tensors = dict[str, torch.Tensor]


def change(path: Path, changed: Callable[[Tensors], Tensors]) -> None:
    """Write the file again with what `changed` makes of its tensors; a torch file keeps all else in it."""
    if path.suffix == ".safetensors":
        with safe_open(path, "pt") as file:
            metadata = file.metadata()
        save_file(changed(load_file(path)), path, metadata)
        return
    content: Any = torch.load(path, weights_only=False, map_location="cpu")
    holder = _holder(content)
    holder.update(changed({key: value for key, value in holder.items() if isinstance(value, torch.Tensor)}))
    torch.save(content, path)


def is_changeable(path: Path) -> bool:
    """Return True if the libraries here read the file; torchao's tensors need torchao."""
    try:
        return path.suffix == ".safetensors" or bool(torch.load(path, weights_only=False, map_location="cpu"))
    except ModuleNotFoundError:
        return False


def _holder(content: Any) -> dict[str, Any]:
    """The state dict in a torch file: the outermost dict that holds tensors."""
    if any(isinstance(value, torch.Tensor) for value in content.values()):
        return content  # type: ignore[no-any-return]
    return next(_holder(value) for value in content.values() if isinstance(value, dict) and value)
