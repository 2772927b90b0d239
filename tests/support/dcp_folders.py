"""DCP folders written by torch, and edited with torch's own classes."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ckpt.compare.compare import Reader
from ckpt.compare.compare import check_replicas as compare_replicas
from ckpt.move.run import execute
from ckpt.plan.checkpoint import Checkpoint, Layout, ReadRequest
from ckpt.plan.planner import make_plan
from ckpt.plan.tensors import Tensor
from ckpt.runs.selection import Chooser
from converters.pytorch.dcp import DCP


def read(path: Path, tag: str | None = None) -> Checkpoint:
    found = Chooser([DCP], ReadRequest(tag)).open(path)
    assert found is not None
    return found


def write(checkpoint: Checkpoint, folder: Path, num_ranks: int | None = None) -> Path:
    execute(make_plan(checkpoint, DCP.lay_out(checkpoint, Layout(world_size=num_ranks))), folder)
    return folder


def save(state: dict[str, Any], folder: Path) -> Path:
    import torch.distributed.checkpoint as dcp

    dcp.save(state, checkpoint_id=folder, no_dist=True)
    return folder


def trained(bias: bool = True) -> tuple[Any, Any]:
    import torch

    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(3, 2, bias=bias), torch.nn.Linear(2, 5))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    return model, optimizer


def nested(model: Any, optimizer: Any, flat: bool = False) -> tuple[dict[str, Any], dict[str, Any]]:
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict

    return get_state_dict(model, optimizer, options=StateDictOptions(flatten_optimizer_state_dict=flat))


def edit(step: Path, change: Callable[[Any], None]) -> None:
    """Change the metadata with torch's own classes."""
    metadata = pickle.loads((step / ".metadata").read_bytes())
    change(metadata)
    (step / ".metadata").write_bytes(pickle.dumps(metadata))


def check_replicas(tensor: Tensor) -> None:
    with Reader() as reader:
        compare_replicas(tensor, reader)
