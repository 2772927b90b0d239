"""The processes that carry something out together: torch.distributed's, where a script has started it."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, TypeVar

T = TypeVar("T")

_PATIENCE = timedelta(days=2)  # that a process may be waited for which converts


class Alone:
    """One process."""

    rank, size = 0, 1

    def gather(self, value: T) -> list[T]:
        """What each process gives, by rank; called by all of them."""
        return [value]


class TorchGroup(Alone):
    """All processes of torch.distributed, over gloo: what is exchanged stays off the GPUs."""

    def __init__(self, distributed: Any) -> None:
        self._distributed = distributed
        self._group = distributed.new_group(backend="gloo", timeout=_PATIENCE)
        self.rank, self.size = distributed.get_rank(), distributed.get_world_size()

    def gather(self, value: T) -> list[T]:
        """As `Alone.gather`.  Raises RuntimeError where a process has ended."""
        values: list[Any] = [None] * self.size
        self._distributed.all_gather_object(values, value, group=self._group)
        return values

    def close(self) -> None:
        """Called by all processes."""
        self._distributed.destroy_process_group(self._group)


@contextmanager
def the_callers() -> Iterator[Alone]:
    """The processes of the script that is running: those of torch.distributed if it is initialized."""
    distributed = sys.modules.get("torch.distributed")
    if distributed is None or not distributed.is_available() or not distributed.is_initialized():
        yield Alone()
        return
    group = TorchGroup(distributed)
    try:
        yield group
    finally:
        group.close()
