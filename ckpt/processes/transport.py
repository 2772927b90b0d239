"""Transports for messages between processes."""

from __future__ import annotations

import contextlib
import sys
from datetime import timedelta
from typing import Any, Protocol

SILENCE = timedelta(minutes=5)  # for a process on a lost node or network
ROLL_CALL = timedelta(seconds=2)  # for live processes after one has died
TELLING = timedelta(seconds=5)  # for the first process to print an error


class Transport(Protocol):
    rank: int
    size: int

    def all_gather(self, message: bytes) -> list[bytes]:
        """Return each process's message, by rank. Raise ConnectionError if a process has ended or is silent."""

    def missing(self) -> list[int]:
        """Return the ranks that have ended or are silent, if known, after a ConnectionError."""

    def close(self) -> None: ...


class Torch:
    """torch.distributed's processes, connected by gloo to keep messages off the GPUs.

    `store` is torch.distributed's, used to find dead processes.
    """

    def __init__(self, distributed: Any, store: Any = None) -> None:
        self._distributed, self._store = distributed, store
        self._group = distributed.new_group(backend="gloo", timeout=SILENCE)
        self.rank, self.size = distributed.get_rank(), distributed.get_world_size()

    def all_gather(self, message: bytes) -> list[bytes]:
        torch = sys.modules["torch"]
        length = torch.tensor([len(message)])
        lengths = [torch.empty_like(length) for _ in range(self.size)]
        try:
            self._distributed.all_gather(lengths, length, group=self._group)
            padded = torch.frombuffer(bytearray(message).ljust(int(max(lengths))), dtype=torch.uint8)
            buffers = [torch.empty_like(padded) for _ in range(self.size)]
            self._distributed.all_gather(buffers, padded, group=self._group)
        except RuntimeError as error:
            raise ConnectionError(str(error).partition(". This is")[0]) from None
        return [buffer[: int(one)].numpy().tobytes() for buffer, one in zip(buffers, lengths, strict=True)]

    def missing(self) -> list[int]:
        """Find the processes that do not answer in the store."""
        if self._store is None:
            return []
        keys = [f"alive/{rank}" for rank in range(self.size)]
        try:
            self._store.set(keys[self.rank], "")
            with contextlib.suppress(RuntimeError):
                self._store.wait(keys, ROLL_CALL)
            return [rank for rank, key in enumerate(keys) if not self._store.check([key])]
        except RuntimeError:  # the store was in the first process
            return [0]

    def close(self) -> None:
        with contextlib.suppress(RuntimeError):
            self._distributed.destroy_process_group(self._group)
