"""Conversions by three ranks together. Each writes `FOLDER/RANK.json`: the bytes already there, or the error."""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any
from unittest import mock

import torch.distributed as dist

from ckpt import api
from ckpt.errors import StorageError
from ckpt.move import run
from ckpt.plan.checkpoint import Layout
from ckpt.processes.group import ProcessGroup
from ckpt.processes.transport import Torch

SIZE = 4  # target ranks


def main() -> None:
    source, folder = map(Path, sys.argv[1:])
    store, rank, num_ranks = next(dist.rendezvous("env://"))
    dist.init_process_group("gloo", store=store, rank=rank, world_size=num_ranks)
    found: dict[str, Any] = {}

    def together(name: str, size: int = SIZE, to: str | None = None) -> None:
        """Record under `name` the result or error from a conversion to `to`."""
        conversion = api.plan(api.open(source), "zero3", Layout(world_size=size))
        try:
            with closing(Torch(dist, store)) as transport, ProcessGroup(transport) as group:
                found[name] = conversion.run(folder / (to or name), group=group)
        except Exception as error:
            found[name] = [type(error).__name__, str(error)]

    together("one node")
    with mock.patch.object(run, "_page_cache", lambda _: "ab"[rank // 2]):
        together("two nodes")
    with failing_at(2, rank == 1, disk_is_full):
        together("fails")
    together("other plan", SIZE + rank // 2)
    with failing_at(3, rank == 2, disk_is_full):
        together("fails, and is kept", to="goes on")
    together("goes on")
    try:
        with closing(Torch(dist, store)) as transport, ProcessGroup(transport) as group:
            if rank != 1:
                group.gather(rank)
    except StorageError as error:
        found["has ended while"] = str(error)
    Path(folder, f"{rank}.json").write_text(json.dumps(found))
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # like a launcher that does not end the others
    with failing_at(2, rank == 1, lambda: os._exit(9)):
        together("dies")
    Path(folder, f"{rank}.json").write_text(json.dumps(found))
    os._exit(0)  # torch's own shutdown would end all ranks


def disk_is_full() -> None:
    raise StorageError("no space on the disk")


def failing_at(number: int, is_here: bool, fail: Callable[[], None]) -> Any:
    """Call `fail` when this rank, if `is_here`, begins its file with this number."""
    create, left = run._create, number

    def create_or_fail(*arguments: Any) -> Any:
        nonlocal left
        left -= 1
        if is_here and not left:
            fail()
        return create(*arguments)

    return mock.patch.object(run, "_create", create_or_fail)


if __name__ == "__main__":
    main()
