"""Interface between the training loop and a strategy, with shared defaults."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from train.config import Config


class Engine:
    """Model and optimizer in one run. Every method is collective: all ranks call it together."""

    config: Config
    optimizer: Any
    step = 0
    """Optimizer steps since the first run, including resumed ones."""
    sequences = 0
    """Sequences consumed since the first run: the position in the data."""
    grad_norm: float | None = None
    """Gradient norm in the last step before clipping, or None if the framework does not report it."""
    watch: Callable[..., None] = staticmethod(lambda: None)
    """Callback after every backward pass."""

    @property
    def data_shard(self) -> tuple[int, int]:
        """This rank's share in every batch, and the number of shares. Ranks with one model replica share data."""
        return dist.get_rank(), dist.get_world_size()

    def train(self, micro_batches: list[torch.Tensor]) -> torch.Tensor:
        """Take one optimizer step and return the mean loss."""
        raise NotImplementedError

    def logits(self, input_ids: torch.Tensor) -> torch.Tensor:
        raise NotImplementedError

    def save(self, folder: Path) -> str:
        """Save with the framework's own call and return the checkpoint's tag."""
        raise NotImplementedError

    def load(self, folder: Path, tag: str) -> None:
        raise NotImplementedError

    def gather(self) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
        """Return the tensors and facts for the truth file, complete at least on rank 0."""
        raise NotImplementedError

    def close(self) -> None:
        raise NotImplementedError
