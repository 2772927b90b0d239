"""Changes to tensors in a safetensors or torch file, made by the formats' own libraries."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

Tensors = dict[str, torch.Tensor]


def change(path: Path, changed: Callable[[Tensors], Tensors]) -> None:
    """Rewrite the file with `changed` tensors. A torch file keeps everything else."""
    if path.suffix == ".safetensors":
        with safe_open(path, "pt") as file:
            metadata = file.metadata()
        save_file(changed(load_file(path)), path, metadata)
        return
    content: Any = torch.load(path, weights_only=False, map_location="cpu")
    holder = _holder(content)
    before = {key: value for key, value in holder.items() if isinstance(value, torch.Tensor)}
    for key in before:
        del holder[key]
    holder.update(changed(before))
    torch.save(content, path)


def tensors_in(path: Path) -> Tensors:
    """Return the tensors that `change` passes on."""
    if path.suffix == ".safetensors":
        return load_file(path)
    holder = _holder(torch.load(path, weights_only=False, map_location="cpu"))
    return {key: value for key, value in holder.items() if isinstance(value, torch.Tensor)}


def is_changeable(path: Path) -> bool:
    """Return True if the libraries here read the file; torchao's tensors need torchao."""
    try:
        return path.suffix == ".safetensors" or bool(torch.load(path, weights_only=False, map_location="cpu"))
    except ModuleNotFoundError:
        return False


def _holder(content: Any) -> dict[str, Any]:
    """Return the state dict in a torch file: the outermost dict with tensors."""
    if any(isinstance(value, torch.Tensor) for value in content.values()):
        return content  # type: ignore[no-any-return]
    return next(_holder(value) for value in content.values() if isinstance(value, dict) and value)
