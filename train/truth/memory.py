"""What a rank really holds while it trains: bytes of the engine's live tensors, by what they are for.

A tensor counts with the whole of its storage, padding included, and a storage counts once. Looked at during and after
each backward pass of one step, before the optimizer's; of every kind the most that was seen.
"""

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from train import launch
from train.engine import Engine

#: In the order in which a storage that serves several purposes is counted.
KINDS = ("parameters", "buffers", "gradients", "masters", "optimizer")


class Watch:
    """Looks at an engine whenever it is called, and remembers the most of every kind."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.most = dict.fromkeys(KINDS, 0)
        if launch.on_gpu():
            torch.cuda.reset_peak_memory_stats()

    def __call__(self, *_: Any) -> None:
        """Looks now; arguments are those of whatever hook this is."""
        for kind, size in measure(self.engine.held()).items():
            self.most[kind] = max(self.most[kind], size)

    def write(self, path: Path) -> None:
        """The report of all ranks, a list by rank, on rank 0; on GPUs with the most that torch had `allocated`."""
        if launch.on_gpu():
            self.most["allocated"] = torch.cuda.max_memory_allocated()
        everyone = launch.of_all_ranks(self.most)
        if dist.get_rank() == 0:
            path.write_text(json.dumps(everyone, indent=2) + "\n")


def measure(held: Mapping[str, Iterable[Any]]) -> dict[str, int]:
    """Bytes of the storages of each kind."""
    seen: set[int] = set()
    sizes = {}
    for kind in KINDS:
        sizes[kind] = 0
        for tensor in held.get(kind, ()):
            if tensor is None:
                continue
            local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
            storage = local.untyped_storage()
            if storage.nbytes() and storage.data_ptr() not in seen:
                seen.add(storage.data_ptr())
                sizes[kind] += storage.nbytes()
    return sizes


def states_of(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    """An optimizer's states, without those that are one number for each parameter."""
    return [
        value
        for state in optimizer.state.values()
        for name, value in state.items()
        if torch.is_tensor(value) and name != "step"
    ]
