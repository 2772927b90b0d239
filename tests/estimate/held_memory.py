"""Peak memory on each rank during training: live tensors in bytes by kind, in `OUTPUT/memory.json` for each job.

Each storage counts whole and once.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from train import config, launch, loop
from train.operations.monitoring import Operations
from train.operations.state import states_of

#: A storage with several uses counts for the first kind in this order.
KINDS = ("parameters", "buffers", "gradients", "masters", "optimizer")

Held = dict[str, list[Any]]


def main() -> None:
    try:
        launch.start()
        with mock.patch.object(loop, "Operations", Watching):
            for job in config.read_jobs(Path(sys.argv[1])):
                loop.run(job)
    except launch.ERRORS as error:
        launch.tell(error)
        sys.exit(1)
    finally:
        launch.stop()


class Watching(Operations):
    """The loop's operations, with a measurement of the engine's memory."""

    def started(self, engine: Any, resumed: tuple[Path, str] | None) -> None:
        super().started(engine, resumed)
        self.most = dict.fromkeys(KINDS, 0)

    def next_batch(self) -> torch.Tensor:
        if self.engine.step == self.config.steps - 1:
            self.engine.watch = self._look
            if hasattr(self.engine, "engine"):  # DeepSpeed's: after every gradient, too
                for parameter in self.engine.engine.module.parameters():
                    if parameter.requires_grad:
                        parameter.register_post_accumulate_grad_hook(self._look)
        return super().next_batch()

    def ended(self) -> None:
        everyone = launch.gather_objects(self.most)
        if dist.get_rank() == 0:
            (self.output / "memory.json").write_text(json.dumps(everyone))
        super().ended()

    def _look(self, *_: Any) -> None:
        for kind, size in measure(held(self.engine, self.config)).items():
            self.most[kind] = max(self.most[kind], size)


def measure(held: Mapping[str, Iterable[Any]]) -> dict[str, int]:
    """Return the storage bytes for each kind."""
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


def held(engine: Any, of: config.Config) -> Held:
    """Return this rank's tensors by kind."""
    if of.strategy == "megatron":
        return _of_megatron_fsdp(engine) if of.saving == "fsdp_dtensor" else _of_megatron(engine)
    return _of_zero(engine) if of.strategy in config.ZERO else _of_torch(engine)


def _of_torch(engine: Any) -> Held:
    """Return all tensors except DDP's buckets, invisible from Python."""
    parameters = list(engine.model.parameters())
    return {
        "parameters": parameters,
        "gradients": [parameter.grad for parameter in parameters],
        "optimizer": states_of(engine.optimizer),
    }


def _of_zero(engine: Any) -> Held:
    """Return ZeRO's tensors, without the temporary whole copies of ZeRO-3's parameters."""
    optimizer, parameters = engine.optimizer, list(engine.engine.module.parameters())
    gradients = [parameter.grad for parameter in parameters]
    if engine.stage == 3:
        masters = optimizer.fp32_partitioned_groups_flat
        parameters = [parameter.ds_tensor for parameter in parameters]
        gradients = [optimizer.grad_partitions_flat_buffer]
        buffers = [bucket.buffer for bucket in optimizer.ipg_buckets.values()]
    else:
        masters = optimizer.single_partition_of_fp32_groups
        gradients += [getattr(parameter, "grad_accum", None) for parameter in parameters]
        for parts in (*optimizer.averaged_gradients.values(), *optimizer.all_grad_tensors.values()):
            gradients += list(parts or ())
        buffers = [buffer for bucket in optimizer.ipg_buckets.values() for buffer in bucket.buffer]
        if optimizer.cpu_offload:
            buffers += optimizer.param_buffer_of_bit16_for_cpu_offload_groups
            buffers += [optimizer.temp_grad_buffer_for_cpu_offload, optimizer.temp_grad_buffer_for_gpu_offload]
    return {
        "parameters": parameters,
        "gradients": gradients,
        "masters": [*masters, *(master.grad for master in masters)],
        "optimizer": states_of(engine.engine.basic_optimizer),
        "buffers": buffers,
    }


def _of_megatron(engine: Any) -> Held:
    buffers = [buffer for chunk in engine.chunks for buffer in (*chunk.buffers, *chunk.expert_parallel_buffers)]
    masters: list[Any] = []
    for one in engine.optimizers:
        # The first with the distributed optimizer, the second without; neither in float32.
        for name in ("shard_fp32_from_float16_groups", "fp32_from_float16_groups"):
            masters += [master for group in getattr(one, name, ()) for master in group]
    return {
        "parameters": [parameter for chunk in engine.chunks for parameter in chunk.parameters()],
        "gradients": [buffer.grad_data for buffer in buffers],
        "masters": masters,
        "optimizer": [state for one in engine.optimizers for state in states_of(one.optimizer)],
    }


def _of_megatron_fsdp(engine: Any) -> Held:
    groups = engine.chunks[0].module.param_and_grad_buffer.parameter_groups
    return {
        "parameters": [group.model_weight_buffer.data for group in groups],
        "gradients": [group.main_grad_buffer.data for group in groups],
        "masters": [group.main_weight_buffer.data for group in groups],
        "optimizer": states_of(engine.optimizer.optimizer),
    }


if __name__ == "__main__":
    main()
