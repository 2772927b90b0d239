"""Ranks that call `ckpt.resume`, each on a node of its own: `tests.resume.nodes FOLDER CALLS`.

CALLS: JSON, for each rank paths and options by key. Each rank starts in `nodeRANK` and writes `RANK.json`.
"""

from __future__ import annotations

import json
import os
import socket
import sys
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

import ckpt
from ckpt.errors import CkptError
from ckpt.move import run


def main() -> None:
    folder, calls = Path(sys.argv[1]), json.loads(sys.argv[2])
    dist.init_process_group("gloo")
    rank, deal = dist.get_rank(), run.deal
    for name in ("WORLD_SIZE", "LOCAL_WORLD_SIZE", "RANK", "LOCAL_RANK"):
        del os.environ[name]
    os.chdir(folder / f"node{rank}")
    told: list[str] = []
    found: dict[str, Any] = {}
    shares: list[Any] = []

    def dealt(*what: Any) -> Any:
        shares.append(deal(*what))
        return shares[-1]

    with mock.patch.object(socket, "gethostname", lambda: f"node{rank}"), mock.patch.object(run, "deal", dealt):
        for key, (path, options) in calls[rank].items():
            try:
                found[key] = ckpt.resume(path, say=told.append, **options)
            except CkptError as error:
                found[key] = [type(error).__name__, str(error), error.what, error.expected, error.found]
    total = torch.ones(1)
    dist.all_reduce(total)  # the script's own group goes on
    share = sum(length for part in shares[-1] for _, length in part.todo) if shares else 0
    Path(folder, f"{rank}.json").write_text(json.dumps([found, told, share, total.item()]))
    dist.destroy_process_group()
