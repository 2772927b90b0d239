"""One rank of `benchmarks.load`, under torchrun: `python -m benchmarks.load_peer ZERO3 DCP NUM_LAYERS ROUNDS`."""

from __future__ import annotations

import json
import resource
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

import ckpt
from benchmarks.equal import zero3_tensors
from benchmarks.models import STEP, shapes


def main() -> None:
    """Print JSON on rank 0: both times, their ratios, bytes read and held by a rank, peak memory."""
    zero3, own, num_layers, num_rounds = sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
    dist.init_process_group("gloo")
    model, states = _empty(num_layers), {name: _empty(num_layers) for name in ("exp_avg", "exp_avg_sq")}
    optimizer = {fqn: {name: states[name][fqn] for name in states} | {"step": torch.zeros(())} for fqn in model}
    state = {"model": model, "optimizer": {"state": optimizer}}
    by_torch, by_ckpt = [], []
    read = 0
    for number in range(num_rounds):
        if number % 2 == 0:  # take turns in going first
            by_torch.append(_timed(lambda: dcp.load(state, storage_reader=dcp.FileSystemReader(own))))
        before = _bytes_read()
        by_ckpt.append(_timed(lambda: dcp.load(state, storage_reader=ckpt.StorageReader(zero3))))
        read = _bytes_read() - before
        _check(Path(zero3), model, states)
        if number % 2 == 1:
            by_torch.append(_timed(lambda: dcp.load(state, storage_reader=dcp.FileSystemReader(own))))
    held = sum(tensor.to_local().nbytes for one in (model, *states.values()) for tensor in one.values())
    if dist.get_rank() == 0:
        found: dict[str, Any] = {"dcp": statistics.median(by_torch), "ckpt": statistics.median(by_ckpt)}
        found["ratios"] = [ours / theirs for ours, theirs in zip(by_ckpt, by_torch, strict=True)]
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e6
        found |= {"bytes_read": read, "bytes_held": held, "peak_mb": peak}
        print(json.dumps(found))
    dist.destroy_process_group()


def _empty(num_layers: int) -> dict[str, DTensor]:
    size = dist.get_world_size()
    mesh = init_device_mesh("cpu", (size,))
    return {
        fqn: DTensor.from_local(torch.zeros(shape[0] // size, *shape[1:]), mesh, [Shard(0)])
        for fqn, shape in shapes(num_layers).items()
    }


def _check(zero3: Path, model: dict[str, DTensor], states: dict[str, dict[str, DTensor]]) -> None:
    """Compare ckpt's result with ZeRO-3's files, assembled by DeepSpeed's rule."""
    expected, rank, size = zero3_tensors(zero3 / f"global_step{STEP}"), dist.get_rank(), dist.get_world_size()
    for role, tensors in {"fp32": model, **states}.items():
        for fqn, tensor in tensors.items():
            part = expected[f"{fqn} {role}"]().chunk(size)[rank]
            assert torch.equal(tensor.to_local(), part), (fqn, role)


def _timed(load: Callable[[], object]) -> float:
    dist.barrier()
    start = time.perf_counter()
    load()
    dist.barrier()
    return time.perf_counter() - start


def _bytes_read() -> int:
    return int(Path("/proc/self/io").read_text().split()[1])


if __name__ == "__main__":
    main()
