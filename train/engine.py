"""What the loop needs of a strategy; and of that, what most strategies have in the same way."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from train.config import Config


class Engine:
    """One run's model and optimizer under a strategy. Every method is collective: all ranks call it together."""

    config: Config
    optimizer: Any
    step = 0
    """Optimizer steps taken since the very beginning, resumed ones included."""
    sequences = 0
    """Sequences consumed since the very beginning: the position in the data."""
    grad_norm: float | None = None
    """The gradient's norm in the last step, before clipping; None where the framework does not say."""
    watch: Callable[..., None] = staticmethod(lambda: None)
    """Called after every backward pass."""

    @property
    def data_shard(self) -> tuple[int, int]:
        """This rank's part of every batch, and the number of parts; ranks that share a model read the same one."""
        return dist.get_rank(), dist.get_world_size()

    def train(self, micro_batches: list[torch.Tensor]) -> torch.Tensor:
        """One optimizer step on this rank's micro batches; returns the mean loss over them."""
        raise NotImplementedError

    def logits(self, input_ids: torch.Tensor) -> torch.Tensor:
        """The live model's logits in eval mode."""
        raise NotImplementedError

    def save(self, folder: Path) -> str:
        """Saves as the framework itself does and returns the checkpoint's tag."""
        raise NotImplementedError

    def load(self, folder: Path, tag: str) -> None:
        """Continues from a checkpoint of this strategy."""
        raise NotImplementedError

    def gather(self) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
        """The tensors and facts of the truth file (see truth/__init__.py), complete at least on rank 0."""
        raise NotImplementedError

    def close(self) -> None:
        """Frees everything, so that another run may follow in this process."""
        raise NotImplementedError
