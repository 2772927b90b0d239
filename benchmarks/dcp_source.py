"""Large FSDP2 checkpoint, written by torch's own DCP without training a model.

The ranks take turns in one process, with torch's process group `fake`, so only one rank's tensors are in memory.

    python -m benchmarks.dcp_source FOLDER NUM_LAYERS
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint import DefaultSavePlanner, FileSystemWriter
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.testing._internal.distributed.fake_pg import FakeStore

from benchmarks.models import GROUP, NUM_RANKS, STEP, shapes, write_config


def write(folder: Path, num_layers: int) -> None:
    writers = [FileSystemWriter(folder) for _ in range(NUM_RANKS)]
    planners = [DefaultSavePlanner() for _ in range(NUM_RANKS)]
    plans = []
    for rank in range(NUM_RANKS):
        _become(rank)
        planners[rank].set_up_planner(_state_dict(num_layers, rank), writers[rank].storage_meta(), rank == 0)
        writers[rank].set_up_storage_writer(rank == 0)
        plans.append(writers[rank].prepare_local_plan(planners[rank].create_local_plan()))
        planners[rank].state_dict = {}  # made again for writing
    plans, metadata = planners[0].create_global_plan(plans)
    plans = writers[0].prepare_global_plan(plans)
    results = []
    for rank in range(NUM_RANKS):
        _become(rank)
        planners[rank].set_up_planner(_state_dict(num_layers, rank), writers[rank].storage_meta(), rank == 0)
        results.append(writers[rank].write_data(planners[rank].finish_plan(plans[rank]), planners[rank]).wait())
        planners[rank].state_dict = {}
    writers[0].finish(metadata, results)
    write_config(folder, num_layers)


def _become(rank: int) -> None:
    if dist.is_initialized():
        dist.destroy_process_group()
    dist.init_process_group("fake", rank=rank, world_size=NUM_RANKS, store=FakeStore())


def _state_dict(num_layers: int, rank: int) -> dict[str, Any]:
    mesh = init_device_mesh("cpu", (NUM_RANKS,))
    generator = torch.Generator().manual_seed(rank)
    model: dict[str, Any] = {}
    states: dict[str, Any] = {}
    for fqn, shape in shapes(num_layers).items():
        size = shape[0] // NUM_RANKS  # all sizes divide evenly
        local = torch.randn((size, *shape[1:]), generator=generator) * 0.02
        for values, part in ((None, local), ("exp_avg", local * 0.01), ("exp_avg_sq", local * local)):
            tensor = DTensor.from_local(part, mesh, [Shard(0)])
            if values is None:
                model[fqn] = tensor
            else:
                states.setdefault(fqn, {})[values] = tensor
        states[fqn]["step"] = torch.tensor(float(STEP))
    optimizer = {"state": states, "param_groups": [GROUP | {"params": list(model)}]}
    return {"model": model, "optimizer": optimizer}


if __name__ == "__main__":
    write(Path(sys.argv[1]), int(sys.argv[2]))
